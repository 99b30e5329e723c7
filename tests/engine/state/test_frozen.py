"""A frozen prefix runs no backward pass, sends, reduces and steps nothing, and training stays the same to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec

from ds_dynmo.engine.comm.links import Links
from ds_dynmo.engine.comm.message_forms import Lane, MessageKind
from tests.support.configs import Case, config
from tests.support.harness import RankError, run, run_each
from tests.support.models import FrozenBlock, layers, module_of
from tests.support.pages import code_blocks
from tests.support.training import (
    batches,
    build,
    drop_decision,
    freeze,
    gather,
    layers_of,
    micro_batch,
    outcome_of,
    raw,
    raw_layer,
    reports_of,
    sleeping_engine,
    state,
    train_and_move,
    train_frozen,
    whole,
)

pytestmark = pytest.mark.ranks


def check_as_on_one_stage(case: Case, alone: Case) -> None:
    """Freeze and thaw layers on three stages, with and without moves, and compare with one stage."""
    frozen = {2: 3, 4: 6, 5: 0}  # by batch: the number of leading layers that are frozen before it
    moves = {1: [0, 1, 5, 8], 3: [0, 5, 7, 8], 4: [0, 2, 3, 8]}
    reference = run(alone.ranks, train_frozen, alone, frozen, {})
    still, moved = run_each(case.ranks, train_frozen, (case, frozen, {}), (case, frozen, moves))
    for results in (still, moved):
        assert results[0]["losses"] == reference[0]["losses"]
        assert all(result["thawed"] == [] for result in results)
        assert whole(results) == whole(reference)


@pytest.mark.parametrize(
    ("interval", "reentrant", "replicas"),
    [
        *((0, True, 2), (2, True, 1), (2, False, 1)),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((0, True, 1), (1, True, 1))),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, True, 2), (2, True, 2))),
        pytest.param(2, False, 2, marks=pytest.mark.nightly),
    ],
)
def test_freezing_equals_one_process(interval: int, reentrant: bool, replicas: int) -> None:
    """It equals a plain one-stage run, whose autograd skips the frozen prefix by itself."""
    case = Case(stages=3, checkpoint_interval=interval, reentrant=reentrant, replicas=replicas)
    check_as_on_one_stage(case, Case(stages=1, replicas=replicas))


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        *(("bf16 immediate", 1), ("bf16 zero1", 2), ("fp32 zero1", 1)),
        *(pytest.param(one, 1, marks=pytest.mark.nightly) for one in ("bf16", "bf16 zero1", "bf16 zero1 fp32sums")),
        *(pytest.param(precision, 2, marks=pytest.mark.nightly) for precision in ("bf16", "fp32 zero1")),
        pytest.param("bf16 zero1 fp32sums", 2, marks=pytest.mark.nightly),
    ],
)
def test_freezing_takes_effect_under_every_wrapper(precision: str, replicas: int) -> None:
    case = Case(stages=3, precision=precision, replicas=replicas, groups="two", clip=0.05)
    check_as_on_one_stage(case, replace(case, stages=1))


def freeze_and_thaw(precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state before layers freeze, move away and back and thaw, and after that. No batch comes between."""
    engine = build(Case(precision=precision, groups="two"))
    data = batches(engine)
    losses = [engine.train_batch(data).item() for _ in range(2)]
    before = outcome_of(engine, losses)
    for prefix, partitions in ((3, [[0, 1, 8], [0, 4, 8]]), (0, [])):
        freeze(engine, prefix)
        engine.model_changed(f"{prefix} layers are frozen")
        drop_decision(engine)
        for partition in partitions:
            engine.rebalance(partition)
    return before, outcome_of(engine, losses)


@pytest.mark.parametrize("precision", ["bf16", "fp32 zero1"])
def test_what_the_optimizer_holds_for_a_layer_outlasts_its_freezing(precision: str) -> None:
    before, after = zip(*run(2, freeze_and_thaw, precision))
    assert whole(after) == whole(before)


