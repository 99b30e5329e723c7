"""Where a run is between decisions: all transitions, which batches are profiled, and when decisions are due."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

import pytest

from ds_dynmo.config import DynMoConfig, parse_section
from ds_dynmo.engine.decide.cycle import (
    Asked,
    BatchEnded,
    Begun,
    Chosen,
    Cycle,
    Decided,
    DecidedMove,
    Due,
    Ended,
    Event,
    Forgotten,
    Idle,
    Interrupted,
    Measuring,
    ModelChanged,
    Moving,
    NotMade,
    ProfileDropped,
    ProfilePosted,
    ProfileRead,
    ProfileUnread,
    Reason,
    Request,
    Settled,
    State,
    Weighed,
    after,
)
from ds_dynmo.engine.decide.made_reports import measured_report
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, MigrationPlan, Profile


def config(**section: Any) -> DynMoConfig:
    return parse_section(DynMoConfig, section, "dynmo")


def through(cycle: Cycle, *events: Event) -> Cycle:
    return reduce(after, events, cycle)


# -- the table ---------------------------------------------------------------------------------------------

HERE, THERE = Placement.chain((0, 2, 4)), Placement.chain((0, 3, 4))
INTERVAL, PRUNED = Request(Reason.INTERVAL), Request(Reason.MODEL_CHANGED, "pruned")
MOVE = DecidedMove(THERE, INTERVAL, None, None, (0.0, 0.0), clears_pending_decision=False)
BY_HAND = DecidedMove(THERE, Request(Reason.BY_HAND), None, None, (0.0, 0.0))
PLAN = MigrationPlan.between(HERE, THERE)
BEFORE = Due(request=INTERVAL)  # is due in every state below
STATES: dict[str, State] = {
    "idle": Idle(),
    "measuring": Measuring(Due(True, PRUNED, True)),
    "decided": Decided(MOVE),
    "moving": Moving(MOVE, PLAN, None),
}
SAME, NEVER = "same", "never"
# By event: the state after it, of a cycle that is idle, measuring, decided, moving; and what is due then if that
# is not what was: by state, where they differ.
TABLE: list[tuple[Event, tuple[str, str, str, str], dict[str, Due]]] = [
    (BatchEnded(7), (SAME, SAME, SAME, SAME), {}),
    (ProfilePosted(), ("measuring", NEVER, NEVER, NEVER), {"idle": Due()}),
    (ProfileRead(), (NEVER, "idle", NEVER, NEVER), {}),
    (ProfileUnread(), (NEVER, "idle", NEVER, NEVER), {"measuring": Due(True, INTERVAL)}),
    (ProfileDropped(), (SAME, "idle", SAME, SAME), {"measuring": Due(True, INTERVAL, True)}),
    (
        ModelChanged("pruned"),
        (SAME, "idle", "idle", SAME),
        {"measuring": Due(True, PRUNED, True), "": Due(False, PRUNED, True)},
    ),
    (Asked(PRUNED), (SAME, SAME, SAME, SAME), {"": Due(False, PRUNED, True)}),
    (NotMade(PRUNED), (SAME, SAME, SAME, SAME), {}),
    (NotMade(None), (SAME, SAME, SAME, SAME), {}),
    (Weighed(), (SAME, SAME, SAME, SAME), {}),
    (Chosen(MOVE), ("decided", NEVER, "decided", NEVER), {}),
    (Chosen(BY_HAND), ("decided", NEVER, "decided", NEVER), {"": Due()}),
    (Forgotten(), (SAME, SAME, "idle", SAME), {}),
    (Begun(Moving(MOVE, PLAN, BY_HAND)), (NEVER, NEVER, "moving", NEVER), {}),
    (Ended(moved=True), (NEVER, NEVER, NEVER, "idle"), {"": Due(True, INTERVAL)}),
    (Ended(moved=False), (NEVER, NEVER, NEVER, "idle"), {}),
    (Interrupted(), (SAME, SAME, SAME, "idle"), {}),
    (Settled(moved=False), (SAME, SAME, SAME, SAME), {"": Due()}),
    (Settled(moved=True), (SAME, SAME, SAME, SAME), {"": Due(True)}),
    (
        Settled(moved=True, clears_pending_decision=False),
        (SAME, SAME, SAME, SAME),
        {"": Due(True, INTERVAL)},
    ),
]


def kind(state: State) -> str:
    return type(state).__name__.lower()


def test_every_event_in_every_state() -> None:
    for (event, states, dues), number in product(TABLE, range(len(STATES))):
        name, expected = [*STATES][number], states[number]
        before, case = Cycle(config(interval=7), STATES[name], BEFORE, since_move=9), f"{event} in {name}"
        if expected == NEVER:
            with pytest.raises(AssertionError, match=f"{type(event).__name__} while {type(before.state).__name__}"):
                pytest.fail(f"{case}: {after(before, event)}")
            continue
        cycle = after(before, event)
        assert kind(cycle.state) == (name if expected == SAME else expected), case
        assert cycle.due == dues.get(name, dues.get("", BEFORE)), case
        restarts = getattr(event, "moved", False)
        steps = {BatchEnded: 10, Ended: -1 if restarts else 9, Settled: 0 if restarts else 9}
        assert cycle.since_move == steps.get(type(event), 9), case
    assert {type(event) for event, _, _ in TABLE} == set(Event.__args__)


def test_what_is_left_of_a_move_begins_with_the_next_batch() -> None:
    cycle = through(Cycle(config(), Decided(MOVE)), Begun(Moving(MOVE, PLAN, BY_HAND)), Ended(moved=True))
    assert cycle.state == Decided(BY_HAND) and cycle.decided == BY_HAND
    assert after(Cycle(config(), Moving(MOVE, PLAN, BY_HAND)), Ended(moved=False)).state == Idle()


GIVEN, CHANGED = (replace(MOVE, request=request) for request in (Request(Reason.EXPLICIT), PRUNED))


def test_a_move_decided_from_the_costs_of_before_does_not_begin() -> None:
    """What was given stays, what an earlier change led to, and the move of a run that does not re-balance."""
    cases = [(MOVE, True, False), (BY_HAND, True, False), (GIVEN, True, True), (CHANGED, True, True)]
    for move, enabled, stays in (*cases, (MOVE, False, True)):
        cycle = Cycle(config(enabled=enabled), Decided(move))
        assert after(cycle, ModelChanged("pruned")).decided == (move if stays else None)
        moving = through(cycle, Begun(Moving(move, PLAN, move)), ModelChanged("pruned"), Ended(moved=True))
        assert moving.decided == (move if stays else None)


def test_a_decision_by_hand_takes_the_place_of_one_that_is_measured_for() -> None:
    cycle = through(Cycle.begin(config()), ModelChanged("pruned"), ProfilePosted(), Settled(moved=False), ProfileRead())
    assert cycle.due == Due() and cycle.state == Idle()


# -- batches -----------------------------------------------------------------------------------------------


def run(settings: DynMoConfig, steps: int, requests: dict[int, str] | None = None) -> dict[str, list[Any]]:
    """Drive a cycle as the engine does; ``requests`` are made before the batch of that step."""
    seen: dict[str, list[Any]] = {"profiled": [], "decided": [], "outcomes": []}
    cycle, profiled = Cycle.begin(settings), 0
    for step in range(1, steps + 1):
        if requests and step in requests:
            profiled = 0
            cycle = after(cycle, Asked(Request(Reason.MODEL_CHANGED, requests[step])))
        if cycle.profiles_batch(step):
            seen["profiled"].append(step)
            profiled += 1
        cycle = after(cycle, BatchEnded(step))
        if not cycle.is_profile_due(profiled):
            continue
        due, profiled = cycle.due, 0
        cycle = through(cycle, ProfilePosted(), ProfileRead())
        if due.measurement:
            seen["outcomes"].append(step)
        if due.request is not None:
            seen["decided"].append((step, str(due.request)))
    return seen


AT_ONCE, TWO_BATCHES = {"warmup_batches": 0}, {"batches": 2, "warmup_batches": 3}
AT_FIRST = {"interval": 0, "initial_partition": "profile"}
# Section, batches, requests: which batches are profiled, and the decisions by step.
RUNS: list[tuple[dict[str, Any], int, dict[int, str], list[int], dict[int, str]]] = [
    # The batches before an interval are profiled.
    ({"interval": 10, "profile": {"batches": 2}}, 25, {}, [2, 3, 9, 10, 19, 20], {10: "interval", 20: "interval"}),
    # With interval 0 it profiles once and never decides.
    ({"interval": 0}, 30, {}, [2], {}),
    # Disabled it never profiles; for an initial partition by profile once.
    ({"enabled": False, "interval": 1}, 10, {3: "changed"}, [], {}),
    ({**AT_FIRST, "enabled": False, "interval": 1, "profile": TWO_BATCHES}, 10, {}, [4, 5], {5: "initial"}),
    ({"interval": 5, "start_step": 10, "stop_step": 15}, 30, {}, [2, 10, 15], {10: "interval", 15: "interval"}),
    ({"interval": 1, "profile": AT_ONCE}, 3, {}, [1, 2, 3], {1: "interval", 2: "interval", 3: "interval"}),
    # A changed model is profiled at once.
    ({"interval": 0, "profile": {"warmup_batches": 5}}, 9, {3: "frozen"}, [3], {3: "frozen"}),
    # The first decision follows the first profiled batch.
    (AT_FIRST, 5, {}, [2], {2: "initial"}),
]


def test_which_batches_are_profiled_and_when_decisions_are_due() -> None:
    for section, steps, requests, profiled, decided in RUNS:
        seen = run(config(**section), steps, requests)
        assert (seen["profiled"], seen["decided"]) == (profiled, [*decided.items()]), section
    assert run(config(interval=10, profile={"batches": 2}), 25)["outcomes"] == [3]


def resumed(settings: DynMoConfig, saved: Cycle) -> Cycle:
    """Go on from a checkpoint."""
    return Cycle.begin(settings).resumed(json.loads(json.dumps(saved.saved())))


def test_disabled_a_resumed_run_profiles_only_if_it_had_not_yet() -> None:
    settings = config(enabled=False, initial_partition="profile")
    for steps in (1, 2, 6):
        first = Cycle.begin(settings)
        for step in range(1, steps + 1):
            if first.profiles_batch(step):
                first = after(first, Settled(moved=True))
            first = after(first, BatchEnded(step))
        again = resumed(settings, first)
        assert again.placed == first.placed == (steps >= 2)
        assert [again.profiles_batch(step) for step in range(steps + 1, 8)] == [not first.placed] * (7 - steps)
    decided = after(Cycle.begin(config(interval=1, profile={"warmup_batches": 0})), BatchEnded(1))
    assert decided.due.request == INTERVAL
    again = resumed(settings, decided)
    assert again.due.request == Request(Reason.INITIAL) and not again.placed


def measuring() -> Cycle:
    """Return a cycle whose measurement and urgent decision are on their way."""
    begun = Cycle.begin(config(interval=1, profile={"warmup_batches": 0}))
    return through(begun, ModelChanged("pruned"), BatchEnded(1), ProfilePosted())


def test_what_is_measured_for_is_saved_as_due_and_what_becomes_due_meanwhile_stays_due() -> None:
    again = resumed(config(interval=1, profile={"warmup_batches": 5}), measuring())
    assert again.due == Due(True, PRUNED, True) and again.profiles_batch(2) and again.state == Idle()
    assert through(measuring(), BatchEnded(2), ProfileRead()).due == Due(False, INTERVAL, False)


def test_batches_until_the_next_decision_are_estimated() -> None:
    cycle = after(Cycle.begin(config(interval=7)), ModelChanged("pruned"))
    assert cycle.batches_to_gain == 7
    cycle = Cycle.begin(config(interval=0))
    expected = {20: 100, 150: 150, 130: 130, 1: 100}  # batches before each change
    for batches, batches_to_gain in expected.items():
        cycle = through(cycle, *map(BatchEnded, range(batches)), ModelChanged("pruned"))
        assert cycle.batches_to_gain == batches_to_gain


def test_a_checkpoint_restores_all_counters_but_not_the_configuration() -> None:
    before = through(Cycle.begin(config(interval=7)), *map(BatchEnded, range(1, 7)), ModelChanged("pruned"))
    again = resumed(config(interval=3), before)
    assert again.batches_to_gain == 3
    assert vars(again) == {**vars(before), "config": config(interval=3)}
    with pytest.raises(KeyError, match="urgent"):
        again.resumed({name: value for name, value in before.saved().items() if name != "urgent"})


def test_a_checkpoint_holds_a_decision_that_is_due_or_decided() -> None:
    assert resumed(config(), Cycle(config(), due=Due())).due == Due()
    for request in (INTERVAL, Request(Reason.BY_HAND), Request(Reason.MODEL_CHANGED, "by hand")):
        due = Cycle(config(), due=Due(request=request))
        assert resumed(config(), due).due == due.due
        move = DecidedMove(THERE, request, None, None, (0.0, 0.0))
        again = resumed(config(), Cycle(config(), Decided(move), Due(), placed=True))
        is_by_hand = request.reason is Reason.BY_HAND  # the user's, who may make it again
        assert again.due.request == (None if is_by_hand else request) and again.placed == is_by_hand


def test_a_move_is_followed_by_warm_up_and_one_outcome() -> None:
    cycle = after(Cycle.begin(config(interval=0)), Settled(moved=True))
    assert not cycle.profiles_batch(5)
    assert after(cycle, BatchEnded(5)).profiles_batch(6)


def test_decisions_at_a_short_interval_weigh_other_shapes_every_100_batches() -> None:
    cycle, weighed = Cycle.begin(config(interval=5)), []
    for step in range(1, 251):
        cycle = after(cycle, BatchEnded(step))
        if step % 5 == 0 and cycle.weighs_shapes(INTERVAL):
            weighed.append(step)
            cycle = after(cycle, Weighed())
        if step == 130:
            assert cycle.weighs_shapes(PRUNED)
            cycle = after(cycle, Weighed())
    assert weighed == [5, 105, 230]


def test_measured_bubble_ratio() -> None:
    layers = tuple(LayerCost(s / 3, 2 * s / 3, 5, 5, 10, 1, 1) for s in (0.1, 0.1, 0.05, 0.05))
    report = measured_report(Profile(7, HERE, layers, micro_batches=4, batch_seconds=1.0), None)
    assert report.bottleneck_seconds == pytest.approx(0.2)
    assert report.bubble_ratio == pytest.approx(1 - 4 * 0.15 / 1.0)
    assert report.imbalance == pytest.approx(0.1 / 0.15)
