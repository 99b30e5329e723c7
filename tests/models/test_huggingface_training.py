"""Hugging Face models in a pipeline: moves change nothing, and training equals that of transformers' model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.models import huggingface
from tests.support import case_runs
from tests.support.case_runs import (
    EGERIA,
    CaseRun,
    check_moves_change_nothing,
    check_two_chunks_change_nothing,
    moved,
)
from tests.support.harness import run, run_each
from tests.support.huggingface_runs import GPT2, LENGTH, MICRO_BATCHES, MODELS, case, engine_of, train_at
from tests.support.training import whole
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_moves_change_nothing(name: str) -> None:
    check_moves_change_nothing(case(name))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {"precision": "bf16"}),
        ("mixtral", {"precision": "bf16 zero1"}),
        ("mixtral", {"interval": 1}),
        ("qwen3", {}),
    ],
)
def test_they_train_under_our_schedules(name: str, settings: dict[str, Any]) -> None:
    check_as_under_1f1b(2, case_runs.train_moved, case(name, **settings))


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("mixtral tied", "v", {}),
        *(pytest.param(name, "v", {}, marks=pytest.mark.nightly) for name in MODELS if name != "mixtral tied"),
        *(pytest.param(name, "loop", {"interval": 1}, marks=pytest.mark.nightly) for name in MODELS),
        pytest.param("mixtral", "v", {"precision": "bf16 zero1", "replicas": 2}, marks=pytest.mark.nightly),
    ],
)
def test_two_chunks_per_stage_change_nothing(name: str, kind: str, settings: dict[str, Any]) -> None:
    check_two_chunks_change_nothing(case(name, **settings), kind)


TIED_QWEN3 = {**MODELS["qwen3"], "tie_word_embeddings": True}
FREEZING: dict[str, dict[str, Any]] = {  # all tied but for untie
    "gpt2": {
        "huggingface": GPT2,
        "untie": True,
        "verified": False,
        "case": {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]},
    },
    "mixtral automatic, slices": {
        **{"huggingface": MODELS["mixtral tied"], "untie": True, "verified": False, "vocabulary_slices": 3},
        "case": {"kind": "freezing", "automatic": {"interval": 0.2, "start": 0.2}},
    },
    "qwen3 egeria, slices": {
        **{"huggingface": TIED_QWEN3, "untie": True, "verified": False, "vocabulary_slices": 2},
        "case": {"kind": "freezing", "egeria": EGERIA},
    },
}


@pytest.mark.parametrize("name", FREEZING)
def test_moves_change_nothing_while_layers_freeze(name: str) -> None:
    frozen = CaseRun({**FREEZING[name], "sequence_length": LENGTH})
    still = run(2, case_runs.train, frozen)
    check_moves_change_nothing(frozen, still)
    state = whole(still).items()
    steps = {int(key.split(".")[0]): np.frombuffer(raw, "f4").item() for key, raw in state if key.endswith("/step")}
    slices = FREEZING[name].get("vocabulary_slices", 1)
    front = {steps[layer] for layer in range(slices + 1)}  # gpt2: embedding and positions; else embedding and a block
    assert len(front) == 1 and 0 < front.pop() < 6
    assert {steps[layer] for layer in sorted(steps)[-slices - 1 :]} == {6}  # norm and head


@pytest.mark.nightly
@pytest.mark.parametrize("name", FREEZING)
def test_two_chunks_per_stage_change_nothing_while_layers_freeze(name: str) -> None:
    check_two_chunks_change_nothing(CaseRun({**FREEZING[name], "sequence_length": LENGTH}), "v")


def test_random_moves_change_nothing() -> None:
    still = case("mixtral", stages=3)
    rng = np.random.default_rng(7)
    moves = {step: [0, *sorted(rng.choice(range(1, 7), 2, replace=False).tolist()), 7] for step in range(1, 6)}
    a, b = run_each(3, case_runs.train, (still,), (replace(still, moves=moves),))
    assert a[0]["losses"] == b[0]["losses"] and whole(a) == whole(b)
    assert b[0]["partition"] == moves[5] != a[0]["partition"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    plain, recomputed = (run(2, case_runs.train, moved(case(name, interval=n))) for n in (0, 1))
    assert plain[0]["losses"] == recomputed[0]["losses"] and whole(plain) == whole(recomputed)


def fine_tune(folder: str, checkpoint: str, partitions: list[list[int]]) -> list[float]:
    """Train the model in ``folder``, one step at each partition, save a checkpoint, and return the losses."""
    specs = huggingface.layers(folder, verified=False)
    engine = engine_of(specs)
    losses = train_at(engine, case_runs.micro_batches(LENGTH), partitions)
    engine.save_checkpoint(checkpoint)
    return losses


@pytest.mark.parametrize("name", ["mixtral", "mixtral tied"])
def test_training_equals_that_of_the_librarys_model(name: str, tmp_path: Path) -> None:
    """It is read from a folder, trained on two stages with moves, saved, and exported to a folder."""
    torch.manual_seed(3)
    settings = {**MODELS[name]}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model.save_pretrained(folder, max_shard_size="20KB")
    losses = run(2, fine_tune, str(folder), str(checkpoint), [[0, 4, 7], [0, 2, 7], [0, 6, 7]])[0]

    micro_batches = case_runs.micro_batches(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for expected in losses:
        total = 0.0
        for _ in range(MICRO_BATCHES):
            tokens, labels = next(micro_batches)
            outputs = model(tokens)
            loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
            loss = (loss + config.router_aux_loss_coef * outputs.aux_loss) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert total == pytest.approx(expected, rel=1e-5)

    huggingface.export(folder, checkpoint, out)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(exported.get_parameter(parameter_name), parameter, rtol=1e-3, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("checkpoint_interval", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_moves_change_nothing_under_any_setting(
    name: str, precision: str, stages: int, replicas: int, checkpoint_interval: int
) -> None:
    check_moves_change_nothing(
        case(name, stages=stages, replicas=replicas, precision=precision, interval=checkpoint_interval)
    )
