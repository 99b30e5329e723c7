"""A frozen prefix runs no backward pass, sends, reduces and steps nothing, and training stays the same to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec

from ds_dynmo.engine.comm.links import Links
from ds_dynmo.engine.comm.message_forms import Lane, MessageKind
from ds_dynmo.errors import ConfigError
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import FrozenBlock, layers, module_of
from tests.support.pages import code_blocks
from tests.support.training import (
    batches,
    build,
    check_moves_changed_nothing,
    drop_decision,
    freeze,
    layers_of,
    micro_batch,
    outcome_of,
    raw,
    raw_layer,
    reports_of,
    sleeping_engine,
    state,
    train_frozen,
    whole,
)

pytestmark = pytest.mark.ranks

nightly = partial(pytest.param, marks=pytest.mark.nightly)
WRAPPED = Case(stages=3, groups="two", clip=0.05)
NIGHTLY = [
    *(Case(stages=3, checkpoint_interval=interval, replicas=2) for interval in (0, 1)),
    Case(stages=3, checkpoint_interval=2, reentrant=False, replicas=2),
    *(replace(WRAPPED, precision=one) for one in ("bf16 immediate", "bf16 zero1", "fp32 zero1", "fp16 zero1")),
    *(replace(WRAPPED, precision=one, replicas=2) for one in ("bf16", "bf16 zero1 fp32sums")),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(WRAPPED, stages=2, precision="bf16 zero1", replicas=2), id="bf16 zero1"),
        pytest.param(Case(stages=3, checkpoint_interval=2), id="reentrant"),
        *map(nightly, NIGHTLY),
    ],
)
def test_freezing_equals_one_process(case: Case) -> None:
    """Layers freeze and thaw, and move: as on one stage, where without wrappers autograd skips the prefix by itself."""
    frozen = {1: 3, 2: 6, 3: 0}  # by batch: the number of leading layers that are frozen before it
    moves = {2: {1: [0, 2, 8], 2: [0, 7, 8], 3: [0, 3, 8]}, 3: {1: [0, 1, 5, 8], 2: [0, 5, 7, 8], 3: [0, 2, 3, 8]}}
    alone = replace(case, stages=1, checkpoint_interval=0)
    reference = run(alone.ranks, train_frozen, alone, frozen, {}, 5)
    moved = run(case.ranks, train_frozen, case, frozen, moves[case.stages], 5)
    assert moved[0]["losses"] == reference[0]["losses"]
    assert all(result["thawed"] == [] for result in moved)
    assert whole(moved) == whole(reference)


def freeze_and_thaw(precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state before layers freeze, move away and back and thaw, and after that. No batch comes between."""
    engine = build(Case(precision=precision, groups="two"))
    losses = [engine.train_batch(batches(engine)).item()]
    before = outcome_of(engine, losses)
    for prefix, partitions in ((3, [[0, 1, 8], [0, 4, 8]]), (0, [])):
        freeze(engine, prefix)
        engine.model_changed(f"{prefix} layers are frozen")
        drop_decision(engine)
        for partition in partitions:
            engine.rebalance(partition)
    return before, outcome_of(engine, losses)


@pytest.mark.parametrize("precision", ["bf16 zero1", nightly("bf16"), nightly("fp32 zero1")])
def test_what_the_optimizer_holds_for_a_layer_outlasts_its_freezing(precision: str) -> None:
    before, after = zip(*run(2, freeze_and_thaw, precision))
    assert whole(after) == whole(before)


def frozen_layers(case: Case) -> list[Any]:
    return [*layers(case)[:2], LayerSpec(FrozenBlock, 1), LayerSpec(FrozenBlock, 2), *layers(case)[4:]]


def trains(step: int, layer: int, name: str) -> bool:
    """Tell whether a parameter is to train: not two layers at first, then not biases, then not the tied embedding."""
    if step < 2:
        return layer not in (2, 3)
    return "bias" not in name if step == 2 else layer not in (0, 7) or step == 5


