"""Moves while a batch trains: a run with them equals one without, to the bit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import nn

import ds_dynmo
from ds_dynmo import PartitionError
from ds_dynmo.engine.deepspeed.patches import PatchedPipelineEngine
from ds_dynmo.engine.move import references
from tests.support.configs import Case
from tests.support.elastic import losses, merged
from tests.support.harness import run, run_each
from tests.support.models import WIDTH, Block, layers, seeded
from tests.support.told_clock import unsteady_engine
from tests.support.training import (
    Warnings,
    batches,
    build,
    check_moves_changed_nothing,
    drop_decision,
    gather,
    layers_of,
    outcome_of,
    reports_of,
    sleeping_engine,
    state,
    use_virtual_clock,
)

pytestmark = pytest.mark.ranks


# -- decisions ------------------------------------------------------------------------------------------------


def decided() -> tuple[list[Any], list[int]]:
    use_virtual_clock()
    section = {"interval": 2, "migration": "background"}
    engine, data = sleeping_engine(section, [0.01] * 4 + [0.001] * 4, 2)
    for _ in range(8):
        engine.train_batch(data)
    return reports_of(engine), engine.partition


def test_an_automatic_decision_is_carried_out_while_the_next_batch_trains() -> None:
    for reports, partition in run(2, decided):
        first = next(report for report in reports if report.moved)
        assert first.reason == "interval" and first.background_seconds is not None
        assert first.step == 4  # measured until batch 2, decided after batch 3
        assert first.migrate_seconds > 0 and first.background_seconds > 0
        assert list(first.new_partition) == partition != [0, 4, 8]


def steps_of_profiles(interval: int, call: str) -> dict[str, Any]:
    """Train 8 batches; ``call`` the engine when the profile of batch 2 is on its way."""
    use_virtual_clock()
    section = {"interval": interval, "migration": "background", "profile": {"batches": 1, "warmup_batches": 1}}
    engine, data = sleeping_engine(section, [0.01] * 8, 2)
    calls: dict[str, Callable[[], Any]] = {
        "": lambda: None,
        "decide": lambda: engine.rebalance(),
        "move": lambda: engine.rebalance([0, 5, 8]),
        "move in the next batch": lambda: engine.rebalance([0, 5, 8], background=True),
        "the model changes": lambda: engine.model_changed("more work"),
    }
    profiles, warnings = [], Warnings()
    for batch in range(1, 9):
        engine.train_batch(data)
        if batch == 2:
            calls[call]()
        profiles.append(engine.profile.step if engine.profile is not None else 0)
    return {
        "profiles": profiles,
        "decisions": [(report.step, report.reason) for report in reports_of(engine)],
        "measured": [report.step for report in gather(engine.measurements)[0]],
        "warnings": gather(warnings.messages)[0],
    }


def test_a_profile_is_read_after_the_next_batch() -> None:
    """Batch 2 ends the warm-up, and each interval is counted from the last."""
    dropped = ["move", "the model changes"]
    calls = [(3, ""), (1, ""), (3, "decide"), (2, "move in the next batch"), *((2, call) for call in dropped)]
    third, every, by_hand, later, *others = found = run_each(2, steps_of_profiles, *calls)
    assert not [of_rank["warnings"] for ranks in found for of_rank in ranks if of_rank["warnings"]]
    for of_rank in third:
        assert of_rank["profiles"] == [0, 0, 2, 3, 3, 3, 6, 6]
        assert of_rank["decisions"] == [(4, "interval"), (7, "interval")]
    for of_rank in every:
        assert of_rank["profiles"] == [0, 0, 2, 3, 4, 5, 6, 7]
        assert [step for step, _ in of_rank["decisions"]] == [3, 4, 5, 6, 7, 8]
    for of_rank in by_hand:  # it reads the profile on its way
        assert of_rank["profiles"][1] == 2 and of_rank["decisions"][0] == (2, "by hand")
    for of_rank in later:  # until then layers are where they were measured
        assert of_rank["profiles"][1] == 2 and of_rank["decisions"][0] == (3, "explicit")
    for call, ranks in zip(dropped, others, strict=True):  # a profile of another state is dropped
        for of_rank in ranks:
            assert 2 not in of_rank["profiles"] and max(of_rank["profiles"]) > 3, call
            assert of_rank["measured"][0] > 2, call  # the first measurement of the run, which was to be of batch 2


def steps_that_wait(migration: str) -> list[int]:
    """Return the steps after which this rank waits for the others, and so for the loss of the batch."""
    use_virtual_clock()
    section = {"interval": 2, "migration": migration, "profile": {"batches": 1, "warmup_batches": 1}}
    engine, data = sleeping_engine(section, [0.01] * 8, 2)
    enter, steps = engine.stage.comm.enter, set[int]()

    def counted(what: str) -> None:
        if what == "rebalance":
            steps.add(engine.global_steps)
        enter(what)

    engine.stage.comm.enter = counted
    for _ in range(7):
        engine.train_batch(data)
    return sorted(steps)


def test_training_waits_only_for_decisions() -> None:
    blocking, background = run_each(2, steps_that_wait, ("blocking",), ("background",))
    assert blocking == [[2, 4, 6]] * 2 and background == [[3, 5, 7]] * 2


def changes_in_every_batch() -> tuple[list[tuple[int, str, bool]], list[int]]:
    section = {"interval": 0, "profile": {"warmup_batches": 0}}
    engine, data = unsteady_engine(section, [(0.001, 0.002)] * 7 + [(0.02, 0.04)], [1.0] * 2, 0.0)
    for batch in range(4):
        engine.model_changed(f"change {batch}")
        engine.train_batch(data)
    return [(report.step, report.reason, report.moved) for report in reports_of(engine)], engine.partition


def test_a_model_that_changes_in_every_batch_gets_its_decisions() -> None:
    for reports, partition in run(2, changes_in_every_batch):
        assert reports == [(1, "change 0", True), *((step, f"change {step - 1}", False) for step in (2, 3, 4))]
        assert partition == [0, 7, 8]


def does_not_fit(*_: Any, **__: Any) -> None:
    raise ds_dynmo.MigrationError("does not fit", harmless=True)


def called(call: str, warm_up: int) -> list[tuple[int, str]]:
    """Make a call while the profile for the first decision is on its way, or before, and refuse what does not fit."""
    section = {"initial_partition": "profile", "interval": 0, "profile": {"batches": 1, "warmup_batches": warm_up}}
    engine, data = unsteady_engine(section, [(0.001, 0.002)] * 7 + [(0.02, 0.04)], [1.0] * 2, 0.0)
    engine.set_dataiterator(data)
    no_fit = pytest.raises(ds_dynmo.MigrationError, match="does not fit")
    calls: dict[str, tuple[int, Callable[[], Any], Any]] = {
        "": (0, lambda: None, nullcontext()),
        "repack": (2, lambda: engine.repack(7), pytest.raises(PartitionError, match="7 stages, there are 1 to 2")),
        "rebalance": (2, lambda: engine.rebalance([0, 9, 8]), pytest.raises(PartitionError, match="0, 9, 8")),
        "move": (2, lambda: engine.rebalance([0, 5, 8], background=True), nullcontext()),
        "move that does not fit": (3, lambda: engine.rebalance([0, 5, 8]), no_fit),
        "decision that does not fit": (1, lambda: engine.rebalance(), no_fit),
    }
    at, make, outcome = calls[call]
    while engine.global_steps < 7:
        engine.train_batch(data)
        if engine.global_steps != at:
            continue
        if "does not fit" in call:
            engine.rebalancer.decider.memory.check = does_not_fit
        with outcome:
            make()
        vars(engine.rebalancer.decider.memory).pop("check", None)
    return [(report.step, report.reason) for report in reports_of(engine)]


def test_a_refused_call_leaves_a_decision_due() -> None:
    """A partition by hand takes its place."""
    due = {
        ("repack", 1): [(5, "initial")],
        ("rebalance", 1): [(4, "initial")],
        ("move that does not fit", 1): [(4, "initial")],
        ("move", 1): [(3, "explicit")],
        ("", 3): [(6, "initial")],
        ("decision that does not fit", 3): [(6, "initial")],
    }
    found = run_each(2, called, *due)
    assert dict(zip(due, found, strict=True)) == {call: [decisions] * 2 for call, decisions in due.items()}


def changed_while_decided(fits: bool) -> list[tuple[int, str]]:
    """Change the model between a decision by hand and its move."""
    engine, data = unsteady_engine({"interval": 0}, [(0.001, 0.002)] * 8, [1.0] * 2, 0.0)
    engine.rebalancer.decider.memory.fits = lambda *_, **__: fits
    engine.train_batch(data), engine.train_batch(data)
    engine.rebalance([0, 5, 8], background=True)
    engine.model_changed("it changed")
    engine.train_batch(data), engine.train_batch(data)
    return [(report.step, report.reason) for report in reports_of(engine)]


def test_a_model_that_changes_after_a_decision_gets_another() -> None:
    for ranks in run_each(2, changed_while_decided, (True,), (False,)):
        for reports in ranks:
            assert reports[0] == (2, "explicit") and reports[1][1] == "it changed"


def saved_after_a_decision(folder: str, loads: bool) -> list[tuple[int, str]]:
    """Save between a decision and its move. Return the decisions of that run, or of one that resumes from there."""
    section = {"interval": 3, "stop_step": 3, "profile": {"batches": 1, "warmup_batches": 1}}
    engine, data = unsteady_engine(section, [(0.001, 0.002)] * 7 + [(0.02, 0.04)], [1.0] * 2, 0.0)
    if loads:
        engine.load_checkpoint(folder)
    for batch in range(1, 7):
        engine.train_batch(data)
        if batch == 4 and not loads:
            engine.save_checkpoint(folder)
    return [(report.step, report.reason) for report in reports_of(engine)]


def test_a_run_that_is_resumed_before_a_decided_move_decides_again(tmp_path: Path) -> None:
    saved, resumed = run_each(2, saved_after_a_decision, (str(tmp_path), False), (str(tmp_path), True))
    assert saved == [[(5, "interval")]] * 2 and resumed == [[(7, "interval")]] * 2


def traced(path: str) -> None:
    trace = {"path": path, "steps": [3, 3]}
    engine = build(Case(stages=2, start=(0, 4, 8), dynmo={"interval": 0, "trace": trace}))
    data = batches(engine)
    engine.train_batch(data), engine.train_batch(data)
    engine.rebalance([0, 2, 8], background=True)
    engine.train_batch(data)


def test_a_trace_shows_the_transfer_on_its_own_track(tmp_path: Path) -> None:
    run(2, traced, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for stage in range(2):
        track = next(number for number, name in names.items() if name == f"stage {stage}, transfers")
        (transfer,) = [event for event in events if event["ph"] == "X" and event["tid"] == track]
        assert transfer["name"] == "layers from [0, 4, 8] to [0, 2, 8]"
        of_rank = [event for event in events if event["ph"] == "X" and event["tid"] == stage]
        forward = min(event["ts"] for event in of_rank if event["cat"] == "forward")
        (step,) = [event for event in of_rank if event["cat"] == "optimizer step" and event["dur"] > 50]
        (places,) = [event for event in of_rank if event["name"] == "change places"]
        assert transfer["ts"] < min(forward, places["ts"]) and places["ts"] < step["ts"]
        assert transfer["ts"] + transfer["dur"] <= step["ts"]


MORE = [("bf16", 2), ("bf16 zero1 fp32sums", 4)]


def counted_in_a_move(case: Case) -> dict[str, Any]:
    """Count what this rank sends once a batch's gradients are complete, and the descriptions that it exchanges."""
    engine = build(case)
    data, arrived, sent, exchanged = batches(engine), list[int](), list[int](), list[Any]()
    engine.on_layer_arrival(lambda number, layer: arrived.append(number))
    engine.train_batch(data)
    leaving = [layers_of(engine)[2], layers_of(engine)[3]] if engine.stage_id == 0 else []
    elements = sum(parameter.numel() for layer in leaving for parameter in layer.parameters())
    p2p = engine.stage.comm.p2p
    post, exchange = p2p.post, p2p.exchange_headers

    def counted(sends: Any, receives: Any) -> Any:
        sent.extend(tensor.nbytes for _, tensor in sends)
        return post(sends, receives)

    p2p.post = counted
    p2p.exchange_headers = lambda *args: (exchanged.append(args), exchange(*args))[1]
    engine.rebalance([0, 2, 8], background=True)
    engine.train_batch(data)
    return {
        "sent": sum(sent),
        "moved": reports_of(engine)[-1].bytes_moved,
        "elements": elements,
        "descriptions": len(exchanged),
        "arrived": arrived,
        "partition": engine.partition,
    }


