"""A user's own engine class."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

import ds_dynmo
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.instructions import MOVES, error_of, initialize, outcomes
from tests.support.models import Block, Embedding, Head, layers, twofold
from tests.support.training import batches, build, state, whole
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks

CASE = Case(blocks=6)


def own_engine() -> type[PipelineEngine]:
    """Define a subclass as a user does, with a batch of its own."""

    class OwnEngine(PipelineEngine):
        def __init__(self, *args: Any, weight: float = 0.0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.weight, self.called = weight, Counter()

        def train_batch(self) -> list[torch.Tensor]:  # type: ignore[override]
            self.called["train_batch"] += 1
            self.module.train()
            self.total_loss, self._compute_loss = None, True
            self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
            return [self._aggregate_total_loss()]

        def eval_batch(self, data_iter: Any) -> list[torch.Tensor]:  # type: ignore[override]
            self.called["eval_batch"] += 1
            self.module.eval()
            training, self.data_iterator, self._compute_loss = self.data_iterator, data_iter, True
            self.total_loss = None
            with torch.no_grad():
                self._exec_schedule(schedule.InferenceSchedule(self.micro_batches, self.num_stages, self.stage_id))
            self.data_iterator = training
            return [self._aggregate_total_loss()]

        def save_checkpoint(self, save_dir: str, **kwargs: Any) -> Any:
            self.called["save_checkpoint"] += 1
            return super().save_checkpoint(save_dir, client_state={"weight": self.weight}, **kwargs)

        def load_checkpoint(self, load_dir: str, **kwargs: Any) -> Any:
            self.called["load_checkpoint"] += 1
            path, client = super().load_checkpoint(load_dir, **kwargs)
            self.weight = client["weight"]
            return path, client

        def clip_fp32_gradients(self) -> None:
            self.called["clip"] += 1
            super().clip_fp32_gradients()

    return OwnEngine


class DroppedBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(hidden), 0.2, self.training)


def dropped_layers(case: Case) -> list[Any]:
    return [LayerSpec(Embedding, 1), *(LayerSpec(DroppedBlock, i) for i in range(case.blocks)), LayerSpec(Head, 2)]


def train_own(
    which: str,
    case: Case,
    moves: Sequence[Sequence[int]] = (),
    save_to: str | None = None,
    resume_from: str | None = None,
    make_layers: Callable[[Case], list[Any]] = dropped_layers,
) -> dict[str, Any]:
    """Train four batches and evaluate.

    Args:
        save_to: a folder to save to after the second batch.
        resume_from: a folder to load; only the last two batches are trained then.
    """
    theirs = own_engine()
    engine = initialize(which, case, make_layers, partial(theirs, weight=0.0 if resume_from else 0.3))
    if resume_from is not None:
        engine.load_checkpoint(resume_from)
    engine.set_dataiterator(itertools.islice(batches(engine), engine.global_steps * case.micro_batches, None))
    losses, waiting = [], list(moves)
    for step in range(engine.global_steps, 4):
        losses += [one.item() for one in engine.train_batch()]
        if waiting:
            engine.rebalance(waiting.pop(0))
        if step == 1 and save_to is not None:
            engine.save_checkpoint(save_to)
    evaluated = [one.item() for one in engine.eval_batch(batches(engine, seed=7))]
    kinds = isinstance(engine, theirs), isinstance(engine, ds_dynmo.DynMoPipelineEngine), type(engine).__name__
    found = {"losses": losses, "evaluated": evaluated, "called": engine.called, "kinds": kinds, "replica": 0}
    found["weight"] = engine.weight
    return found if which == "deepspeed" or case.dynmo is None else {**found, "state": state(engine)}


def test_moves_change_nothing_in_an_engine_with_a_batch_of_its_own_which_resumes_on_more_stages(tmp_path: Path) -> None:
    folder = str(tmp_path)
    still, moved = run_each(2, train_own, ("ds_dynmo", CASE), ("ds_dynmo", CASE, MOVES, folder))
    case = replace(CASE, stages=3)
    loaded = run(3, train_own, "ds_dynmo", case, [[0, 1, 2, 8], [0, 5, 7, 8]], None, folder)
    assert outcomes(moved, "losses", "evaluated") == outcomes(still, "losses", "evaluated")
    assert whole(moved) == whole(still) == whole(loaded)
    assert loaded[0]["losses"] == moved[0]["losses"][2:] and loaded[0]["weight"] == 0.3
    assert all(result["kinds"] == (True, True, "DynMoOwnEngine") for result in still)
    called = {"train_batch": 4, "eval_batch": 1, "clip": 4}
    assert all(result["called"] == called for result in still)
    assert all(result["called"] == {**called, "save_checkpoint": 1} for result in moved)
    assert all(
        result["called"] == {"load_checkpoint": 1, "train_batch": 2, "eval_batch": 1, "clip": 2} for result in loaded
    )


def test_without_random_numbers_it_equals_the_users_engine_on_deepspeed() -> None:
    cases = (("deepspeed", None), ("ds_dynmo", None), ("ds_dynmo", {"interval": 0}))
    calls = ((which, Case(clip=0.0, dynmo=dynmo), (), None, None, layers) for which, dynmo in cases)
    stock, *ours = (outcomes(results, "losses", "evaluated", "called") for results in run_each(2, train_own, *calls))
    assert ours == [stock, stock]


def an_attribute_of_the_same_name() -> str:
    class TheirEngine(PipelineEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.rebalancer, self._harmless_too = "theirs", 2
            super().__init__(*args, **kwargs)
            self._components, self._harmless, self.micro_batches = "theirs", 1, self.micro_batches

    return error_of(lambda: initialize("ds_dynmo", Case(), layers, TheirEngine))


def test_an_engine_class_whose_constructor_sets_our_attributes_is_refused() -> None:
    for message in run(2, an_attribute_of_the_same_name):
        assert "TheirEngine: its constructor sets _components, rebalancer, which ds_dynmo's engine uses" in message


def patched_engine_class_of_deepspeed() -> tuple[bool, bool]:
    """Tell whether the engine is built upon a user's ``deepspeed.PipelineEngine``, and whether that is restored."""
    theirs = type("TheirEngine", (PipelineEngine,), {})
    deepspeed.PipelineEngine = theirs
    try:
        return isinstance(build(Case()), theirs), deepspeed.PipelineEngine is theirs
    finally:
        deepspeed.PipelineEngine = PipelineEngine


