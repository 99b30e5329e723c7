"""Dropout under a tracker's ``fork()`` in a tensor-parallel layer depends on layer and slice, not on the stage."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from ds_dynmo.errors import ConfigError
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.sliced_layers import SLICES, SlicedBlock, _Copy, _Reduce, sliced_layers
from tests.support.training import batches, build, state, whole

pytestmark = pytest.mark.ranks

OF_SLICE, OF_ALL = "model-parallel-rng", "data-parallel-rng"
MEGATRON = "megatron.core.tensor_parallel.random"
MOVES = ([0, 1, 5], [0, 4, 5], [0, 3, 5])
SLICED = Case(slices=2, blocks=3, micro_batches=2)


class ForkingBlock(SlicedBlock):
    """Applies dropout to the split part and to the rest, and records its random numbers."""

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
            drawn.add((self.index, OF_SLICE, torch.rand((), device=hidden.device).item()))
            inner = F.dropout(inner, 0.3, self.training)
        outer = hidden + _Reduce.apply(inner @ self.down.t(), SLICES["group"]) + self.bias
        with tracker.fork(OF_ALL):
            drawn.add((self.index, OF_ALL, torch.rand((), device=hidden.device).item()))
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


class Generators:
    """A tracker whose states are generators."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Generator] = {}

    def add(self, name: str, seed: int) -> None:
        self.states[name] = torch.Generator(get_accelerator().current_device_name()).manual_seed(seed)

    def get_states(self) -> dict[str, torch.Generator]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Generator]) -> None:
        self.states = dict(states)

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        device = get_accelerator()
        outer = device.get_rng_state()
        device.set_rng_state(self.states[name].get_state())
        try:
            yield
        finally:
            self.states[name].set_state(device.get_rng_state())
            device.set_rng_state(outer)


def make_tracker(which: str, engine: Any) -> Any:
    """Make a tracker seeded as by its library: by the slice and, for Megatron's, by the stage, too."""
    mine, stage = engine.grid.get_slice_parallel_rank(), engine.stage_id
    if which == "deepspeed":
        mpu = SimpleNamespace(  # because DeepSpeed 0.19.8 fails with its own grid
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


def tracked() -> dict[str, list[int]]:
    states = SLICES["tracker"].get_states()
    return {
        name: (state.get_state() if isinstance(state, torch.Generator) else state).tolist()
        for name, state in states.items()
    }


def train(case: Case, which: str, moves: Sequence[Sequence[int]] = (), checkpointed: bool = False) -> dict[str, Any]:
    """Train four batches and evaluate. After two, one slice of each stage adds a state, from which nothing draws."""
    sys.modules[MEGATRON] = ModuleType(MEGATRON)
    sys.modules[MEGATRON]._CUDA_RNG_STATE_TRACKER = None  # type: ignore[attr-defined]
    engine = build(case, lambda case: forking_layers(case, Checkpointed if checkpointed else Plain))
    SLICES.update(tracker=make_tracker(which, engine), drawn=set())
    before = tracked()
    data, losses, waiting = batches(engine), [], list(moves)
    for step in range(4):
        losses.append(engine.train_batch(data).item())
        if step == 1 and engine.grid.get_slice_parallel_rank() == 0:
            SLICES["tracker"].add("of one slice", 5)
        if waiting:
            engine.rebalance(waiting.pop(0))
    losses.append(engine.eval_batch(batches(engine, seed=7)).item())
    group = engine.grid.get_slice_parallel_group()
    collectives = group._get_sequence_number_for_group()
    gathered = engine.stage.comm.gather_over_slices({"rank": dist.get_rank()})
    return {
        "losses": losses,
        "state": state(engine),
        "drawn": SLICES["drawn"],
        "slice": engine.grid.get_slice_parallel_rank(),
        "replica": 0,
        "kept": before.items() <= tracked().items(),
        "gathered": [value["rank"] for value in gathered],
        "collectives to gather": group._get_sequence_number_for_group() - collectives,
    }


def drawn(results: list[dict[str, Any]], index: int, name: str | None = None) -> set[tuple[int, str, float]]:
    """Return the random numbers of a slice on all stages, from the state ``name`` or from all."""
    of_slice = [result["drawn"] for result in results if result["slice"] == index]
    return {draw for found in of_slice for draw in found if name in (None, draw[1])}


def check_same(name: str, found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert found[0]["losses"] == expected[0]["losses"], name
    assert len({tuple(each["losses"]) for each in found}) == 1, name
    assert whole(found) == whole(expected), name
    assert all(drawn(found, index) == drawn(expected, index) for index in range(2)), name
    assert all(result["kept"] for result in found), name


KINDS = ("own", "megatron", "deepspeed")


def test_neither_moves_recomputation_nor_the_number_of_stages_change_the_random_numbers() -> None:
    """Of each tracker. Slices share random numbers only from equal states."""
    one_stage = dict(
        zip(KINDS, run_each(2, train, *((replace(SLICED, stages=1), which) for which in KINDS)), strict=True)
    )
    arms = {
        "own": (SLICED, "own", MOVES),
        "megatron, recomputed": (replace(SLICED, checkpoint_interval=1), "megatron", MOVES),
        "deepspeed, layers checkpoint themselves": (SLICED, "deepspeed", MOVES, True),
    }
    found = dict(zip(arms, run_each(4, train, *arms.values()), strict=True))
    for name, arm in arms.items():
        check_same(name, found[name], one_stage[arm[1]])
    for which, results in one_stage.items():
        assert drawn(results, 0, OF_ALL) == drawn(results, 1, OF_ALL), which
        one, other = drawn(results, 0, OF_SLICE), drawn(results, 1, OF_SLICE)
        assert len(one) == len(other) == len({value for _, _, value in one | other}) / 2, which
        assert not {value for _, _, value in one} & {value for _, _, value in drawn(results, 0, OF_ALL)}, which
    # what slices tell each other does not travel on the devices' group
    assert [each["gathered"] for each in found["own"]] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["collectives to gather"] for each in found["own"]] == [0] * 4


def test_without_streams_random_numbers_are_the_ranks() -> None:
    case = replace(SLICED, slices=1, dynmo={"interval": 0, "randomness": {"per_layer": False}})
    stays, moves = run_each(2, train, (case, "deepspeed"), (case, "deepspeed", MOVES[:1]))
    assert stays[0]["losses"] != moves[0]["losses"]
    assert not any(result["kept"] for result in stays)


class Closed:
    """A tracker that does not give its states."""


def error_of(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


def closed_trackers() -> list[str]:
    """Return the errors of a closed Megatron tracker, before an engine and before a batch, and of a user's tracker."""
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


def test_trackers_without_readable_states_are_refused() -> None:
    for early, own, late in run(2, closed_trackers):
        assert f"random states of {MEGATRON} (Closed) cannot be enumerated" in early
        assert "it has no get_states and no set_states" in early and late == early
        assert "random states of mine (Closed)" in own