@pytest.mark.parametrize(
    ("precision", "gradient_bytes"),
    [("fp32", 4), ("bf16 zero1", 2), *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE)],
)
def test_layers_are_described_once_and_after_the_batch_only_gradients_follow(
    precision: str, gradient_bytes: int
) -> None:
    case = Case(stages=2, precision=precision, start=(0, 4, 8))
    ranks = run(2, counted_in_a_move, case)
    first, second = ranks
    elements = first["elements"]
    counts = 2 * 16 * 4 if precision == "fp32" else 0  # of steps: 4 bytes for each of at most 16 parameters of a layer
    assert second["sent"] == 0 and 0 <= first["sent"] - elements * gradient_bytes <= counts
    assert first["moved"] >= elements * (12 if precision == "fp32" else 14)
    assert (first["arrived"], second["arrived"]) == ([], [2, 3])
    assert [(rank["descriptions"], rank["partition"]) for rank in ranks] == [(1, [0, 2, 8])] * 2


def walks_per_move(moves: Sequence[Sequence[int]]) -> list[int]:
    """Return, per move, how often layer 0 of this rank, which stays, is searched for what it shares with others."""
    engine = build(Case(stages=2, start=(0, 4, 8)))
    data, first, walk, roots = batches(engine), layers_of(engine).get(0), references.walk, []

    def counted(starts: Sequence[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        roots.extend(value for _, value in starts)
        return walk(starts, *args, **kwargs)

    for number, layer in layers_of(engine).items():
        layer.seen = [number]  # without such an object a layer has nothing to share
    references.walk = counted  # type: ignore[assignment]
    counts = []
    for partition in moves:
        engine.train_batch(data)
        roots.clear()
        engine.rebalance(partition, background=True)
        engine.train_batch(data)
        assert engine.partition == partition
        counts.append(sum(root is first for root in roots))
    return counts


def test_layers_that_leave_together_are_compared_with_one_walk_of_each_other_layer() -> None:
    one_leaves, two_leave = run(2, walks_per_move, [[0, 3, 8], [0, 1, 8]])[0]
    assert one_leaves == two_leave > 0


def begins_to_share() -> tuple[list[int], str]:
    """While a layer is on its way, let one that stays hold an object of it; return the partition and the failure."""
    engine = build(Case(stages=2, start=(0, 4, 8)))
    data = batches(engine)
    engine.train_batch(data)
    here, begin_move = layers_of(engine), engine.rebalancer.begin_move
    if engine.stage_id == 0:
        here[2].seen = [1]

    def begin_and_share() -> None:
        begin_move()
        if engine.stage_id == 0:
            here[1].seen = here[2].seen

    engine.rebalancer.begin_move = begin_and_share
    engine.rebalance([0, 2, 8], background=True)
    engine.train_batch(data)
    return engine.partition, str(engine.rebalancer.failure)


def test_a_layer_whose_object_another_begins_to_share_stays() -> None:
    for partition, failure in run(2, begins_to_share):
        assert partition == [0, 4, 8] and "layer 2's seen" in failure and "is shared with layer 1" in failure


class WithEmpty(Block):
    """A block with a parameter without elements, as pruning of whole columns leaves it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(hidden)
        return out + self.empty.sum()


def with_empty_parameters(case: Case) -> list[Any]:
    return [*layers(case)[:2], *(LayerSpec(WithEmpty, index) for index in range(4)), *layers(case)[-2:]]


def trained_with_empty(case: Case, moves: list[list[int]]) -> dict[str, Any]:
    engine = build(case, with_empty_parameters)
    data, waiting, losses = batches(engine), list(moves), []
    for _ in range(3):
        if waiting:
            engine.rebalance(waiting.pop(0), background=True)
        losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_parameters_without_elements_move(precision: str) -> None:
    case = Case(stages=2, precision=precision)
    check_moves_changed_nothing(*run_each(2, trained_with_empty, (case, []), (case, [[0, 2, 8], [0, 6, 8]])))


class Dropped(nn.Module):
    """A product with dropout, which evaluation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH, WIDTH), 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.dropout(hidden @ self.weight, 0.3, self.training)


def tied_in_the_middle(case: Case) -> list[Any]:
    """Return 8 layers, of which 3 and 5 are one tied layer."""
    whole = layers(case)
    whole[3] = whole[5] = TiedLayerSpec("tied", Dropped, tied_weight_attr="weight")
    return whole


def moved_before_the_batch(case: Case, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Evaluate before each batch; decide to move in it without the memory to do so."""
    engine = build(case, tied_in_the_middle)
    engine.rebalancer.decider.memory.fits = lambda *_, **__: False
    data, losses, waiting = batches(engine), [], list(moves)
    for _ in range(4):
        losses.append(engine.eval_batch(batches(engine, seed=7)).item())
        if waiting:
            engine.rebalance(waiting.pop(0), background=True)
        losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_uses_of_a_tied_layer_train_after_an_evaluation_and_a_move_that_could_not_wait(precision: str) -> None:
    """The uses come to one stage, where the later one shares the memory of the first, and part again."""
    case, moves = Case(stages=2, precision=precision, start=(0, 4, 8)), [[0, 2, 8], [0, 7, 8], [0, 4, 8]]
    still, moved = run_each(2, moved_before_the_batch, (case, []), (case, moves))
    assert moved[0]["blocking"] == 3 and still[0]["losses"][0] != still[0]["losses"][2]
    check_moves_changed_nothing(still, moved)


# -- several batches -------------------------------------------------------------------------------------------


def a_layer_at_a_time(case: Case, targets: dict[int, Sequence[int]]) -> dict[str, Any]:
    """Train 9 batches; decide to go to ``targets`` before those batches, and move no more than a step in each."""
    engine = build(case)
    data, losses, seen = batches(engine), [], []
    for step in range(9):
        if step in targets:
            engine.rebalance(targets[step], background=True)
        engine.rebalancer.budget.num_bytes = 1
        losses.append(engine.train_batch(data).item())
        seen.append(engine.partition)
    return {**outcome_of(engine, losses), "seen": seen}


def test_what_does_not_fit_into_one_batch_goes_in_several() -> None:
    """A newer decision overtakes the one under way."""
    case = Case(stages=3, blocks=6, precision="bf16 zero1", start=(0, 3, 6, 9))
    targets = {3: [0, 6, 8, 9], 6: [0, 3, 8, 9], 7: [0, 7, 8, 9]}
    still, moved = run_each(3, a_layer_at_a_time, (case, {}), (case, targets))
    there, on = [[0, 4, 7, 9], [0, 5, 8, 9], [0, 6, 8, 9]], [[0, 5, 8, 9], [0, 6, 8, 9], [0, 7, 8, 9]]
    assert moved[0]["seen"][2:] == [[0, 3, 6, 9], *there, *on]
    check_moves_changed_nothing(still, moved)


def warmed_up() -> tuple[list[bool], float]:
    """Return, for the batches after one in which layers moved, whether the warm-up was over before each.

    Also return how long training waited for the move, in which a callback took 1000 seconds for each layer.
    """
    engine = build(Case(stages=2, start=(0, 4, 8), dynmo={"interval": 0, "profile": {"warmup_batches": 2}}))
    data, now, later = batches(engine), time.perf_counter, [0.0]
    time.perf_counter = lambda: now() + sum(later)
    engine.on_layer_arrival(lambda number, layer: later.append(1000.0))
    engine.train_batch(data)
    engine.rebalance([0, 2, 8], background=True)
    engine.train_batch(data)
    warm = []
    for _ in range(3):
        warm.append(engine.rebalancer.cycle.warm)
        engine.train_batch(data)
    (report,) = reports_of(engine)
    return warm, report.migrate_seconds


def test_the_warm_up_begins_after_the_batch_in_which_layers_moved() -> None:
    for warm, waited_seconds in run(2, warmed_up):
        assert warm == [False, False, True] and waited_seconds >= 2000.0


def saved_between(folder: str, moves: bool) -> dict[str, Any]:
    """Decide, and then save, evaluate, change the model and decide by hand before the next batch."""
    engine = build(Case(stages=2, start=(0, 4, 8)))
    data, losses = batches(engine), []
    for step in range(6):
        losses.append(engine.train_batch(data).item())
        if moves and step == 1:
            engine.rebalance([0, 2, 8], background=True)
            engine.save_checkpoint(folder, "between")
            losses.append(engine.eval_batch(batches(engine, seed=7)).item())
            assert engine.partition == [0, 4, 8]
        elif step == 1:
            losses.append(engine.eval_batch(batches(engine, seed=7)).item())
        if moves and step == 2:
            assert engine.partition == [0, 2, 8]
            engine.rebalance([0, 6, 8], background=True)
            engine.rebalance([0, 3, 8])
            assert engine.partition == [0, 3, 8]
        if moves and step == 3:
            assert engine.partition == [0, 3, 8]
            engine.rebalance([0, 6, 8], background=True)
            engine.model_changed("what it was decided from")
            drop_decision(engine)
        if moves and step == 4:
            assert engine.partition == [0, 6, 8]
    outcome = outcome_of(engine, losses)
    if moves:
        engine.load_checkpoint(folder, "between")
        assert engine.partition == [0, 4, 8]
    return outcome


def test_between_two_batches_nothing_is_under_way(tmp_path: Any) -> None:
    still, moved = run_each(2, saved_between, (str(tmp_path), False), (str(tmp_path), True))
    check_moves_changed_nothing(still, moved)


# -- what goes wrong, and what changes meanwhile -----------------------------------------------------------------


def of_two_minds(moves: bool) -> dict[str, Any]:
    """Give the ranks different budgets: that of rank 0 is for a part of the way."""
    engine = build(Case(stages=2, start=(0, 4, 8)))
    data = batches(engine)
    losses = [engine.train_batch(data).item() for _ in range(3)]
    if moves:
        engine.rebalancer.budget.num_bytes = 1 << 60 if engine.global_rank else 1
        engine.rebalance([0, 7, 8], background=True)
    losses.append(engine.train_batch(data).item())
    assert engine.partition == ([0, 5, 8] if moves else [0, 4, 8])
    return outcome_of(engine, losses)


def test_rank_0_chooses_the_part_of_the_way() -> None:
    check_moves_changed_nothing(*run_each(2, of_two_minds, (False,), (True,)))


def fails_once(case: Case, where: str | None) -> dict[str, Any]:
    """Let rank 0 fail to copy in the batch, or to describe its layers after it; move later."""
    engine = build(case)
    data, losses, warnings = batches(engine), [], Warnings()
    losses.append(engine.train_batch(data).item())
    if where is not None:
        held = engine.stage.state
        take_gradients = held.take_gradients

        def fail_from_now_on() -> None:
            if engine.global_rank == 0:
                held.record = fail
            take_gradients()

        def fail(*_: Any) -> Any:
            raise MemoryError("no room")

        def fail_in_a_poll(*_: Any) -> Iterator[None]:
            yield fail()

        if where == "packing":
            held.take_gradients = fail_from_now_on
        elif engine.global_rank == 0:
            held.copying = fail_in_a_poll
        engine.rebalance([0, 2, 8], background=True)
    losses.append(engine.train_batch(data).item())
    if where is not None:
        assert engine.partition == [0, 4, 8]
        for name in ("take_gradients", "record", "copying"):
            vars(held).pop(name, None)
        engine.rebalance([0, 2, 8], background=True)
    losses.append(engine.train_batch(data).item())
    return {**outcome_of(engine, losses), "warnings": warnings.messages}


@pytest.mark.parametrize(
    "precision", ["bf16 zero1", *(pytest.param(other, marks=pytest.mark.nightly) for other in ("fp32", "bf16"))]
)
def test_a_failure_before_layers_change_places_is_harmless(precision: str) -> None:
    case = Case(stages=2, precision=precision, start=(0, 4, 8), replicas=2)
    still, *both = run_each(4, fails_once, (case, None), (case, "packing"), (case, "copying"))
    for failed in both:
        assert any("no layer was moved" in message and "no room" in message for message in failed[0]["warnings"])
        assert [r["partition"] for r in failed] == [[0, 2, 8]] * 4
        check_moves_changed_nothing(still, failed)


def out_of_data(case: Case, moves: bool) -> dict[str, Any]:
    """Let the data end at a batch in which layers move, as an engine class of the user's may find; then move again."""
    engine = build(case)
    data, losses = batches(engine), []
    losses.append(engine.train_batch(data).item())

    def ends_early(*_: Any) -> None:
        raise StopIteration

    for partition, background in (([0, 2, 8], False), ([0, 6, 8], True)):
        if moves:
            engine.rebalance([0, 5, 8], background=True)
            PatchedPipelineEngine.train_batch = ends_early  # type: ignore[method-assign]
            with pytest.raises(StopIteration):
                engine.train_batch(data)
            del PatchedPipelineEngine.train_batch
            engine.rebalance(partition, background=background)
        losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


def test_a_batch_that_an_exception_ends_drops_its_move() -> None:
    case = Case(stages=2, precision="bf16 zero1", start=(0, 4, 8))
    still, moved = run_each(2, out_of_data, (case, False), (case, True))
    assert [r["partition"] for r in moved] == [[0, 6, 8]] * 2
    check_moves_changed_nothing(still, moved)


def zero_places(engine: Any, layer: Any) -> None:
    weight = layer.up.weight
    places = torch.arange(weight.numel(), device=weight.device).view(weight.shape)
    engine.zero_elements(weight, places % 3 == 0)


def set_quarter(weight: nn.Parameter) -> None:
    safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25, device=weight.device))


