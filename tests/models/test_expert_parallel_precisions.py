"""Experts that are split over replicas, in bf16 and with ZeRO-1: each replica holds all state of its own experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from tests.support import case_runs, configs
from tests.support.case_runs import CaseRun, check_moves_change_nothing, check_two_chunks_change_nothing, moved
from tests.support.configs import Case
from tests.support.expert_parallel import MODELS, load, save, unsharded
from tests.support.harness import run, run_each
from tests.support.models import layers
from tests.support.training import build, move_in_phases, state, whole

pytestmark = pytest.mark.ranks

ZERO_BUBBLE = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
CASES = {
    "bf16 zero1": "sbase with capacity",
    "bf16": "bias and freezing",
    "fp32 zero1": "auxiliary loss",
    "bf16 zero1 fp32sums": "bias and freezing",
    "bf16 immediate": "mod",
    "fp16 zero1": "auxiliary loss",
}


def case_in(precision: str, **changes: Any) -> CaseRun:
    return replace(CaseRun(MODELS[CASES[precision]], replicas=2, precision=precision, clip=0.05, steps=4), **changes)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", CASES)
def test_moves_and_a_restart_under_zero_bubble_change_nothing(precision: str, tmp_path: Path) -> None:
    case = case_in(precision)
    elsewhere = moved(replace(case, dynmo=ZERO_BUBBLE))
    check_moves_change_nothing(case, *run_each(4, case_runs.train, (case,), (elsewhere, str(tmp_path), 3)))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", CASES)
def test_two_chunks_per_stage_change_nothing(precision: str) -> None:
    check_two_chunks_change_nothing(case_in(precision, steps=5), "v")


def gradients(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the optimizer's mean gradients by parameter; of experts those of all replicas, in order."""
    found: dict[str, list[np.ndarray]] = {}
    for key, value in sorted(whole(results).items()):
        if key.endswith("/momentum_buffer"):
            found.setdefault(key.rpartition(": ")[2], []).append(np.frombuffer(value, dtype=np.float32))
    return {key: np.concatenate(parts) for key, parts in found.items()}