def freeze_in_turn(precision: str, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Freeze parts of the model and thaw them, and check after each batch that it trained exactly what it was to."""
    engine = build(Case(tied=True, precision=precision, groups="two"), frozen_layers)
    data, losses = batches(engine), []

    def here() -> dict[tuple[int, str], torch.nn.Parameter]:
        return {(i, name): p for i, layer in layers_of(engine).items() for name, p in layer.named_parameters()}

    freezes = [p for (i, _), p in here().items() if i == 0]
    for half in (True, False):
        for parameter in freezes:
            parameter.requires_grad_(not half)
        if half:
            with pytest.raises(ConfigError, match="tied by the key 'embedding'"):
                engine.model_changed("half a tie is frozen")
    for step in range(6):
        if step in (2, 3, 5):
            for place, parameter in here().items():
                parameter.requires_grad_(trains(step, *place))
            engine.model_changed("others train")
        drop_decision(engine)
        if moves and step:
            engine.rebalance(moves[step - 1])
        before = {place: raw(parameter) for place, parameter in here().items()}
        losses.append(engine.train_batch(data).item())
        for place, parameter in here().items():
            assert (raw(parameter) != before[place]) == trains(step, *place), (step, place)
    return outcome_of(engine, losses)


@pytest.mark.parametrize("precision", ["bf16 zero1", *map(nightly, ("fp32", "bf16", "fp32 zero1"))])
def test_layers_frozen_from_the_start_single_parameters_and_ties_freeze_and_thaw(precision: str) -> None:
    moves = [[0, 2, 8], [0, 7, 8], [0, 3, 8], [0, 7, 8], [0, 3, 8]]
    still, moved = run_each(2, freeze_in_turn, (precision, []), (precision, moves))
    check_moves_changed_nothing(still, moved)


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


def count_backward_work() -> list[dict[str, int]]:
    """Count the work of a batch with 4 frozen layers and of one with 6."""
    engine = build(Case(stages=3, micro_batches=2, dynmo={"interval": 0, "profile": {"warmup_batches": 99}}))
    data, counts = batches(engine), {}
    engine.train_batch(data)
    send, sum_gradients, backward = Links.send, engine._get_gradients_for_reduction, torch.autograd.backward

    def counting_send(self: Links, lane: Lane, tensors: Sequence[torch.Tensor], *form: Any) -> None:
        counts["gradients sent"] |= int(lane.kind is MessageKind.GRADIENT and len(tensors) > 0)
        send(self, lane, tensors, *form)

    def counting_reduce() -> Any:
        found = sum_gradients()
        counts["reduced"] = len(found[0])
        return found

    def counting_backward(*args: Any, **kwargs: Any) -> Any:
        counts["backward"] = 1
        return backward(*args, **kwargs)

    Links.send, torch.autograd.backward = counting_send, counting_backward  # type: ignore[method-assign, assignment]
    engine._get_gradients_for_reduction = counting_reduce
    engine.before_step(lambda: counts.update(gradients=sum(p.grad is not None for p in engine.module.parameters())))
    found = []
    for prefix in (4, 6):
        freeze(engine, prefix)
        engine.model_changed("frozen")
        drop_decision(engine)
        counts.update({"backward": 0, "gradients sent": 0, "gradients": 0, "reduced": 0})
        engine.train_batch(data)
        found.append({**counts})
    Links.send, torch.autograd.backward = send, backward  # type: ignore[method-assign, assignment]
    return found


def test_a_frozen_stage_runs_no_backward_pass_and_receives_no_gradient() -> None:
    within_a_stage, whole_stages = zip(*run(3, count_backward_work))
    assert [c["backward"] for c in within_a_stage] == [0, 1, 1]
    assert [c["gradients sent"] for c in within_a_stage] == [0, 0, 1]
    assert [c["backward"] for c in whole_stages] == [0, 0, 1]
    assert [c["gradients sent"] for c in whole_stages] == [0, 0, 0]
    for counts in (within_a_stage, whole_stages):
        assert counts[0]["gradients"] == 0 and counts[0]["reduced"] == 0


def freeze_all() -> None:
    """Freeze all layers without a word, then say so, and train on."""
    engine = build(Case())
    data = batches(engine)
    engine.train_batch(data)
    freeze(engine, 8)
    with pytest.raises(ConfigError, match=r"was frozen: call engine\.model_changed"):
        engine.train_batch(data)
    engine.model_changed("all is frozen")
    drop_decision(engine)
    before = state(engine)
    engine.train_batch(data), engine.train_batch(data)
    assert engine.global_steps == 3 and state(engine) == before


def test_a_fully_frozen_model_still_runs_once_model_changed_was_called() -> None:
    run(2, freeze_all)


def freeze_with_own_gradients() -> None:
    """Freeze a layer after a backward pass of the user's own, whose gradients no step takes."""
    engine = build(Case(stages=1, precision="bf16"))
    data = batches(engine)
    engine.train_batch(data)
    frozen = [*layers_of(engine)[2].parameters()]
    sum(parameter.float().sum() for parameter in frozen).backward()  # type: ignore[union-attr]
    for parameter in frozen:
        parameter.requires_grad_(False)
    engine.model_changed("layer 2 is frozen")
    drop_decision(engine)
    engine.train_batch(data)
    assert all(parameter.grad is None for parameter in frozen)


def test_a_frozen_layer_keeps_no_memory_for_gradients() -> None:
    run(1, freeze_with_own_gradients)


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
