"""A user's own engine class, as qlora-pipe defines one."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from tests.distributed.harness import run, run_each
from tests.distributed.support.configs import Case
from tests.distributed.support.instructions import MOVES, STEPS, error_of, initialize, outcomes
from tests.distributed.support.models import Block, Embedding, Head, layers
from tests.distributed.support.training import batches, build, check_moves_changed_nothing, outcome_of, state, whole

# -- a user's own engine ------------------------------------------------------------------------------


REFERENCE = Case(blocks=6, clip=0.0)


def same_as(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert outcomes(found, "losses", "evaluated") == outcomes(expected, "losses", "evaluated")
    assert whole(found) == whole(expected)


class LoadBoth(schedule.BufferOpInstruction):
    """Load a micro-batch into a buffer and into the reference's buffer."""

    def __init__(self, buffer_id: int, reference: int) -> None:
        super().__init__(buffer_id, reference=reference)


class ReferencePass(schedule.BufferOpInstruction):
    """A forward pass without gradients, through the same layers."""


class WithReference(schedule.TrainSchedule):
    """Runs a reference pass, in its own buffer, before every forward pass."""

    def num_pipe_buffers(self) -> int:
        return super().num_pipe_buffers() + 1

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % super().num_pipe_buffers()

    def steps(self) -> Iterator[list[Any]]:
        reference = super().num_pipe_buffers()
        for commands in super().steps():
            yield [own for command in commands for own in self._with_reference(command, reference)]

    def _with_reference(self, command: Any, reference: int) -> list[Any]:
        if isinstance(command, schedule.LoadMicroBatch):
            return [LoadBoth(command.buffer_id, reference)]
        if isinstance(command, schedule.SendActivation | schedule.RecvActivation):
            return [type(command)(reference), command]
        return [ReferencePass(reference), command] if isinstance(command, schedule.ForwardPass) else [command]


def reference_engine() -> type[PipelineEngine]:
    """Define a subclass as a user does. It changes DeepSpeed's map when it is defined, as qlora-pipe's does."""

    class ReferenceEngine(PipelineEngine):
        def __init__(self, *args: Any, weight: float = 0.0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.weight, self.called, self.reference_logits = weight, Counter(), None

        def train_batch(self) -> list[torch.Tensor]:  # type: ignore[override]
            self.called["train_batch"] += 1
            self.module.train()
            self.total_loss, self._compute_loss = None, True
            self._exec_schedule(WithReference(self.micro_batches, self.num_stages, self.stage_id))
            return [self._aggregate_total_loss()]

        def eval_batch(self, data_iter: Any) -> list[torch.Tensor]:  # type: ignore[override]
            self.called["eval_batch"] += 1
            self.module.eval()
            training, self.data_iterator, self._compute_loss = self.data_iterator, data_iter, True
            self.total_loss = self.reference_logits = None
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

        def _exec_load_both(self, buffer_id: int, reference: int) -> None:
            self.called["load"] += 1
            self._exec_load_micro_batch(buffer_id)
            if self.is_first_stage():
                self.pipe_buffers["inputs"][reference] = self.pipe_buffers["inputs"][buffer_id]

        @torch.no_grad()
        def _exec_reference_pass(self, buffer_id: int) -> None:
            self.called["reference"] += 1
            logits = super(PipelineEngine, self).forward(self.pipe_buffers["inputs"][buffer_id])
            self.pipe_buffers["outputs"][buffer_id] = self.reference_logits = logits

        def _exec_own_forward(self, buffer_id: int) -> None:
            self.called["forward"] += 1
            outputs = super(PipelineEngine, self).forward(self.pipe_buffers["inputs"][buffer_id])
            self.pipe_buffers["outputs"][buffer_id] = outputs
            if self.is_last_stage():
                self.loss = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
                if self.reference_logits is not None:
                    self.loss = self.loss + self.weight * F.mse_loss(outputs, self.reference_logits)
                self.total_loss = self.loss.detach() + (0 if self.total_loss is None else self.total_loss)

        PipelineEngine._INSTRUCTION_MAP[schedule.ForwardPass] = _exec_own_forward
        PipelineEngine._INSTRUCTION_MAP[LoadBoth] = _exec_load_both
        PipelineEngine._INSTRUCTION_MAP[ReferencePass] = _exec_reference_pass

    return ReferenceEngine


class DroppedBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(hidden), 0.2, self.training)


