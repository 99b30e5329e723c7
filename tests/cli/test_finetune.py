"""Finetuning in one command: a Hugging Face folder, text that its tokenizer reads, weights that transformers reads."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import tiny_model
from ds_dynmo.cli import export
from ds_dynmo.cli.train import main
from ds_dynmo.data import DataConfig, open_data
from tests.support.full_disk import files_of_at_most
from tests.support.harness import run

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--documents", "60", "--vocab-size", "400", "--layers", "3", "--hidden-size", "16", "--positions", "64"]
LENGTH, SEQUENCES, MICRO_BATCHES = 32, 4, 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model whose head is its embedding, its tokenizer and a text."""
    folder = tmp_path_factory.mktemp("made")
    assert tiny_model.main([str(folder / "model"), str(folder / "text.jsonl"), *SIZES]) == 0
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model", tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder


def finetune(made: Path, out: Path, documents: str = "") -> list[str]:
    """Write ds_configs/finetune.json, smaller, and return the flags of a run that exports.

    Args:
        documents: "": as shipped, so packed.
    """
    settings = json.loads((ROOT / "ds_configs" / "finetune.json").read_text())
    settings["train_micro_batch_size_per_gpu"] = SEQUENCES
    settings["gradient_accumulation_steps"] = MICRO_BATCHES
    settings["optimizer"]["params"]["lr"] = settings["scheduler"]["params"]["warmup_max_lr"] = 0.02
    settings["model"]["sequence_length"] = LENGTH
    settings["data"] |= {**({"documents": documents} if documents else {}), "cache": str(out / "cache")}
    (out / "finetune.json").write_text(json.dumps(settings))
    given = ["--deepspeed_config", str(out / "finetune.json"), "--data", str(made / "text.jsonl")]
    given += ["--set", f"model.huggingface={made / 'model'}", "--steps", "10", "--report", str(out / "report.jsonl")]
    return [*given, "--save", str(out / "run"), "--export", str(out / "exported")]


def command(arguments: list[str]) -> int:
    """Run the command on a rank, which has met the others already."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # which nobody opens
    return main(arguments)


def validation_loss(model: Any, made: Path, out: Path, documents: Any) -> float:
    """Compute what the command reports last, in transformers, one document after the other."""
    config = DataConfig(documents=documents, cache=str(out / "cache"))
    data = open_data(made / "text.jsonl", config, vocabulary=400, tokenizer=made / "model")
    batches = data.batches("validation", micro_batch_size=SEQUENCES, sequence_length=LENGTH, seed=0)
    summed, counted = 0.0, 0
    for number in range(MICRO_BATCHES):
        inputs, labels = batches.micro_batch(number)
        ids, positions = inputs if isinstance(inputs, tuple) else (inputs, torch.arange(LENGTH).expand_as(inputs))
        for row in range(len(ids)):
            starts = [place for place in range(LENGTH) if positions[row, place] == 0]
            for start, stop in zip(starts, [*starts[1:], LENGTH]):
                logits = model(ids[row : row + 1, start:stop]).logits[0]
                loss = torch.nn.functional.cross_entropy(logits, labels[row, start:stop], reduction="sum")
                summed, counted = summed + loss.item(), counted + int((labels[row, start:stop] != -100).sum())
    return summed / counted


def reported_loss(out: Path) -> float:
    """Read the last validation loss of a run."""
    records = [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]
    return float([record["validation_loss"] for record in records if record["kind"] == "validation"][-1])


FREEZING = ["--set", "model.untie=true", "--set", 'model.case={"kind": "freezing", "schedule": [[0.5, 1]]}']


@torch.no_grad()
@pytest.mark.parametrize(
    ("documents", "flags"), [("packed", FREEZING), pytest.param("padded", [], marks=pytest.mark.nightly)]
)
def test_what_was_finetuned_is_exported_and_generates(
    documents: str, flags: list[str], made: Path, tmp_path: Path
) -> None:
    assert run(2, command, [*finetune(made, tmp_path, documents), *flags]) == [0, 0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (made / "model", tmp_path / "exported"))
    assert [one.config.tie_word_embeddings for one in (before, after)] == [True, not flags]
    assert torch.equal(after.get_input_embeddings().weight, after.get_output_embeddings().weight) == (not flags)
    loss = validation_loss(after, made, tmp_path, documents)
    assert loss == pytest.approx(reported_loss(tmp_path), rel=1e-5)
    assert loss < validation_loss(before, made, tmp_path, documents) - 0.05
    prompt = tokenizer("def main(", return_tensors="pt")
    generated = after.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert (
        tokenizer.decode(generated[0]).startswith("def main(") and generated.shape[1] == prompt.input_ids.shape[1] + 8
    )


@torch.no_grad()
@pytest.mark.nightly
def test_what_was_pruned_is_exported_with_zeros(made: Path, tmp_path: Path) -> None:
    case = {"kind": "pruning", "start": 0.2, "end": 0.5, "times": 2, "final_sparsity": 0.6}
    given = [*finetune(made, tmp_path), "--set", f"model.case={json.dumps(case)}"]
    assert run(2, command, given) == [0, 0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    linears = [weight for name, weight in model.named_parameters() if name.endswith("_proj.weight")]
    total = sum(weight.numel() for weight in linears)
    assert sum(int((weight == 0).sum()) for weight in linears) == round(total * 0.6)
    loss = validation_loss(model, made, tmp_path, "packed")
    assert loss == pytest.approx(reported_loss(tmp_path), rel=1e-5)


def check_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that an export is refused in one line, and leaves nothing."""
    out = Path(arguments[1]).parent
    before = sorted(out.iterdir())
    capsys.readouterr()
    assert export.main(arguments) == 2
    assert re.fullmatch(rf"ds-dynmo-export: error: .*{reason}.*\n", capsys.readouterr().err)
    assert sorted(out.iterdir()) == before


@torch.no_grad()
def test_adapters_are_exported_alone_or_merged(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(2, command, [*finetune(made, tmp_path), "--set", "model.peft={}"]) == [0, 0]
    base = AutoModelForCausalLM.from_pretrained(made / "model")
    untrained = validation_loss(base, made, tmp_path, "packed")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "exported")
    loss = validation_loss(adapted, made, tmp_path, "packed")
    assert loss == pytest.approx(reported_loss(tmp_path), rel=1e-5) and loss < untrained - 0.001
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    prompt = tokenizer("def main(", return_tensors="pt")
    generated = adapted.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    merging = [str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]
    with files_of_at_most(2000):  # it is the tokenizer that finds no room
        check_refused(merging, rf"{tmp_path}/merged: cannot be written: .*File too large: '{made}/model/tokeni", capsys)
    (made / "model").rename(made / "moved")
    check_refused(merging, rf'model.huggingface = "{made}/model", where nothing is: make a link there', capsys)
    (made / "model").symlink_to(made / "moved")
    assert export.main(merging) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False).equal(generated)
    assert validation_loss(merged, made, tmp_path, "packed") == pytest.approx(loss, rel=1e-5)
