"""A pruned model gives ranks back because its bytes have fallen, and for no other reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import repack
from benchmarks.packing import prepare_without_limit, train_within_limit
from ds_dynmo import DynMoPipelineEngine
from ds_dynmo.config import load_settings
from ds_dynmo.errors import ConfigError
from tests.distributed.harness import run

RANKS, STEPS = 2, 10
PRUNED = {"case": {"kind": "pruning", "final_sparsity": 0.9}}
REPACK = {"enabled": True, "planner": "first_fit"}


def flags(folder: Path, model: dict[str, Any], **block: Any) -> list[str]:
    """Write a configuration, and return the flags of scripts/train.py for it."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynmo": {
            "interval": 0,
            "balance_by": "parameters",
            "initial_partition": "parameters",
            "memory_limit": "1B",
            "repack": REPACK,
            **block,
        },
        "model": {"layers": 4, "hidden_size": 64, "heads": 2, "sequence_length": 8, "tied_embedding": False, **model},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return ["--deepspeed_config", str(path), "--data", __file__, "--steps", str(STEPS)]


def within_limit(given: list[str], stay_dense: bool) -> dict[str, Any] | None:
    """Train under the limit that the model meets as it is built; pruned weights may stay dense, with zeros."""
    settings = load_settings(given[1])
    unlimited = prepare_without_limit(given, settings)
    if not stay_dense:
        return train_within_limit(given, unlimited, settings)
    with patch.object(DynMoPipelineEngine, "keep_elements_refusal", lambda engine: "asked for"):
        return train_within_limit(given, unlimited, settings)


def test_ranks_are_given_back_where_bytes_have_fallen(tmp_path: Path) -> None:
    given = flags(tmp_path, PRUNED)
    pruned, *_ = run(RANKS, within_limit, given, False)
    zeros, *_ = run(RANKS, within_limit, given, True)
    assert pruned is not None and zeros is not None
    first, *_, last = pruned["rows"]
    assert first["ranks"] == first["fewest_ranks"] == RANKS and last["ranks"] < RANKS
    assert max(first["bytes_per_rank"]) == pruned["memory_limit"] == zeros["memory_limit"]
    assert last["bytes"] < 0.3 * first["bytes"]
    for row in pruned["rows"]:
        assert len(row["bytes_per_rank"]) == row["ranks"] >= row["fewest_ranks"]
        assert max(row["bytes_per_rank"]) <= pruned["memory_limit"]
    assert sum(row["steps"] for row in pruned["rows"]) == STEPS and pruned["average_ranks"] < RANKS
    assert {row["ranks"] for row in zeros["rows"]} == {RANKS} and zeros["average_ranks"] == RANKS
    assert zeros["losses"] == pruned["losses"]


def test_a_dense_run_gives_none_back(tmp_path: Path) -> None:
    """Though it decides after every batch."""
    found, *_ = run(RANKS, within_limit, flags(tmp_path, {}, interval=1), False)
    assert found is not None
    assert [(row["ranks"], row["fewest_ranks"], row["steps"]) for row in found["rows"]] == [(RANKS, RANKS, STEPS)]


def test_the_scripts_own_configuration_is_pruned_to_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.chdir(Path(__file__).parents[2])
    given, settings = repack.prepared(repack.parse(["memory", "--set", "model.seed=3", "--data", __file__]))
    run = prepare_without_limit(given, settings)
    assert (run.model.layers, run.model.seed, run.settings["dynmo"]["memory_limit"]) == (24, 3, None)
    assert [getattr(case, "final_sparsity", None) for case in run.model.case] == [0.9]


def test_a_configuration_that_never_re_packs_is_refused(tmp_path: Path) -> None:
    given = flags(tmp_path, PRUNED, repack={**REPACK, "enabled": False})
    with pytest.raises(ConfigError, match=r"dynmo\.repack\.enabled = false: should be true"):
        prepare_without_limit(given, load_settings(given[1]))