def dropped_layers(case: Case) -> list[Any]:
    return [LayerSpec(Embedding, 1), *(LayerSpec(DroppedBlock, i) for i in range(case.blocks)), LayerSpec(Head, 2)]


def train_with_reference(
    which: str,
    case: Case,
    moves: Sequence[Sequence[int]] = (),
    save_to: str | None = None,
    resume_from: str | None = None,
    make_layers: Callable[[Case], list[Any]] = dropped_layers,
) -> dict[str, Any]:
    """Train five batches and evaluate.

    Args:
        save_to: a folder to save to after the second batch.
        resume_from: a folder to load; only the last three batches are trained then.
    """
    theirs = reference_engine()
    engine = initialize(which, case, make_layers, partial(theirs, weight=0.0 if resume_from else 0.3))
    if resume_from is not None:
        engine.load_checkpoint(resume_from)
    data = itertools.islice(batches(engine), engine.global_steps * case.micro_batches, None)
    engine.set_dataiterator(data)
    losses, waiting = [], list(moves)
    for step in range(engine.global_steps, STEPS):
        losses += [one.item() for one in engine.train_batch()]
        if waiting:
            engine.rebalance(waiting.pop(0))
        if step == 1 and save_to is not None:
            engine.save_checkpoint(save_to)
    evaluated = [one.item() for one in engine.eval_batch(batches(engine, seed=7))]
    kinds = isinstance(engine, theirs), isinstance(engine, ds_dynmo.DynMoPipelineEngine), type(engine).__name__
    found = {"losses": losses, "evaluated": evaluated, "called": engine.called, "kinds": kinds, "replica": 0}
    return found if which == "deepspeed" or case.dynmo is None else {**found, "state": state(engine)}


def test_moves_change_nothing_in_an_engine_like_qlora_pipes() -> None:
    still = run(2, train_with_reference, "ds_dynmo", REFERENCE)
    moved = run(2, train_with_reference, "ds_dynmo", REFERENCE, MOVES)
    same_as(moved, still)
    assert outcomes(moved, "called") == outcomes(still, "called")
    assert all(result["kinds"] == (True, True, "DynMoReferenceEngine") for result in still)
    assert all(result["called"]["reference"] == result["called"]["load"] == 15 for result in still)
    assert all(result["called"]["train_batch"] == 5 and result["called"]["eval_batch"] == 1 for result in still)


@pytest.mark.parametrize("dynmo", [None, {"interval": 0}])
def test_without_random_numbers_it_equals_the_users_engine_on_deepspeed(dynmo: dict[str, Any] | None) -> None:
    case = Case(clip=0.0, dynmo=dynmo)
    stock = run(2, train_with_reference, "deepspeed", case, (), None, None, layers)
    ours = run(2, train_with_reference, "ds_dynmo", case, (), None, None, layers)
    assert outcomes(stock, "losses", "evaluated", "called") == outcomes(ours, "losses", "evaluated", "called")


def test_recomputation_repeats_the_random_numbers_of_each_kind_of_pass() -> None:
    still = run(2, train_with_reference, "ds_dynmo", REFERENCE)
    case = Case(blocks=6, clip=0.0, checkpoint_interval=1, reentrant=False)
    same_as(run(2, train_with_reference, "ds_dynmo", case, MOVES), still)


def test_a_trace_shows_instructions_of_its_own_kinds(tmp_path: Path) -> None:
    """Also in a profiled batch. Profile and trace change nothing."""
    block = {
        "profile": {"batches": 99, "warmup_batches": 0},
        "trace": {"path": str(tmp_path / "trace"), "steps": [2, 2]},
    }
    traced = run(2, train_with_reference, "ds_dynmo", Case(blocks=6, clip=0.0, dynmo=block))
    same_as(traced, run(2, train_with_reference, "ds_dynmo", REFERENCE))
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    own = Counter(e["name"] for e in events if e.get("cat") == "instruction")
    assert own == {f"{kind} {number}": 2 for kind in ("LoadBoth", "ReferencePass") for number in range(3)}


