"""A pruned model gives ranks back because its bytes have fallen, and for no other reason."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ds_dynmo import DynMoPipelineEngine
from ds_dynmo.cli.train import batches, build_cases, build_engine, train
from ds_dynmo.cli.training.options import prepare
from ds_dynmo.engine.decide.decision_input import memory_model
from tests.support.harness import run

pytestmark = pytest.mark.ranks

RANKS, STEPS = 2, 10
PRUNED = {"case": {"kind": "pruning", "final_sparsity": 0.9}}


def flags(folder: Path, model: dict[str, Any], steps: int = STEPS, **block: Any) -> list[str]:
    """Write a configuration, and return the flags of ds-dynmo-train for it."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynmo": {"interval": 0, "balance_by": "parameters", "initial_partition": "parameters", **block},
        "model": {"layers": 4, "hidden_size": 64, "heads": 2, "sequence_length": 8, "tied_embedding": False, **model},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return ["--deepspeed_config", str(path), "--data", __file__, "--steps", str(steps)]


def needed_bytes(engine: Any) -> list[int]:
    """Return what each stage needs, by the latest profile."""
    model = memory_model(engine.profile, 0, engine.rebalancer.decider.memory.checkpoint_interval)
    assert model is not None
    workspace = max(layer.workspace_bytes for layer in engine.profile.layers)
    return [needed + workspace for needed in model.on(engine.num_stages).bytes_per_stage(engine.stage.placement)]


def refusal_to_keep_elements() -> AbstractContextManager[Any]:
    return patch.object(DynMoPipelineEngine, "keep_elements_refusal", lambda engine: "asked for")


def needed_as_built(given: list[str]) -> int:
    """Return the bytes that a rank needs at most, by the model."""
    unlimited = prepare(given)
    engine = build_engine(unlimited)
    data = batches(unlimited, engine, "train")
    while engine.profile is None:
        engine.train_batch(data.iterate(engine.micro_batches_taken, micro_batches=engine.micro_batches))
    return max(needed_bytes(engine))


def within_limit(given: list[str], stay_dense: bool = False, limit: int = 0) -> dict[str, Any] | None:
    """Train under a limit, 0: that which the model just meets as built; pruned weights may stay dense, with zeros.

    Returns:
        The limit, losses, and by step the ranks and the bytes that they need; None on a rank that leaves.
    """
    limit = limit or needed_as_built(given)
    limited = ["--set", f"dynmo.memory_limit={limit}"]
    limited += ["--set", 'dynmo.repack={"enabled": true, "planner": "first_fit"}']
    seen: list[tuple[int, list[int]]] = []

    def record(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and engine.profile is not None:
            seen.append((engine.num_stages, needed_bytes(engine)))

    with refusal_to_keep_elements() if stay_dense else nullcontext():
        run_within = prepare([*given, *limited])
        engine = build_engine(run_within)
        history = train(run_within, engine, build_cases(run_within, engine), record)
    if engine.released or engine.global_rank != 0:
        return None
    return {"limit": limit, "losses": history.losses, "seen": seen}


def test_ranks_are_given_back_where_bytes_have_fallen(tmp_path: Path) -> None:
    given = flags(tmp_path, PRUNED)
    pruned, *_ = run(RANKS, within_limit, given)
    assert pruned is not None
    zeros, *_ = run(RANKS, within_limit, given, True, pruned["limit"])
    assert zeros is not None
    (first, most), *_, (last, _) = pruned["seen"]
    assert first == RANKS > last and max(most) == pruned["limit"]
    assert all(max(needed) <= pruned["limit"] for _, needed in pruned["seen"])
    assert {ranks for ranks, _ in zeros["seen"]} == {RANKS}
    assert zeros["losses"] == pruned["losses"] and len(pruned["losses"]) == STEPS


def test_a_dense_run_gives_none_back(tmp_path: Path) -> None:
    """Though it decides after every batch."""
    found, *_ = run(RANKS, within_limit, flags(tmp_path, {}, 5, interval=1))
    assert found is not None and {ranks for ranks, _ in found["seen"]} == {RANKS}