def freeze_biases(precision: str, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    engine = build(Case(precision=precision, optimizer="SGD"))
    data, losses, waiting = batches(engine), [], list(moves)

    def biases() -> dict[str, bytes]:
        mine = {f"{i}.{n}": raw(p) for i, m in layers_of(engine).items() for n, p in m.named_parameters()}
        everywhere = {k: v for part in gather(mine) for k, v in part.items()}
        return {name: value for name, value in everywhere.items() if "bias" in name}

    def batch() -> dict[str, bytes]:
        drop_decision(engine)
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
        return biases()

    def let_train(trains: bool) -> None:
        for module in layers_of(engine).values():
            for name, parameter in module.named_parameters():
                if "bias" in name:
                    parameter.requires_grad_(trains)
        engine.model_changed("biases")

    before = batch()
    let_train(False)
    batch()
    frozen = batch()
    let_train(True)
    after = batch()
    changed = {"while frozen": frozen != before, "afterwards": after != frozen}
    return {"losses": losses, "biases": after, "changed": changed}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
def test_single_parameters_can_be_frozen(precision: str) -> None:
    results = [run(2, freeze_biases, precision, moves) for moves in ([], [[0, 2, 8], [0, 6, 8]])]
    assert results[0] == results[1]
    assert results[0][0]["changed"] == {"while frozen": False, "afterwards": True}


EXAMPLE = code_blocks("api.md", "Freeze layers", "python")


def follow_the_example(case: Case, partition: list[int]) -> dict[str, Any]:
    """Run the code that is printed, then move layers."""
    data = (micro_batch(number, 0) for number in itertools.count())
    names: dict[str, Any] = {"module": module_of(case), "config": config(case), "steps": 4, "data_iter": data}
    exec(EXAMPLE[0], names)
    engine = names["engine"]
    before = {number: raw_layer(layer) for number, layer in engine.layers().items()}
    drop_decision(engine)
    engine.rebalance(partition)
    here = engine.layers()
    assert here == layers_of(engine)  # the same modules
    trains = {number: any(p.requires_grad for p in layer.parameters()) for number, layer in here.items()}
    return {"before": before, "after": {n: raw_layer(layer) for n, layer in here.items()}, "trains": trains}


def layers_of_ties(case: Case) -> tuple[list[int], bool]:
    engine = build(case)
    here = engine.layers()
    return list(here), here.get(0) is here.get(7)


def test_layers_are_found_by_number_wherever_they_are() -> None:
    """The example freezes layers 0 to 2 of 8, of which 6 is a function; tied uses on one stage are one module."""
    still = Case(dynmo={"interval": 0, "min_improvement": 0.99})
    first, second = run(2, follow_the_example, still, [0, 2, 8])
    assert [list(rank["before"]) for rank in (first, second)] == [[0, 1, 2, 3], [4, 5, 7]]
    assert [rank["trains"] for rank in (first, second)] == [
        {0: False, 1: False},
        {2: False, **{number: True for number in (3, 4, 5, 7)}},
    ]
    assert {**first["after"], **second["after"]} == {**first["before"], **second["before"]}
    apart, together = Case(tied=True), Case(stages=1, replicas=2, tied=True)
    stock, shared, split = run_each(2, layers_of_ties, (replace(together, dynmo=None),), (together,), (apart,))
    assert stock == shared == [([0, 1, 2, 3, 4, 5, 7], True)] * 2
    assert split == [([0, 1, 2, 3], False), ([4, 5, 7], False)]


def unfreeze_later(precision: str, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    def frozen_layers(case: Case) -> list[Any]:
        return [*layers(case)[:2], LayerSpec(FrozenBlock, 1), LayerSpec(FrozenBlock, 2), *layers(case)[4:]]

    engine = build(Case(precision=precision, groups="two"), frozen_layers)
    data = batches(engine)

    def everywhere() -> dict[int, list[bytes]]:
        mine = {index: raw_layer(module) for index, module in layers_of(engine).items()}
        return {k: v for part in gather(mine) for k, v in part.items() if k in (2, 3)}

    first = everywhere()
    losses = train_and_move(engine, data, moves, 2)
    frozen = everywhere()
    freeze(engine, 0)
    engine.model_changed("all train")
    drop_decision(engine)
    losses += train_and_move(engine, data, [], 2)
    return {
        **outcome_of(engine, losses),
        "moved while frozen": frozen != first,
        "trained": everywhere() != frozen,
    }


@pytest.mark.parametrize("precision", ["bf16", "fp32 zero1"])
def test_layers_frozen_from_the_start_train_once_they_thaw(precision: str) -> None:
    """Layers that are frozen at initialize train once they thaw, though DeepSpeed's wrappers never saw them."""
    still, moved = (run(2, unfreeze_later, precision, moves) for moves in ([], [[0, 2, 8], [0, 6, 8]]))
    assert [r["losses"] for r in still] == [r["losses"] for r in moved]
    assert whole(still) == whole(moved)
    assert still[0]["moved while frozen"] is False and still[0]["trained"] is True


def count_backward_work(prefix: int) -> dict[str, int]:
    engine = build(Case(stages=3, micro_batches=2, dynmo={"interval": 0, "profile": {"warmup_batches": 99}}))
    data = batches(engine)
    engine.train_batch(data)
    freeze(engine, prefix)
    engine.model_changed("frozen")
    drop_decision(engine)
    counts = {"backward": 0, "gradients sent": 0, "gradients": 0, "reduced": 0}
    send, sum_gradients = Links.send, engine._get_gradients_for_reduction

    def counting_send(self: Links, lane: Lane, tensors: Sequence[torch.Tensor], *form: Any) -> None:
        counts["gradients sent"] |= int(lane.kind is MessageKind.GRADIENT and len(tensors) > 0)
        send(self, lane, tensors, *form)

    def counting_reduce() -> Any:
        found = sum_gradients()
        counts["reduced"] = len(found[0])
        return found

    Links.send, engine._get_gradients_for_reduction = counting_send, counting_reduce  # type: ignore[method-assign]
    original = torch.autograd.backward

    def counting_backward(*args: Any, **kwargs: Any) -> Any:
        counts["backward"] = 1
        return original(*args, **kwargs)

    torch.autograd.backward = counting_backward  # type: ignore[assignment]
    engine.before_step(lambda: counts.update(gradients=sum(p.grad is not None for p in engine.module.parameters())))
    engine.train_batch(data)
    Links.send, torch.autograd.backward = send, original  # type: ignore[method-assign, assignment]
    return counts


def test_a_frozen_stage_runs_no_backward_pass_and_receives_no_gradient() -> None:
    within_a_stage, whole_stages = run_each(3, count_backward_work, (4,), (6,))
    assert [c["backward"] for c in within_a_stage] == [0, 1, 1]
    assert [c["gradients sent"] for c in within_a_stage] == [0, 0, 1]
    assert [c["backward"] for c in whole_stages] == [0, 0, 1]
    assert [c["gradients sent"] for c in whole_stages] == [0, 0, 0]
    for counts in (within_a_stage, whole_stages):
        assert counts[0]["gradients"] == 0 and counts[0]["reduced"] == 0


def train_all_frozen() -> dict[str, Any]:
    engine = build(Case())
    data = batches(engine)
    engine.train_batch(data)
    freeze(engine, 8)
    engine.model_changed("all is frozen")
    drop_decision(engine)
    before = state(engine)
    engine.train_batch(data), engine.train_batch(data)
    return {"steps": engine.global_steps, "state": state(engine), "state when frozen": before}


def test_a_fully_frozen_model_still_runs() -> None:
    for result in run(2, train_all_frozen):
        assert result["steps"] == 3 and result["state"] == result["state when frozen"]


def freeze_silently() -> None:
    engine = build(Case())
    engine.train_batch(batches(engine))
    freeze(engine, 2)
    engine.train_batch(batches(engine))


def test_freezing_without_model_changed_is_an_error_that_names_it() -> None:
    with pytest.raises(RankError, match="model_changed"):
        run(2, freeze_silently)


def freeze_half_a_tie() -> None:
    engine = build(Case(tied=True))
    freeze(engine, 1)
    engine.model_changed("half")


def test_half_a_tie_cannot_be_frozen() -> None:
    with pytest.raises(RankError, match="tied by the key 'embedding'"):
        run(2, freeze_half_a_tie)


TIE = (0, 7)  # both uses of the embedding


def freeze_tie(precision: str, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Freeze all uses of a tied layer, and thaw them."""
    engine = build(Case(tied=True, precision=precision))
    data, losses, waiting = batches(engine), [], list(moves)

    def tie() -> list[bytes]:
        mine = [raw_layer(m) for i, m in sorted(layers_of(engine).items()) if i in TIE]
        return next(filter(None, gather(mine[0] if mine else [])))

    changed = []
    for tie_trains in (True, False, True):
        for index, module in layers_of(engine).items():
            if index in TIE:
                module.requires_grad_(tie_trains)
        before = tie()
        engine.model_changed("the tie")
        for _ in range(2):
            drop_decision(engine)
            losses.append(engine.train_batch(data).item())
            if waiting:
                engine.rebalance(waiting.pop(0))
        changed.append(tie() != before)
    return {"losses": losses, "state": state(engine), "replica": 0, "changed": changed}


@pytest.mark.parametrize(
    "precision",
    [pytest.param("fp32", marks=pytest.mark.nightly), pytest.param("bf16", marks=pytest.mark.nightly), "bf16 zero1"],
)
def test_all_uses_of_a_tied_layer_freeze_and_thaw(precision: str) -> None:
    together, apart = [0, 7, 8], [0, 3, 8]
    still, moved = (run(2, freeze_tie, precision, moves) for moves in ([], [apart, together, apart, apart]))
    assert [r["losses"] for r in still] == [r["losses"] for r in moved]
    assert whole(still) == whole(moved)
    assert all(r["changed"] == [True, False, True] for r in [*still, *moved])


def freeze_sleeping(count: int) -> dict[str, Any]:
    engine, data = sleeping_engine({"interval": 0}, [0.004] * count, 2)
    for _ in range(2):
        engine.train_batch(data)
    before = engine.partition
    freeze(engine, count // 2)
    engine.model_changed("half is frozen")
    for _ in range(4):
        engine.train_batch(data)
    return {"before": before, "partition": engine.partition, "reason": reports_of(engine)[-1].reason}


def test_a_model_that_changed_is_profiled_and_rebalanced() -> None:
    result = run(2, freeze_sleeping, 8)[0]
    assert result["reason"] == "half is frozen"
    assert result["before"] == [0, 4, 8] and result["partition"] in ([0, 5, 8], [0, 6, 8])
