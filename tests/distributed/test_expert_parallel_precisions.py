"""Experts that are split over replicas, in bf16 and with ZeRO-1: each replica holds all state of its own experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ds_dynmo
from tests.distributed.harness import run, run_each
from tests.distributed.support import case_runs
from tests.distributed.support.case_runs import CaseRun, check_moves_change_nothing, experts, moved
from tests.distributed.support.elastic import PARK
from tests.distributed.support.training import state, whole
from tests.distributed.test_expert_parallel import MODELS, load, save, unsharded

ZERO_BUBBLE = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
CASES = {
    "bf16": "bias and freezing",
    "bf16 zero1": "sbase with capacity",
    "fp32 zero1": "auxiliary loss",
    "bf16 zero1 fp32sums": "bias and freezing",
    "bf16 immediate": "mod",
}
precisions = pytest.mark.parametrize(
    "precision", [*list(CASES)[:3], *(pytest.param(name, marks=pytest.mark.fuzz) for name in list(CASES)[3:])]
)


def case_in(precision: str, **changes: Any) -> CaseRun:
    return replace(CaseRun(MODELS[CASES[precision]], replicas=2, precision=precision, clip=0.05), **changes)


@precisions
def test_moves_and_a_restart_under_zero_bubble_change_nothing(precision: str, tmp_path: Path) -> None:
    case = case_in(precision)
    elsewhere = moved(replace(case, dynmo=ZERO_BUBBLE))
    check_moves_change_nothing(case, *run_each(4, case_runs.train, (case,), (elsewhere, str(tmp_path), 4)))


def gradients(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the optimizer's mean gradients by parameter; of experts those of all replicas, in order."""
    found: dict[str, list[np.ndarray]] = {}
    for key, value in sorted(whole(results).items()):
        if key.endswith("/momentum_buffer"):
            found.setdefault(key.rpartition(": ")[2], []).append(np.frombuffer(value, dtype=np.float32))
    return {key: np.concatenate(parts) for key, parts in found.items()}


@precisions
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
