"""Tensor-parallel layers that draw from random states by name; every function here runs on a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from ds_dynmo.errors import ConfigError
from tests.distributed.topology_workloads import SLICES, SlicedBlock, _Copy, _Reduce, sliced_layers
from tests.distributed.workloads import Case, batches, build, state

OF_SLICE, OF_ALL = "model-parallel-rng", "data-parallel-rng"
MEGATRON = "megatron.core.tensor_parallel.random"


class Generators:
    """A tracker whose states are generators."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Generator] = {}

    def add(self, name: str, seed: int) -> None:
        self.states[name] = torch.Generator().manual_seed(seed)

    def get_states(self) -> dict[str, torch.Generator]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Generator]) -> None:
        self.states = dict(states)

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states[name].get_state())
        try:
            yield
        finally:
            self.states[name].set_state(torch.get_rng_state())
            torch.set_rng_state(outer)


class ForkingBlock(SlicedBlock):
    """Drops in the part that is split over the slices, and alike in what is not; notes what it drew."""

    def __init__(self, index: int, checkpointed: bool) -> None:
        super().__init__(index)
        self.index, self.checkpointed = index, checkpointed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and self.training:
            return deepspeed.checkpointing.checkpoint(self.inside, hidden)
        return self.inside(hidden)

    def inside(self, hidden: torch.Tensor) -> torch.Tensor:
        tracker, drawn = SLICES["tracker"], SLICES["drawn"]
        inner = torch.tanh(_Copy.apply(self.norm(hidden), SLICES["group"]) @ self.up.t())
        with tracker.fork(OF_SLICE):
            drawn.add((self.index, OF_SLICE, torch.rand(()).item()))
            inner = F.dropout(inner, 0.3, self.training)
        outer = hidden + _Reduce.apply(inner @ self.down.t(), SLICES["group"]) + self.bias
        with tracker.fork(OF_ALL):
            drawn.add((self.index, OF_ALL, torch.rand(()).item()))
            outer = F.dropout(outer, 0.1, self.training)
        return F.dropout(outer, 0.1, self.training)


class Checkpointed(ForkingBlock):
    def __init__(self, index: int) -> None:
        super().__init__(index, True)


class Plain(ForkingBlock):
    def __init__(self, index: int) -> None:
        super().__init__(index, False)


def forking_layers(case: Case, kind: type[nn.Module]) -> list[Any]:
    first, *blocks, last = sliced_layers(case)
    return [first, *(LayerSpec(kind, index) for index in range(len(blocks))), last]


def make_tracker(which: str, engine: Any) -> Any:
    """Seeded as its library does: by the slice and, Megatron's, by the stage too."""
    mine, stage = engine.grid.get_slice_parallel_rank(), engine.stage_id
    if which == "deepspeed":
        mpu = SimpleNamespace(  # DeepSpeed 0.19.8 fails with its own grid
            get_model_parallel_rank=engine.grid.get_slice_parallel_rank,
            get_model_parallel_world_size=engine.grid.get_slice_parallel_world_size,
            get_model_parallel_group=engine.grid.get_slice_parallel_group,
            get_data_parallel_rank=engine.grid.get_data_parallel_rank,
        )
        deepspeed.checkpointing.configure(mpu)
        checkpointing.model_parallel_cuda_manual_seed(11)
        tracker = checkpointing.get_cuda_rng_tracker()
        tracker.add(OF_ALL, 11)
        return tracker
    tracker = Generators() if which == "own" else checkpointing.CudaRNGStatesTracker()
    tracker.add(OF_SLICE, 11 + 2718 + mine + 100 * stage)
    tracker.add(OF_ALL, 11 + 100 * stage)
    if which == "own":
        engine.add_rng_tracker("mine", tracker)
    else:
        sys.modules[MEGATRON]._CUDA_RNG_STATE_TRACKER = tracker  # type: ignore[attr-defined]
    return tracker


def train(case: Case, which: str, moves: Sequence[Sequence[int]] = (), checkpointed: bool = False) -> dict[str, Any]:
    """Five batches and an evaluation."""
    sys.modules[MEGATRON] = ModuleType(MEGATRON)
    sys.modules[MEGATRON]._CUDA_RNG_STATE_TRACKER = None  # type: ignore[attr-defined]
    engine = build(case, lambda case: forking_layers(case, Checkpointed if checkpointed else Plain))
    SLICES.update(tracker=make_tracker(which, engine), drawn=set())
    before = tracked()
    data, losses, waiting = batches(engine), [], list(moves)
    for _ in range(5):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    losses.append(engine.eval_batch(batches(engine, seed=7)).item())
    return {
        "losses": losses,
        "state": state(engine),
        "drawn": SLICES["drawn"],
        "slice": engine.grid.get_slice_parallel_rank(),
        "replica": 0,
        "kept": tracked() == before,
    }


def tracked() -> dict[str, list[int]]:
    states = SLICES["tracker"].get_states()
    return {
        name: (state.get_state() if isinstance(state, torch.Generator) else state).tolist()
        for name, state in states.items()
    }


class Closed:
    """Tells nothing of its states."""


def closed_trackers() -> list[str]:
    """Megatron's is refused before an engine is made and before a batch, one of the user's when it is given."""
    module: Any = ModuleType(MEGATRON)
    module.get_cuda_rng_tracker = Closed
    sys.modules[MEGATRON] = module
    messages = [error_of(lambda: build(Case()))]
    del sys.modules[MEGATRON]
    engine = build(Case())
    messages.append(error_of(lambda: engine.add_rng_tracker("mine", Closed())))
    losses = [engine.train_batch(batches(engine)).item()]
    sys.modules[MEGATRON] = module
    messages.append(error_of(lambda: engine.train_batch(batches(engine))))
    assert len(losses) == 1 and engine.global_steps == 1
    return messages


def error_of(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")