def set_quarter_of_layer(engine: Any, layer: Any) -> None:
    set_quarter(layer.up.weight)


def set_moments(engine: Any, layer: Any) -> None:
    weight = layer.up.weight
    safe_set_full_optimizer_state(weight, torch.full(weight.shape, 0.5, device=weight.device), "exp_avg")


def change_hidden_from_torch(engine: Any, layer: Any) -> None:
    layer.up.weight.data.fill_(0.25)
    layer.down.weight.data = layer.down.weight.data * 0.5
    layer.norm.weight.detach().cpu().numpy().fill(0.25)
    engine.basic_optimizer.state[layer.down.bias]["exp_avg"].data.fill_(0.5)


def set_in_hook(engine: Any, layer: Any) -> None:
    weight = layer.up.weight
    handle = weight.register_post_accumulate_grad_hook(lambda weight: (set_quarter(weight), handle.remove())[0])


CHANGES = {each.__name__: each for each in (zero_places, set_quarter_of_layer, set_moments, change_hidden_from_torch)}


def changed_meanwhile(case: Case, changes: dict[int, str], moves: bool) -> dict[str, Any]:
    """Change weights, masters or moments of layers before the step of a batch in which some of them move.

    Args:
        changes: what is done, by layer: see ``CHANGES``; "set_in_hook": within the batch, and the layers stay.
    """
    engine = build(case)
    data, at = batches(engine), 0 if case.precision.startswith("fp16") else 1  # fp16: the step is skipped
    in_hook = "set_in_hook" in changes.values()
    to = {1: [0, 3, 8], 2: [0, 4, 8]} if in_hook else {at: [0, 1, 8]}  # the second time in other buffers

    def change_layers() -> None:
        if engine.global_steps in to:
            for index, layer in layers_of(engine).items():
                if index in changes:
                    (set_in_hook if in_hook else CHANGES[changes[index]])(engine, layer)

    if not in_hook:
        engine.before_step(change_layers)
    losses = []
    for step in range(3):
        if moves and step in to:
            engine.rebalance(to[step], background=True)
        if in_hook:
            change_layers()
        losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("fp32", ["zero_places", "change_hidden_from_torch"]),
        ("bf16 zero1", ["zero_places", "set_quarter_of_layer", "set_moments"]),
        ("bf16 zero1", ["set_in_hook"]),
        pytest.param("bf16", ["zero_places", "set_quarter_of_layer", "set_moments"], marks=pytest.mark.nightly),
        pytest.param("fp32 zero1", ["set_quarter_of_layer", "set_moments"], marks=pytest.mark.nightly),
        pytest.param("fp16 zero1", ["zero_places"], marks=pytest.mark.nightly),
    ],
    ids=["fp32", "bf16-zero1", "bf16-zero1-hook", "bf16", "fp32-zero1", "fp16-zero1"],
)
def test_state_that_changes_meanwhile_is_sent_again(precision: str, changes: list[str]) -> None:
    """Layers 1 to 3 move, and each is changed in another way; 5 stays. One with such a hook stays."""
    case = Case(stages=2, precision=precision, start=(0, 4, 8))
    by_layer = {**dict(enumerate(changes, start=1)), 5: changes[0]}
    if changes == ["set_in_hook"]:
        by_layer = dict.fromkeys((2, 5), "set_in_hook")
    check_moves_changed_nothing(*run_each(2, changed_meanwhile, (case, by_layer, False), (case, by_layer, True)))


