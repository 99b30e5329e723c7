"""Which batches are profiled, and when decisions are due."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_dynmo.config import DynMoConfig, parse_section
from ds_dynmo.engine.decide.made_reports import measured_report
from ds_dynmo.engine.decide.trigger import Due, Reason, Request, Trigger
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile


def config(**section: Any) -> DynMoConfig:
    return parse_section(DynMoConfig, section, "dynmo")


def run(settings: DynMoConfig, steps: int, requests: dict[int, str] | None = None) -> dict[str, list[Any]]:
    """Drive a trigger as the engine does; ``requests`` are made before the batch of that step."""
    seen: dict[str, list[Any]] = {"profiled": [], "decided": [], "outcomes": []}
    steering, profiled = Trigger(settings), 0
    for step in range(1, steps + 1):
        if requests and step in requests:
            profiled = 0
            steering.ask(Request(Reason.MODEL_CHANGED, requests[step]))
        if steering.profile_batch(step):
            seen["profiled"].append(step)
            profiled += 1
        steering.batch_done(step)
        if not steering.take(profiled):
            continue
        due, profiled = steering.finish(), 0
        if due.measurement:
            seen["outcomes"].append(step)
        if due.request is not None:
            seen["decided"].append((step, str(due.request)))
    return seen


def test_the_batches_before_an_interval_are_profiled() -> None:
    seen = run(config(interval=10, profile={"batches": 2}), 25)
    assert seen["profiled"] == [2, 3, 9, 10, 19, 20]
    assert seen["decided"] == [(10, "interval"), (20, "interval")]
    assert seen["outcomes"] == [3]


def test_with_interval_0_it_profiles_once_and_never_decides() -> None:
    seen = run(config(interval=0), 30)
    assert seen["profiled"] == [2] and seen["decided"] == []


def test_disabled_it_never_profiles() -> None:
    seen = run(config(enabled=False, interval=1), 10, {3: "changed"})
    assert seen["profiled"] == [] and seen["decided"] == []


def test_disabled_it_profiles_once_for_an_initial_partition_by_profile() -> None:
    section = {"enabled": False, "initial_partition": "profile", "interval": 1}
    seen = run(config(**section, profile={"batches": 2, "warmup_batches": 3}), 10)
    assert seen["profiled"] == [4, 5] and seen["decided"] == [(5, "initial")]


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_disabled_a_resumed_run_profiles_only_if_it_had_not_yet(steps: int) -> None:
    settings = config(enabled=False, initial_partition="profile")
    first, resumed = Trigger(settings), Trigger(settings)
    for step in range(1, steps + 1):
        if first.profile_batch(step):
            first.decided(moved=True)
        first.batch_done(step)
    resumed.load_state_dict(first.state_dict())
    assert resumed.placed == first.placed == (steps >= 2)
    assert [resumed.profile_batch(step) for step in range(steps + 1, 8)] == [not first.placed] * (7 - steps)


def test_disabled_a_run_resumed_from_one_that_decided_profiles_once() -> None:
    decided = Trigger(config(interval=1, profile={"warmup_batches": 0}))
    decided.batch_done(1)
    assert decided.pending == Request(Reason.INTERVAL)
    resumed = Trigger(config(enabled=False, initial_partition="profile"))
    resumed.load_state_dict(decided.state_dict())
    assert resumed.pending == Request(Reason.INITIAL) and not resumed.placed


def taken() -> Trigger:
    """Return a trigger whose measurement and urgent decision are on their way."""
    trigger = Trigger(config(interval=1, profile={"warmup_batches": 0}))
    trigger.model_changed("pruned")
    trigger.batch_done(1)
    assert trigger.take(1) and trigger.pending is None
    return trigger


def test_what_was_taken_is_saved_as_due() -> None:
    resumed = Trigger(config(interval=1, profile={"warmup_batches": 5}))
    resumed.load_state_dict(taken().state_dict())
    assert resumed.pending == Request(Reason.MODEL_CHANGED, "pruned") and resumed.profile_batch(2)
    assert resumed.take(1)
    assert resumed.finish() == Due(True, Request(Reason.MODEL_CHANGED, "pruned"), True)


def test_a_decision_that_becomes_due_while_another_is_on_its_way_stays_due() -> None:
    trigger = taken()
    trigger.batch_done(2)
    assert str(trigger.finish().request) == "pruned" and trigger.pending == Request(Reason.INTERVAL)
    assert trigger.take(1) and trigger.finish() == Due(False, Request(Reason.INTERVAL), False)


def test_what_is_given_back_is_due_again() -> None:
    trigger = taken()
    assert not trigger.take(1)
    trigger.give_back()
    assert trigger.take(1) and trigger.finish() == Due(True, Request(Reason.MODEL_CHANGED, "pruned"), True)


def test_a_decision_whose_profile_failed_is_dropped() -> None:
    trigger = taken()
    trigger.give_back(decision=False)
    assert trigger.pending is None and trigger.take(1) and trigger.finish() == Due(True, None, False)


def test_start_and_stop_step() -> None:
    seen = run(config(interval=5, start_step=10, stop_step=15), 30)
    assert seen["decided"] == [(10, "interval"), (15, "interval")]


def test_every_step() -> None:
    seen = run(config(interval=1, profile={"warmup_batches": 0}), 4)
    assert [step for step, _ in seen["decided"]] == [1, 2, 3, 4]


def test_a_changed_model_is_profiled_at_once() -> None:
    seen = run(config(interval=0, profile={"warmup_batches": 5}), 9, {3: "frozen"})
    assert seen["decided"] == [(3, "frozen")]


def test_initial_profile_decides_after_the_first_profiled_batch() -> None:
    seen = run(config(interval=0, initial_partition="profile"), 5)
    assert seen["decided"] == [(2, "initial")]


def test_batches_until_the_next_decision_are_estimated() -> None:
    steering = Trigger(config(interval=7))
    steering.model_changed("pruned")
    assert steering.batches_to_gain == 7
    steering = Trigger(config(interval=0))
    expected = {20: 100, 150: 150, 130: 130, 1: 100}  # batches before each change
    for batches, batches_to_gain in expected.items():
        for step in range(batches):
            steering.batch_done(step)
        steering.model_changed("pruned")
        assert steering.batches_to_gain == batches_to_gain


def test_a_checkpoint_restores_all_counters_and_nothing_else() -> None:
    before = Trigger(config(interval=7))
    for step in range(1, 7):
        before.batch_done(step)
    before.model_changed("pruned")
    saved = json.loads(json.dumps(before.state_dict()))
    after = Trigger(config(interval=3))
    after.load_state_dict({**saved, "_config": None, "decided": None, "_later": 1})
    assert after.batches_to_gain == 3 and callable(after.decided) and not hasattr(after, "_later")
    assert vars(after) == {**vars(before), "_config": config(interval=3)}
    with pytest.raises(KeyError, match="_urgent"):
        after.load_state_dict({name: value for name, value in saved.items() if name != "_urgent"})


@pytest.mark.parametrize(
    "pending", [None, Request(Reason.INTERVAL), Request(Reason.BY_HAND), Request(Reason.MODEL_CHANGED, "by hand")]
)
def test_a_checkpoint_holds_a_pending_decision_with_its_reason(pending: Request | None) -> None:
    state, resumed = Trigger(config()).state_dict(decided=pending), Trigger(config())
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.pending == pending
    assert resumed.state_dict() == state


def test_a_move_is_followed_by_warm_up_and_one_outcome() -> None:
    steering = Trigger(config(interval=0))
    steering.decided(moved=True)
    assert not steering.profile_batch(5)
    steering.batch_done(5)
    assert steering.profile_batch(6)


def test_decisions_at_a_short_interval_weigh_other_shapes_every_100_batches() -> None:
    steering, weighed = Trigger(config(interval=5)), []
    for step in range(1, 251):
        steering.batch_done(step)
        if step % 5 == 0 and steering.weighs_shapes(Request(Reason.INTERVAL)):
            weighed.append(step)
        if step == 130:
            assert steering.weighs_shapes(Request(Reason.MODEL_CHANGED, "pruned"))
    assert weighed == [5, 105, 230]


def profile(seconds: list[float], partition: tuple[int, ...], **extra: int) -> Profile:
    sizes = {"static_bytes": 10, "activation_bytes": 1, "input_bytes": 1, **extra}
    layers = tuple(LayerCost(s / 3, 2 * s / 3, 5, 5, **sizes) for s in seconds)
    return Profile(7, Placement.chain(partition), layers, micro_batches=4, batch_seconds=1.0)


def test_measured_bubble_ratio() -> None:
    report = measured_report(profile([0.1, 0.1, 0.05, 0.05], (0, 2, 4)), None)
    assert report.bottleneck_seconds == pytest.approx(0.2)
    assert report.bubble_ratio == pytest.approx(1 - 4 * 0.15 / 1.0)
    assert report.imbalance == pytest.approx(0.1 / 0.15)
