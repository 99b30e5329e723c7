"""Runs with pipeline instructions of the user's own, and engines that DynMo's is built upon.

Every function here runs on a rank, in a world of its own: what is changed in DeepSpeed's classes ends with it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

import ds_dynmo
from ds_dynmo.errors import ConfigError
from tests.distributed.workloads import (
    Block,
    Case,
    Embedding,
    Head,
    batches,
    build,
    config,
    freeze,
    layers,
    loss,
    state,
)

STEPS = 5
Counts = Counter[str]


def counted(counts: Counts, kind: type, instruction: Callable[..., None]) -> Callable[..., None]:
    def own(self: Any, *args: Any, **kwargs: Any) -> None:
        counts[kind.__name__] += 1
        instruction(self, *args, **kwargs)

    return own


def reduce_nothing(counts: Counts) -> Callable[[Any], None]:
    """As diffusion-pipe's with gradient release: there is one replica, and gradients are not to be touched."""

    def reduce(self: Any) -> None:
        assert self.mpu.get_data_parallel_world_size() == 1
        counts["ReduceGrads"] += 1

    return reduce


def own_map(counts: Counts, present: Any) -> dict[type, Any]:
    """Every instruction counts; gradients are reduced by a function of the user's own."""
    own = {kind: counted(counts, kind, instruction) for kind, instruction in present.items()}
    return {**own, schedule.ReduceGrads: reduce_nothing(counts)}


def patch(how: str, engine: Any, counts: Counts) -> None:
    if how == "entries":
        PipelineEngine._INSTRUCTION_MAP.update(own_map(counts, PipelineEngine._INSTRUCTION_MAP))
    elif how == "map":
        PipelineEngine._INSTRUCTION_MAP = own_map(counts, PipelineEngine._INSTRUCTION_MAP)
    elif how == "engine":
        engine._INSTRUCTION_MAP = own_map(counts, engine._INSTRUCTION_MAP)


def initialize(which: str, case: Case, make_layers: Callable[[Case], list[Any]], engine_class: Any = None) -> Any:
    torch.manual_seed(0)
    module = PipelineModule(
        layers=make_layers(case),
        num_stages=case.stages,
        loss_fn=loss,
        partition_method="uniform",
        activation_checkpoint_interval=case.checkpoint_interval,
    )
    arguments = {"model": module, "model_parameters": list(module.parameters()), "config": config(case)}
    if which == "deepspeed":
        stock, deepspeed.PipelineEngine = deepspeed.PipelineEngine, engine_class or PipelineEngine
        try:
            return deepspeed.initialize(**arguments)[0]
        finally:
            deepspeed.PipelineEngine = stock
    return ds_dynmo.initialize(**arguments, **({"engine_class": engine_class} if engine_class else {}))[0]


def train_patched(
    which: str,
    case: Case,
    how: str,
    early: bool,
    moves: Sequence[Sequence[int]] = (),
    save_to: str | None = None,
    resume_from: str | None = None,
) -> dict[str, Any]:
    """Count instructions; ``early``: they are patched before the engine is made, otherwise after two batches.

    ``save_to``: after the second batch; ``resume_from``: the last three.
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


# -- an instruction of the user's where ours does more than DeepSpeed's -------------------------------


class Twofold(nn.Module):
    """A stage that ends here sends two tensors, which depend on each other's layers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.one, self.other = Block(index), Block(index + 50)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.one(both[0] + 0.1 * both[1])
        return hidden, self.other(both[1] + 0.1 * hidden)