# -- re-packing ------------------------------------------------------------------------------------------------


def repacked_meanwhile(case: Case, changes: bool) -> dict[str, Any]:
    """Train 8 batches. Re-pack between two of them, each time after a decision to move layers in the next one."""
    engine = build(case)
    data = batches(engine)
    found: dict[str, Any] = {"losses": {}, "partitions": [], "state": {}}
    while engine.global_steps < 8:
        found["losses"][engine.global_steps + 1] = engine.train_batch(data).item()
        step = engine.global_steps
        found["partitions"].append(engine.partition)
        if not changes:
            continue
        if step == 2:
            engine.rebalance([0, 2, 5, 8], background=True)
            with pytest.raises(PartitionError, match="4 stages, there are 1 to 3"):
                engine.repack(4)
        if step == 3:
            engine.rebalance([0, 1, 5, 8], background=True)
            engine.repack(partition=[0, 4, 8])
        if engine.released:
            return found
        if step == 4:
            engine.rebalancer.budget.num_bytes = 1
            engine.rebalance([0, 7, 8], background=True)
        if step == 5:  # a part of the way is left
            engine.repack(partition=[0, 3, 8])
        if step == 6:
            engine.rebalance([0, 6, 8], background=True)
            engine.repack(partition=[0, 2, 8])
    return {**found, "state": state(engine)}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_a_repacking_overtakes_a_decision_unless_it_is_refused(precision: str) -> None:
    section = {"interval": 0, "timeout_seconds": 20}
    case = Case(stages=3, precision=precision, start=(0, 3, 5, 8), clip=0.0, dynmo=section)
    still, changed = (run(3, repacked_meanwhile, case, changes) for changes in (False, True))
    assert losses(changed) == losses(still) and merged(changed) == merged(still)
    on_three = [[0, 3, 5, 8], [0, 3, 5, 8], [0, 2, 5, 8]]
    assert changed[0]["partitions"] == [*on_three, [0, 4, 8], [0, 5, 8], [0, 3, 8], *[[0, 2, 8]] * 2]
    assert changed[1]["partitions"] == on_three  # released
