"""Checkpoints that are written while training goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynmo.engine.save.safe_load import safe_load
from tests.distributed.harness import run
from tests.distributed.support.checkpoints import STEPS, check_same, load_and_continue, train_on
from tests.distributed.support.configs import Case
from tests.distributed.support.training import build, gather

BACKGROUND = {"interval": 0, "checkpoint": "background", "timeout_seconds": 20}


def save_both_ways(case: Case, folder: str) -> None:
    """Save the same state in the background and by stopping training."""
    engine = build(case)
    train_on(engine, 0)
    for kind in ("background", "blocking"):
        torch.manual_seed(engine.global_rank)
        engine.checkpointer._saves_in_background = lambda kind=kind: kind == "background"
        engine.save_checkpoint(f"{folder}/{kind}", client_state={"epoch": 4})
        engine.wait_for_save()
        gather(None)


def same(one: Any, other: Any) -> bool:
    """Compare two contents of files, tensor by tensor."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or vars(one) == vars(other))


@pytest.mark.parametrize(
    "case",
    [
        Case(stages=2),
        Case(stages=2, precision="bf16"),
        Case(stages=2, precision="bf16 zero1", replicas=2, groups="two"),
        Case(stages=2, tied=True, scheduler=True),
    ],
    ids=["fp32", "bf16", "bf16-zero1-replicas", "tied"],
)
def test_a_save_in_the_background_writes_the_same_files(tmp_path: Path, case: Case) -> None:
    case = replace(case, dynmo=BACKGROUND)
    run(case.ranks, save_both_ways, case, str(tmp_path))
    background, blocking = (
        {path.relative_to(tmp_path / kind): path for path in (tmp_path / kind).rglob("*") if path.is_file()}
        for kind in ("background", "blocking")
    )
    assert background.keys() == blocking.keys() and len(background) > 10
    for name, path in background.items():
        if name.suffix == ".pt":
            assert same(safe_load(str(path)), safe_load(str(blocking[name]))), name
        else:
            assert path.read_bytes() == blocking[name].read_bytes(), name