@pytest.mark.parametrize(
    "precision", [name if name == "bf16 zero1" else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_split_experts_train_as_all_experts_on_every_replica(precision: str) -> None:
    case = case_in(precision, optimizer="SGD", steps=3)
    ours, theirs = run_each(4, case_runs.train, (case,), (unsharded(case),))
    tolerance = 1e-5 if "fp32 " in precision else 0.03
    np.testing.assert_allclose(ours[0]["losses"], theirs[0]["losses"], rtol=tolerance)
    expected, found = gradients(theirs), gradients(ours)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        largest = np.abs(expected[key]).max()
        np.testing.assert_allclose(gradient, expected[key], rtol=tolerance, atol=tolerance * largest, err_msg=key)


def train_on_fewer(run: CaseRun, changes: bool) -> dict[str, Any]:
    """Train five batches on two stages; with ``changes``, move while no batch trains, and go on with one."""
    engine, model = case_runs.build(run)
    data, losses, rank = case_runs.batches(engine, model), {}, dist.get_rank()
    while engine.global_steps < 5:
        losses[engine.global_steps] = engine.train_batch(data).item()
        if changes and engine.global_steps == 1:
            move_in_phases(engine, [0, 2, case_runs.num_layers(run)], overlapped=True)
        if changes and engine.global_steps == 2:
            engine.repack(1)
        if engine.released:
            return {"losses": losses, "state": {"shards": {}}, "replica": rank % 2, "held": (0, 0)}
    return {"losses": losses, "state": state(engine), "replica": rank % 2, "held": held_and_counted(engine)}


def held_and_counted(engine: Any) -> tuple[int, int]:
    """Return the bytes of optimizer state that this rank holds, and those that the profile counts, in its layers."""
    shards = engine.stage.state.shards
    held = [shards.held(buffer) for buffer in shards.buffers]
    counted = [shards.bytes_between_batches(parameter).shards for parameter in engine.module.parameters()]
    return sum(tensor.nbytes for of_buffer in held for tensor in of_buffer.values()), sum(counted)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16 zero1", "bf16"])
def test_fewer_stages_change_nothing(precision: str) -> None:
    """Before that layers move ahead of the other state, as while a batch trains. The profile counts what is held."""
    case = CaseRun(MODELS["auxiliary loss"], replicas=2, precision=precision, clip=0.0)
    stayed, fewer = (run(4, train_on_fewer, case, changes) for changes in (False, True))
    assert fewer[0]["losses"] == stayed[0]["losses"] == fewer[2]["losses"] | stayed[0]["losses"]
    assert whole(fewer) == whole(stayed)
    padding = 4 * 4 * 4 * 2  # elements of two groups' shards at most, their bytes, and kinds of state
    for rank in (*stayed, *fewer):
        held, counted = rank["held"]
        assert 0 <= held - counted <= padding


def state_through(run: CaseRun, folder: str, loads: bool) -> dict[str, Any]:
    """Train two batches and save, or load. Return the state."""
    engine, model = case_runs.build(run)
    data = case_runs.batches(engine, model)
    if loads:
        engine.load_checkpoint(folder)
    else:
        engine.train_batch(data), engine.train_batch(data)
        engine.save_checkpoint(folder)
    return {"state": state(engine), "replica": engine.grid.get_data_parallel_id()}


@pytest.mark.nightly
@pytest.mark.parametrize("precision", CASES)
def test_a_checkpoint_loads_at_another_number_of_stages(precision: str, tmp_path: Path) -> None:
    case = case_in(precision)
    saved = whole(run(4, state_through, case, str(tmp_path), False))
    assert whole(run(2, state_through, replace(case, stages=1), str(tmp_path), True)) == saved
    assert whole(run(6, state_through, replace(case, stages=3), str(tmp_path), True)) == saved


def change_experts(folder: str) -> tuple[list[str], list[bool]]:
    """Load a checkpoint of split experts where all are on every replica, and the reverse. Return what was said."""
    case = CaseRun(MODELS["auxiliary loss"], stages=1, replicas=2, precision="bf16 zero1")
    save(case, f"{folder}/split")
    save(unsharded(case), f"{folder}/whole")
    said, same = zip(load(unsharded(case), f"{folder}/split"), load(case, f"{folder}/whole"))
    return list(said), list(same)


def test_a_checkpoint_of_other_replicas_is_refused(tmp_path: Path) -> None:
    for said, same in run(2, change_experts, str(tmp_path)):
        assert all(same)
        assert "written by a model of which every data-parallel replica has parameters of its own" in said[0]
        assert "expected one of which every replica has parameters of its own (moe.expert_parallel)" in said[1]


class Uneven(nn.Linear):
    """A layer of which every replica has other rows, and as many more as its number."""

    def use_replicas(self, group: Any) -> None:
        self.weight.data = self.weight.data[dist.get_rank(group) :].clone()
        self.weight.replica_own = True  # type: ignore[attr-defined]


def uneven() -> str:
    case = Case(stages=1, replicas=2, precision="bf16")
    with pytest.raises(ds_dynmo.ConfigError) as said:
        build(case, lambda case: [*layers(case)[:-1], LayerSpec(Uneven, 3, 2, bias=False)])
    return str(said.value)


def test_replicas_with_other_shapes_are_refused() -> None:
    for said in run(2, uneven):
        assert "[[2, 3]] on ranks [0], [[1, 3]] on ranks [1]" in said and "bf16 or ZeRO" in said


def switched_off(key: str) -> str:
    configs.PRECISIONS["sums"] = {"zero_optimization": {"stage": 1, key: False}}
    with pytest.raises(ds_dynmo.ConfigError) as said:
        case_runs.build(CaseRun(MODELS["mod"], stages=1, replicas=2, precision="sums"))
    return str(said.value)


def test_zero_that_would_sum_experts_with_others_is_refused() -> None:
    keys = ["reduce_scatter", "contiguous_gradients"]
    for key, ranks in zip(keys, run_each(2, switched_off, *((key,) for key in keys))):
        assert all(f"zero_optimization.{key} = false" in said and "allowed is true" in said for said in ranks)
