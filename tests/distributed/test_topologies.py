"""Tensor parallelism, and what else DeepSpeed's pipeline engine can do, across a rebalance."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import topology_workloads as work
from tests.distributed.harness import RankError, run, run_each
from tests.distributed.test_bitwise import whole
from tests.distributed.workloads import Case

MOVES = [[0, 2, 8], [0, 6, 8], [0, 1, 8]]


@pytest.mark.parametrize(
    ("precision", "tied", "clip", "replicas"),
    [
        pytest.param("fp32", False, 0.0, 1),
        pytest.param("fp32", True, 0.05, 1),
        pytest.param("bf16", True, 0.05, 1),
        pytest.param("bf16 zero1", False, 0.05, 1),
        pytest.param("fp32", True, 0.05, 2, marks=pytest.mark.fuzz),
        pytest.param("bf16 zero1", True, 0.05, 2, marks=pytest.mark.fuzz),
    ],
)
def test_tensor_parallel(precision: str, tied: bool, clip: float, replicas: int) -> None:
    """Each (data, model) coordinate moves its own slice."""
    case = Case(
        stages=2, tied=tied, clip=clip, precision=precision, replicas=replicas, slices=2, groups="two", blocks=4
    )
    moves = [[0, 2, 6], [0, 5, 6], [0, 1, 6]]
    still, moved = run_each(case.ranks, work.train_sliced, (case, []), (case, moves))
    assert moved[0]["moved"] > 0
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert [r["norm"] for r in moved] == [r["norm"] for r in still]
    assert whole(moved) == whole(still)


@pytest.mark.parametrize(
    ("settings", "module_options", "lengths"),
    [
        pytest.param({}, {"dynamic_shape": True}, True, id="dynamic_shape"),
        pytest.param({"pipeline": {"activation_checkpoint_interval": 2}}, {}, False, id="checkpoint, reentrant"),
        pytest.param(
            {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}, {}, False, id="checkpoint"
        ),
        pytest.param({"wall_clock_breakdown": True, "steps_per_print": 1}, {}, False, id="wall_clock_breakdown"),
        pytest.param({"prescale_gradients": True}, {}, False, id="prescale_gradients"),
        pytest.param({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}, False, id="torch_autocast"),
        pytest.param(
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 1}},
            {},
            False,
            id="torch_autocast, zero1",
        ),
        pytest.param({"data_types": {"grad_accum_dtype": "fp32"}}, {}, False, id="data_types"),
    ],
)
def test_features(settings: dict[str, Any], module_options: dict[str, Any], lengths: bool) -> None:
    calls = [(settings, module_options, moves, lengths) for moves in ([], MOVES)]
    still, moved = run_each(2, work.train_feature, *calls)
    assert moved[0]["partition"] == MOVES[-1] and still[0]["partition"] == [0, 4, 8]
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert whole(moved) == whole(still)


PROFILED = {"interval": 0, "profile": {"batches": 1, "warmup_batches": 0}}


def test_sparse_gradients() -> None:
    """nn.Embedding(sparse=True) in layers that move, with momentum that is sparse too, clipped."""
    case = Case(stages=2, replicas=2, optimizer="SGD", clip=0.05, dynmo=PROFILED)
    check_both(run(4, work.train_both, case, work.sparse_layers, False, MOVES), sparse=2)


def test_masks_between_stages() -> None:
    """engine.has_bool_tensors: the last tensor of what stages send is a mask."""
    check_both(run(2, work.train_both, Case(dynmo=PROFILED), work.mask_layers, True, MOVES), sparse=0)


def check_both(results: list[list[dict[str, Any]]], sparse: int) -> None:
    still, moved = ([rank[number] for rank in results] for number in range(2))
    assert moved[0]["moved"] > 0 and still[0]["moved"] == 0
    for run_ in (still, moved):
        assert sum(r["sparse"] for r in run_ if r["replica"] == 0) == sparse
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert [r["norm"] for r in moved] == [r["norm"] for r in still]
    assert whole(moved) == whole(still)


def test_layers_that_are_refused() -> None:
    """On every rank, also where no such layer is, and before DeepSpeed makes groups for experts."""
    found = run(2, work.refused_layers)
    assert found[0] == found[1]
    (moe, bf16, zero1, tied), groups, _ = found[0]
    assert "deepspeed.moe" in moe and groups == []
    assert "sparse=True" in bf16 and bf16 == zero1
    assert "'places' whose forward_fn differ" in tied


def test_csv_monitor(tmp_path: Path) -> None:
    settings = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    run(2, work.train_feature, settings, {}, MOVES)
    assert {"Train_Samples_train_loss.csv", "Train_Samples_lr.csv"} <= set(os.listdir(tmp_path / "job"))


def test_set_train_batch_size() -> None:
    still, moved = (run(2, work.train_other_sizes, moves) for moves in ([], MOVES))
    assert [losses for losses, _ in still] == [losses for losses, _ in moved]
    assert still[0][1] == [0, 4, 8] and moved[0][1] == MOVES[-1]


def test_logits() -> None:
    for rank, found in enumerate(run(2, work.evaluate_logits, MOVES)):
        assert len(found) == 4 and all(each == found[0] for each in found)
        _, logits, shapes = found[0]
        assert (logits is None) == (shapes is None) == (rank == 0)


def test_data_given_to_initialize() -> None:
    still, moved = run_each(2, work.given_data, ([],), (MOVES,))
    assert [result[:2] for result in still] == [result[:2] for result in moved]
    assert still[0][2] == [0, 4, 8] and moved[0][2] == MOVES[-1]


def test_one_stage() -> None:
    assert run(1, work.one_stage) == [([0, 8], 2)]


def test_no_optimizer() -> None:
    for before, after, partition in run(2, work.no_optimizer):
        assert before == after and partition == [0, 2, 8]


def test_compile_is_refused() -> None:
    with pytest.raises(RankError, match=r"engine\.compile"):
        run(2, work.compile_stage)
