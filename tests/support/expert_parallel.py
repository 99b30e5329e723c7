"""Models whose experts are split over replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import ds_dynmo
from tests.support import case_runs
from tests.support.case_runs import CaseRun, cases_of

MODELS: dict[str, dict[str, Any]] = {
    "auxiliary loss": {"case": {"kind": "moe", "experts": 4, "expert_parallel": True}},
    "sbase with capacity": {
        "case": {
            "kind": "moe",
            "experts": 4,
            "expert_parallel": True,
            "routing": "sbase",
            "capacity_factor": 0.8,
            "every": 2,
        }
    },
    "bias and freezing": {
        "case": [
            {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 3]]},
            {
                "kind": "moe",
                "experts": 6,
                "expert_parallel": True,
                "routing": "bias",
                "bias_rate": 0.02,
                "dense_blocks": 1,
            },
        ]
    },
    "mod": {
        "case": [
            {"kind": "mod", "capacity": 0.4, "sampling": "topk"},
            {"kind": "moe", "experts": 2, "expert_parallel": True, "top_k": 1},
        ]
    },
}


def unsharded(run: CaseRun) -> CaseRun:
    """Return the same model with all experts on every replica."""
    cases = [{**case, "expert_parallel": False} if case["kind"] == "moe" else case for case in cases_of(run)]
    return replace(run, model={**run.model, "case": cases})


def save(run: CaseRun, folder: str) -> None:
    engine, model = case_runs.build(run)
    engine.train_batch(case_runs.batches(engine, model))
    engine.save_checkpoint(folder)


def load(run: CaseRun, folder: str) -> tuple[str, bool]:
    """Return the error that loading raises, and whether the engine is unchanged."""
    engine, model = case_runs.build(run)
    before = [parameter.clone() for parameter in engine.module.parameters()]
    try:
        engine.load_checkpoint(folder)
        said = ""
    except ds_dynmo.CheckpointError as error:
        said = str(error)
    same = all(torch.equal(*pair) for pair in zip(before, engine.module.parameters()))
    engine.train_batch(case_runs.batches(engine, model))
    return said, same
