"""examples/: both run as they are, only shorter; what they promise holds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
import own_model
import tiny_model
from tests.support.harness import run

pytestmark = pytest.mark.ranks

STEPS = ["--freeze-at", "1", "--steps"]


def trained(*calls: list[str]) -> list[list[float]]:
    """Run own_model.py several times in one world, with batches of two micro-batches."""
    warnings.filterwarnings("error", message="c10d::broadcast_")
    own_model.CONFIG["gradient_accumulation_steps"] = 2
    return [own_model.train(own_model.parse(call)) for call in calls]


def resumed_on_one(folder: str, nowhere: str) -> list[list[float]]:
    with pytest.raises(SystemExit, match=r"nowhere: no checkpoint there"):
        trained([*STEPS, "4", "--resume", nowhere])
    return trained([*STEPS, "4", "--resume", folder])


def test_a_model_of_ones_own_resumes_on_fewer_stages_as_if_it_had_been_repacked(tmp_path: Path) -> None:
    saves = [*STEPS, "2", "--save", str(tmp_path)]
    repacks = [*STEPS, "4", "--repack-at", "2"]
    (saved, repacked), (_, left) = run(2, trained, saves, repacks)
    ((resumed,),) = run(1, resumed_on_one, str(tmp_path), str(tmp_path / "nowhere"))
    assert len(saved) == len(resumed) == 2
    assert repacked == saved + resumed and left == saved  # one rank left after two steps
    assert repacked[-1] < repacked[0]


@torch.no_grad()
@pytest.mark.parametrize("lora", [[], pytest.param(["--lora", "2"], marks=pytest.mark.nightly)])
def test_a_folder_is_finetuned_and_transformers_reads_it(lora: list[str], tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "text.jsonl", tmp_path / "out"
    sizes = ["--documents", "40", "--vocab-size", "400", "--layers", "3", "--hidden-size", "16", "--positions", "64"]
    assert tiny_model.main([str(model), str(text), *sizes]) == 0
    losses, others = run(2, finetuned, [str(model), str(text), str(out), "--steps", "10", "--lr", "0.02", *lora])
    assert losses == others and losses[-1] < losses[0]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("def main(").input_ids == AutoTokenizer.from_pretrained(model)("def main(").input_ids
    if lora:
        assert json.loads((out / "adapter_config.json").read_text())["r"] == 2
        return
    batches = finetune.micro_batches_of(text, tokenizer)
    before, after = (mean_loss(AutoModelForCausalLM.from_pretrained(folder), batches) for folder in (model, out))
    assert before == pytest.approx(losses[0], abs=0.1) and after < before - 0.05


def finetuned(given: list[str]) -> list[float]:
    return finetune.finetune(finetune.parse(given))


def mean_loss(model: Any, batches: list[finetune.Batch]) -> float:
    cross_entropy = torch.nn.functional.cross_entropy
    losses = [cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten()) for ids, labels in batches[:20]]
    return float(torch.stack(losses).mean())
