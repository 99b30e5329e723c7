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


ZERO_BUBBLE = Case(clip=0.0, dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}})


def test_a_patched_reduction_is_called_as_often_as_by_deepspeed(tmp_path: Path) -> None:
    """Before the engine is built, under a schedule of ours; and on an engine that trains, also in a resumed run."""
    stock = run(2, train_patched, "deepspeed", UNCLIPPED, "entries", True)
    assert stock[0]["counts"] == dict.fromkeys((kind.__name__ for kind in AT_THE_END), STEPS)
    moved = run(2, train_patched, "ds_dynmo", ZERO_BUBBLE, "entries", True, MOVES)
    assert outcomes(moved, "counts", "losses") == outcomes(stock, "counts", "losses")
    saved = run(2, train_patched, "ds_dynmo", UNCLIPPED, "engine", False, MOVES, str(tmp_path))
    assert outcomes(saved, "losses") == outcomes(stock, "losses") and whole(saved) == whole(moved)
    assert all(result["counts"] == dict.fromkeys(stock[0]["counts"], 3) for result in saved)
    three, moves = Case(stages=3, clip=0.0), ([0, 1, 2, 8], [0, 5, 7, 8])
    loaded = run(3, train_patched, "ds_dynmo", three, "entries", False, moves, None, str(tmp_path))
    assert whole(loaded) == whole(saved) and loaded[0]["losses"] == saved[0]["losses"][2:]
    assert all(result["counts"]["ReduceGrads"] == 3 for result in loaded)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "early"), [("engine", False), ("entries", False), ("map", True), ("map", False), ("subclass", True)]
)
def test_a_reduction_patched_otherwise_is_called_as_often_as_by_deepspeed(how: str, early: bool) -> None:
    stock = run(2, train_patched, "deepspeed", UNCLIPPED, how, early)
    assert stock[0]["counts"] == dict.fromkeys((kind.__name__ for kind in AT_THE_END), 5 if early else 3)
    for case in (UNCLIPPED, ZERO_BUBBLE):
        moved = run(2, train_patched, "ds_dynmo", case, how, early, MOVES)
        assert outcomes(moved, "counts", "losses") == outcomes(stock, "counts", "losses")


# -- what is refused ----------------------------------------------------------------------------------


def refusals() -> tuple[list[str], float, str]:
    """Return errors of ``initialize``, a batch and an evaluation with a user's instructions, and what follows.

    That is the loss of a batch without them, and the error of a batch that another ``_exec_schedule`` runs.
    """
    stock, kind = PipelineEngine._INSTRUCTION_MAP, schedule.ForwardPass
    own = {**stock, kind: counted(Counter(), kind, stock[kind])}
    theirs = type("TheirEngine", (PipelineEngine,), {"_INSTRUCTION_MAP": own})
    errors = [error_of(lambda: initialize("ds_dynmo", Case(), layers, theirs))]
    engine = build(Case())
    data = batches(engine)
    engine._INSTRUCTION_MAP = own
    errors += [error_of(lambda: engine.train_batch(data)), error_of(lambda: engine.eval_batch(data))]
    del engine._INSTRUCTION_MAP
    loss = engine.train_batch(data).item()
    engine._exec_schedule = partial(PipelineEngine._exec_schedule, engine)
    return errors, loss, error_of(lambda: engine.train_batch(data))


def test_other_instructions_of_the_users_and_batches_that_bypass_the_engine_are_refused() -> None:
    named = "_INSTRUCTION_MAP[ForwardPass] = tests.engine.run.test_patched_instructions.counted"
    for errors, loss, bypassed in run(2, refusals):
        assert len(errors) == 3 and all(named in error for error in errors)
        assert loss > 0 and "_exec_schedule was replaced" in bypassed
