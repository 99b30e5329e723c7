"""Dropout under a tracker's ``fork()`` in a tensor-parallel layer depends on layer and slice, not on the stage."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
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
from tests.support.harness import run
from tests.support.sliced_layers import SLICES, SlicedBlock, _Copy, _Reduce, sliced_layers
from tests.support.training import batches, build, state, whole

pytestmark = pytest.mark.ranks

OF_SLICE, OF_ALL = "model-parallel-rng", "data-parallel-rng"
MEGATRON = "megatron.core.tensor_parallel.random"
MOVES = ([0, 1, 7], [0, 6, 7], [0, 2, 7], [0, 5, 7])
SLICED = Case(slices=2)


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
    """Train five batches and evaluate. After three, one slice of each stage adds a state, from which nothing draws."""
    sys.modules[MEGATRON] = ModuleType(MEGATRON)
    sys.modules[MEGATRON]._CUDA_RNG_STATE_TRACKER = None  # type: ignore[attr-defined]
    engine = build(case, lambda case: forking_layers(case, Checkpointed if checkpointed else Plain))
    SLICES.update(tracker=make_tracker(which, engine), drawn=set())
    before = tracked()
    data, losses, waiting = batches(engine), [], list(moves)
    for step in range(5):
        losses.append(engine.train_batch(data).item())
        if step == 2 and engine.grid.get_slice_parallel_rank() == 0:
            SLICES["tracker"].add("of one slice", 5)
        if waiting:
            engine.rebalance(waiting.pop(0))
    losses.append(engine.eval_batch(batches(engine, seed=7)).item())
    return {
        "losses": losses,
        "state": state(engine),
        "drawn": SLICES["drawn"],
        "slice": engine.grid.get_slice_parallel_rank(),
        "replica": 0,
        "kept": before.items() <= tracked().items(),
    }


@cache
def still(which: str) -> list[dict[str, Any]]:
    return run(4, train, SLICED, which)


def drawn(results: list[dict[str, Any]], index: int, name: str | None = None) -> set[tuple[int, str, float]]:
    """Return the random numbers of a slice on all stages, from the state ``name`` or from all."""
    of_slice = [result["drawn"] for result in results if result["slice"] == index]
    return {draw for found in of_slice for draw in found if name in (None, draw[1])}


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [result["losses"] for result in found] == [result["losses"] for result in expected]
    assert whole(found) == whole(expected)
    assert all(drawn(found, index) == drawn(expected, index) for index in range(2))
    assert all(result["kept"] for result in found)


@pytest.mark.parametrize(
    "which", [*(pytest.param(which, marks=pytest.mark.nightly) for which in ("deepspeed", "megatron")), "own"]
)
def test_moves_change_nothing(which: str) -> None:
    check_same(run(4, train, SLICED, which, MOVES), still(which))


@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_recomputation_repeats_the_random_numbers(reentrant: bool) -> None:
    case = Case(slices=2, checkpoint_interval=1, reentrant=reentrant)
    check_same(run(4, train, case, "deepspeed", MOVES), still("deepspeed"))


def test_a_layer_that_checkpoints_itself_repeats_its_random_numbers() -> None:
    check_same(run(4, train, SLICED, "deepspeed", MOVES, True), still("deepspeed"))


@pytest.mark.parametrize("which", ["deepspeed", "megatron", "own"])
def test_slices_share_random_numbers_only_from_equal_states(which: str) -> None:
    results = still(which)
    assert drawn(results, 0, OF_ALL) == drawn(results, 1, OF_ALL)
    one, other = drawn(results, 0, OF_SLICE), drawn(results, 1, OF_SLICE)
    assert len(one) == len(other) == len({value for _, _, value in one | other}) / 2
    assert not {value for _, _, value in one} & {value for _, _, value in drawn(results, 0, OF_ALL)}


def test_the_number_of_stages_changes_nothing() -> None:
    whole_model = run(2, train, Case(stages=1, slices=2), "megatron")
    assert whole(whole_model) == whole(still("megatron"))
    assert all(drawn(whole_model, index) == drawn(still("megatron"), index) for index in range(2))


def test_without_streams_random_numbers_are_the_ranks() -> None:
    case = Case(slices=2, dynmo={"interval": 0, "randomness": {"per_layer": False}})
    stays, moves = (run(4, train, case, "deepspeed", moves) for moves in ((), MOVES))
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


def gather_sizes() -> tuple[list[int], int]:
    """Gather a value of this rank's and the other slice. Return them, and how many collectives of the slices' group."""
    engine = build(SLICED)
    group = engine.grid.get_slice_parallel_group()
    before = group._get_sequence_number_for_group()
    gathered = engine.stage.comm.gather_over_slices({"rank": dist.get_rank()})
    return [value["rank"] for value in gathered], group._get_sequence_number_for_group() - before


def test_what_slices_tell_each_other_does_not_travel_on_the_devices_group() -> None:
    assert run(4, gather_sizes) == [([0, 1], 0), ([0, 1], 0), ([2, 3], 0), ([2, 3], 0)]