def in_two(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden, 0.5 * hidden


def add_up(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return both[0] + both[1]


def twofold_layers(case: Case) -> list[Any]:
    middle = [LayerSpec(Twofold, index) for index in range(case.blocks)]
    return [LayerSpec(Embedding, 1), in_two, *middle, add_up, LayerSpec(Head, 2)]


def backward_from_each(engine: Any, buffer_id: int) -> None:
    """A backward pass of the user's own: not DeepSpeed's function, but to the same effect."""
    if engine.is_last_stage():
        super(PipelineEngine, engine).backward(engine.loss)
        return
    outputs, gradients = engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer
    if isinstance(outputs, torch.Tensor):
        outputs, gradients = (outputs,), (gradients,)
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True
    for number, (output, gradient) in enumerate(zip(outputs, gradients, strict=True), start=1):
        output.backward(gradient=gradient, retain_graph=number < len(outputs))
    engine._running_engine_backward = False
    if engine.using_bf16_optimizer:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)
    engine.pipe_buffers["outputs"][buffer_id] = None


def train_with_own_backward(
    case: Case, moves: Sequence[Sequence[int]], twofold: bool = False, prefix: int = 0
) -> dict[str, Any]:
    """``prefix`` layers are frozen."""
    counts: Counts = Counter()
    changed = (schedule.BackwardPass, schedule.ReduceTiedGrads, schedule.OptimizerStep)
    engine = build(case, twofold_layers if twofold else layers)
    for kind in changed:
        own = backward_from_each if kind is schedule.BackwardPass else PipelineEngine._INSTRUCTION_MAP[kind]
        PipelineEngine._INSTRUCTION_MAP[kind] = counted(counts, kind, own)
    if prefix:
        freeze(engine, prefix)
        engine.model_changed("a prefix is frozen")
    data, losses, waiting = batches(engine), [], list(moves)
    for _ in range(STEPS):
        engine._controller.decided(moved=False)  # moves are this test's own
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return {"losses": losses, "counts": counts, "state": state(engine), "replica": 0}


def own_sends_with_a_frozen_prefix() -> tuple[str, float, str]:
    """What freezing says, and that training goes on where layers thaw again; what a patch in mid-training says."""
    engine = build(Case())
    data, kind = batches(engine), schedule.SendGrad
    original = PipelineEngine._INSTRUCTION_MAP[kind]
    PipelineEngine._INSTRUCTION_MAP[kind] = counted(Counter(), kind, original)
    freeze(engine, 2)
    messages = [error_of(lambda: engine.model_changed("frozen"))]
    freeze(engine, 0)
    engine.model_changed("thawed")
    trained = engine.train_batch(data).item()
    PipelineEngine._INSTRUCTION_MAP[kind] = original
    freeze(engine, 2)
    engine.model_changed("frozen")
    engine.train_batch(data)
    PipelineEngine._INSTRUCTION_MAP[kind] = counted(Counter(), kind, original)
    messages.append(error_of(lambda: engine.train_batch(data)))
    return messages[0], trained, messages[1]


def a_schedule_of_its_own() -> str:
    engine = build(Case())
    engine._exec_schedule = partial(PipelineEngine._exec_schedule, engine)
    return error_of(lambda: engine.train_batch(batches(engine)))


def a_map_set_in_a_batch() -> str:
    engine = build(Case())
    engine.before_step(lambda: setattr(engine, "_INSTRUCTION_MAP", dict(engine._INSTRUCTION_MAP)))
    message = error_of(lambda: engine.train_batch(batches(engine)))
    assert engine._INSTRUCTION_MAP is PipelineEngine._INSTRUCTION_MAP
    return message


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


def instructions_seen(path: str, own: bool) -> dict[str, Any]:
    """A profiled and traced batch, where instructions are the user's or not."""
    counts: Counts = Counter()
    block = {"interval": 0, "profile": {"batches": 1, "warmup_batches": 0}, "trace": {"path": path, "steps": [1, 2]}}
    engine = build(Case(dynmo=block))
    if own:
        PipelineEngine._INSTRUCTION_MAP.update(own_map(counts, PipelineEngine._INSTRUCTION_MAP))
    data = batches(engine)
    engine.model_changed("it is to be profiled")
    losses = [engine.train_batch(data).item() for _ in range(2)]
    profiled = engine.profile is not None and all(layer.forward_seconds > 0 for layer in engine.profile.layers)
    return {"losses": losses, "counts": counts, "profiled": profiled}


# -- an engine in the manner of qlora-pipe's ----------------------------------------------------------


class LoadBoth(schedule.BufferOpInstruction):
    """Load a micro-batch into a buffer and into that of the reference."""

    def __init__(self, buffer_id: int, reference: int) -> None:
        super().__init__(buffer_id, reference=reference)


class ReferencePass(schedule.BufferOpInstruction):
    """A forward pass without gradients, through the same layers."""


class WithReference(schedule.TrainSchedule):
    """Every forward pass comes after one of the reference, in a buffer of its own."""

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
    """A subclass as a user writes it. It changes DeepSpeed's map when it is defined, as qlora-pipe's does."""

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
    """Five batches and an evaluation; ``save_to``: after the second, ``resume_from``: the last three."""
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


def an_attribute_of_the_same_name() -> str:
    class TheirEngine(PipelineEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._controller, self._harmless_too = "theirs", 2
            super().__init__(*args, **kwargs)
            self._reporter, self._harmless, self.micro_batches = "theirs", 1, self.micro_batches

    return error_of(lambda: initialize("ds_dynmo", Case(), layers, TheirEngine))


def patched_engine_class_of_deepspeed() -> tuple[bool, bool]:
    """``deepspeed.PipelineEngine`` is the user's own: is the engine built upon it, and put back?"""
    theirs = type("TheirEngine", (PipelineEngine,), {})
    deepspeed.PipelineEngine = theirs
    try:
        return isinstance(build(Case()), theirs), deepspeed.PipelineEngine is theirs
    finally:
        deepspeed.PipelineEngine = PipelineEngine