def test_an_engine_class_put_into_deepspeed_is_built_upon() -> None:
    assert run(2, patched_engine_class_of_deepspeed) == [(True, True)] * 2


class WithTheirBatch(PipelineEngine):
    def train_batch(self, data_iter: Any) -> Any:
        self.set_dataiterator(data_iter)
        self.total_loss, self._compute_loss = None, True
        self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
        return self._aggregate_total_loss()


def schedule_reported() -> str:
    engine = initialize("ds_dynmo", Case(dynmo={"interval": 0, "schedule": "zero_bubble"}), layers, WithTheirBatch)
    data = batches(engine)
    for _ in range(2):  # the second is profiled
        engine.train_batch(data)
    engine.eval_batch(batches(engine, seed=7))
    return str(engine.rebalance().schedule)


def test_their_batch_runs_the_schedule_in_force() -> None:
    for reported in run(2, schedule_reported):
        assert reported.startswith("zero_bubble, ")


class TheirSchedule(schedule.TrainSchedule):
    """DeepSpeed's, under a name of the user's."""


class WithTheirSchedule(PipelineEngine):
    def _train_schedule(self) -> Any:
        return TheirSchedule(self.micro_batches, self.num_stages, self.stage_id)


def a_schedule_of_its_own() -> str:
    engine = initialize("ds_dynmo", Case(), layers, WithTheirSchedule)
    return error_of(lambda: engine.train_batch(batches(engine)))


def test_a_schedule_of_its_own_is_refused() -> None:
    assert all("test_engine_class.TheirSchedule: batches run" in message for message in run(2, a_schedule_of_its_own))


@pytest.mark.nightly
def test_its_batch_trains_the_same_under_our_schedules() -> None:
    check_as_under_1f1b(2, train_own, "ds_dynmo", replace(CASE, clip=0.0), (), None, None, twofold)
