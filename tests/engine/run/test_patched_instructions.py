"""A user's own instructions at the end of a batch are called as often as DeepSpeed calls them; others are refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_dynmo.engine.deepspeed.instruction_map import AT_THE_END
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.instructions import MOVES, STEPS, Counts, error_of, initialize, outcomes
from tests.support.models import layers
from tests.support.training import batches, build, state, whole
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks

UNCLIPPED = Case(clip=0.0)  # because DeepSpeed clips by another norm


def counted(counts: Counts, kind: type, instruction: Callable[..., None]) -> Callable[..., None]:
    def own(self: Any, *args: Any, **kwargs: Any) -> None:
        counts[kind.__name__] += 1
        instruction(self, *args, **kwargs)

    return own


def reduce_nothing(counts: Counts) -> Callable[[Any], None]:
    """Replace the reduction as diffusion-pipe does with gradient release: one replica, gradients stay as they are."""

    def reduce(self: Any) -> None:
        assert self.mpu.get_data_parallel_world_size() == 1
        counts["ReduceGrads"] += 1

    return reduce


def own_map(counts: Counts, present: Any) -> dict[type, Any]:
    """Return a map whose instructions at the end count their calls, with a user's own reduction of gradients."""
    own = {kind: counted(counts, kind, present[kind]) for kind in AT_THE_END}
    return {**present, **own, schedule.ReduceGrads: reduce_nothing(counts)}


def patch(how: str, engine: Any, counts: Counts) -> None:
    if how == "entries":
        PipelineEngine._INSTRUCTION_MAP.update(own_map(counts, PipelineEngine._INSTRUCTION_MAP))
    elif how == "map":
        PipelineEngine._INSTRUCTION_MAP = own_map(counts, PipelineEngine._INSTRUCTION_MAP)
    elif how == "engine":
        engine._INSTRUCTION_MAP = own_map(counts, engine._INSTRUCTION_MAP)


def train_patched(
    which: str,
    case: Case,
    how: str,
    early: bool,
    moves: Sequence[Sequence[int]] = (),
    save_to: str | None = None,
    resume_from: str | None = None,
) -> dict[str, Any]:
    """Train, and count instructions.

    Args:
        early: patch them before the engine is built, otherwise after two batches.
        save_to: a folder to save to after the second batch.
        resume_from: a folder to load; only the last three batches are trained then.
    """
    counts: Counts = Counter()
    engine_class = None
    if early:
        patch(how, None, counts)
    if how == "subclass":
        present = PipelineEngine._INSTRUCTION_MAP
        engine_class = type("TheirEngine", (PipelineEngine,), {"_INSTRUCTION_MAP": own_map(counts, present)})
    engine = initialize(which, case, layers, engine_class)
    if resume_from is not None:
        engine.load_checkpoint(resume_from)
    data = itertools.islice(batches(engine), engine.global_steps * case.micro_batches, None)
    losses, waiting = [], list(moves)
    for step in range(engine.global_steps, STEPS):
        if step == 2 and not early:
            patch(how, engine, counts)
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
        if step == 1 and save_to is not None:
            engine.save_checkpoint(save_to)
    losses.append(engine.eval_batch(batches(engine, seed=7)).item())
    found = {"losses": losses, "counts": counts, "replica": 0}
    return found if which == "deepspeed" else {**found, "state": state(engine)}


@pytest.mark.parametrize(
    ("how", "early"),
    [
        *(("entries", True), ("engine", False)),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (("entries", False), ("map", True), ("map", False), ("subclass", True))
        ),
    ],
)
def test_a_patched_reduction_is_called_as_often_as_by_deepspeed(how: str, early: bool) -> None:
    stock = run(2, train_patched, "deepspeed", UNCLIPPED, how, early)
    still = run(2, train_patched, "ds_dynmo", UNCLIPPED, how, early)
    moved = run(2, train_patched, "ds_dynmo", UNCLIPPED, how, early, MOVES)
    assert stock[0]["counts"] == dict.fromkeys((kind.__name__ for kind in AT_THE_END), 5 if early else 3)
    assert outcomes(stock, "counts", "losses") == outcomes(still, "counts", "losses")
    assert outcomes(stock, "counts", "losses") == outcomes(moved, "counts", "losses")
    assert whole(still) == whole(moved)


def test_a_patched_run_resumes_at_another_number_of_stages(tmp_path: Path) -> None:
    saved = run(2, train_patched, "ds_dynmo", UNCLIPPED, "entries", False, MOVES, str(tmp_path))
    moves = ([0, 1, 2, 8], [0, 5, 7, 8])
    three = Case(stages=3, clip=0.0)
    loaded = run(3, train_patched, "ds_dynmo", three, "entries", False, moves, None, str(tmp_path))
    assert whole(loaded) == whole(saved)
    assert loaded[0]["losses"] == saved[0]["losses"][2:]
    assert all(result["counts"]["ReduceGrads"] == 3 for result in [*saved, *loaded])


@pytest.mark.every_variant
@pytest.mark.parametrize(
    ("how", "early"), [("entries", True), pytest.param("engine", False, marks=pytest.mark.nightly)]
)
def test_a_patched_reduction_works_under_our_schedules(how: str, early: bool) -> None:
    check_as_under_1f1b(2, train_patched, "ds_dynmo", UNCLIPPED, how, early)


# -- what is refused ----------------------------------------------------------------------------------


def other_instructions_of_the_users() -> tuple[list[str], float]:
    """Return errors of ``initialize``, a batch and an evaluation, and the loss of a batch without such instructions."""
    stock, kind = PipelineEngine._INSTRUCTION_MAP, schedule.ForwardPass
    own = {**stock, kind: counted(Counter(), kind, stock[kind])}
    theirs = type("TheirEngine", (PipelineEngine,), {"_INSTRUCTION_MAP": own})
    errors = [error_of(lambda: initialize("ds_dynmo", Case(), layers, theirs))]
    engine = build(Case())
    data = batches(engine)
    engine._INSTRUCTION_MAP = own
    errors += [error_of(lambda: engine.train_batch(data)), error_of(lambda: engine.eval_batch(data))]
    del engine._INSTRUCTION_MAP
    return errors, engine.train_batch(data).item()


def test_other_instructions_of_the_users_are_refused() -> None:
    for errors, loss in run(2, other_instructions_of_the_users):
        assert all(
            "_INSTRUCTION_MAP[ForwardPass] = tests.engine.run.test_patched_instructions.counted" in e for e in errors
        )
        assert loss > 0


def a_schedule_of_its_own() -> str:
    engine = build(Case())
    engine._exec_schedule = partial(PipelineEngine._exec_schedule, engine)
    return error_of(lambda: engine.train_batch(batches(engine)))


def test_a_batch_that_bypasses_the_engine_is_refused() -> None:
    assert all("_exec_schedule was replaced" in message for message in run(2, a_schedule_of_its_own))