def test_a_users_engine_resumes_at_another_number_of_stages(tmp_path: Path) -> None:
    case = Case(blocks=6, clip=1.0)
    saved = run(2, train_with_reference, "ds_dynmo", case, MOVES, str(tmp_path))
    loaded = run(
        *(3, train_with_reference, "ds_dynmo", Case(stages=3, blocks=6, clip=1.0)),
        *([[0, 1, 2, 8], [0, 5, 7, 8]], None, str(tmp_path)),
    )
    assert whole(loaded) == whole(saved)
    assert loaded[0]["losses"] == saved[0]["losses"][2:]
    assert all(result["called"]["load_checkpoint"] == 1 and result["called"]["clip"] == 3 for result in loaded)
    assert all(result["called"]["save_checkpoint"] == 1 and result["called"]["clip"] == 5 for result in saved)


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


class TheirSchedule(schedule.TrainSchedule):
    """DeepSpeed's, under a name of the user's."""


class WithTheirSchedule(PipelineEngine):
    def _train_schedule(self) -> Any:
        return TheirSchedule(self.micro_batches, self.num_stages, self.stage_id)


class WithTheirBatch(PipelineEngine):
    def train_batch(self, data_iter: Any) -> Any:
        self.set_dataiterator(data_iter)
        self.total_loss, self._compute_loss = None, True
        self._exec_schedule(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id))
        return self._aggregate_total_loss()


def report_under(theirs: type[PipelineEngine], kind: str) -> Any:
    engine = initialize("ds_dynmo", Case(dynmo={"interval": 0, "schedule": {"kind": kind}}), layers, theirs)
    data = batches(engine)
    for _ in range(3):
        engine.train_batch(data)
    engine.eval_batch(batches(engine, seed=7))
    return engine.rebalance()


@pytest.mark.parametrize("kind", ["zero_bubble", "1f1b"])
def test_reports_say_what_their_engine_runs(kind: str) -> None:
    named, unnamed, ours = (
        results[0]
        for results in run_each(
            2, report_under, *((theirs, kind) for theirs in (WithTheirSchedule, WithTheirBatch, PipelineEngine))
        )
    )
    assert named.own_schedule == "TheirSchedule"
    assert named.schedule.startswith("TheirSchedule, predicted ") and named.schedule.endswith(" ms as 1f1b")
    assert unnamed.own_schedule == ours.own_schedule == "" and unnamed.schedule.startswith("1f1b, predicted ")
    assert named.schedule_splits is None and unnamed.schedule_splits is None
    assert ours.schedule.startswith(f"{kind}, ")


class StepsTwice(schedule.TrainSchedule):
    """DeepSpeed's, with another optimizer step at the end, which finds no gradients."""

    def steps(self) -> Any:
        yield from super().steps()
        yield [schedule.OptimizerStep()]


class WithTwoSteps(PipelineEngine):
    def _train_schedule(self) -> Any:
        return StepsTwice(self.micro_batches, self.num_stages, self.stage_id)


def stepped_twice(moves: bool) -> dict[str, Any]:
    """Decide to move in the background before the first batch, when nobody knows the schedule yet."""
    engine = initialize("ds_dynmo", Case(stages=2), layers, WithTwoSteps)
    data, losses = batches(engine), []
    for step in range(3):
        if moves and step == 0:
            engine.rebalance([0, 2, 8], background=True)
        losses.append(engine.train_batch(data).item())
    return {**outcome_of(engine, losses), "steps": engine.global_steps}


def test_no_step_of_a_users_schedule_is_lost_when_layers_move() -> None:
    still, moved = run_each(2, stepped_twice, (False,), (True,))
    assert [r["steps"] for r in moved] == [r["steps"] for r in still] == [6, 6]
    check_moves_changed_nothing(still, moved)
