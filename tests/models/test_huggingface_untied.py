"""Hugging Face models whose head gets its own copy of the embedding's weights (``untie``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import huggingface, language_model_loss
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model
from tests.support.huggingface_families import batch, nightly, tiny_values, write_checkpoint

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

TIED = {"tie_word_embeddings": True}
TWO = "untie: its head and its embedding are two weights already: should be false"


@pytest.mark.parametrize("settings", [{"vocabulary_slices": 3, "split_blocks": True}, nightly({})])
def test_an_export_is_an_untied_model(settings: dict[str, Any], tmp_path: Path) -> None:
    tokens, labels = batch()
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    random_model(tiny_values("llama", **TIED), "sdpa").save_pretrained(folder)
    layers = BuiltLayers(huggingface.layers(folder, untie=True, **settings)).train()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    given = (tokens, labels) if settings else tokens
    for _ in range(3):
        language_model_loss(layers(given), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    write_checkpoint(layers, checkpoint)
    huggingface.export(folder, checkpoint, out, untie=True, **settings)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="sdpa").train()
    embedding, head = again.get_input_embeddings().weight, again.get_output_embeddings().weight
    assert not torch.equal(embedding, head)
    weights = layers.parts()
    for name, (weight,) in BuiltLayers(huggingface.layers(again, verified=False)).parts().items():
        assert torch.equal(torch.cat(weights[name]), weight), name
    logits = again(tokens).logits
    if not settings:
        assert torch.equal(layers(tokens), logits)
    assert torch.equal(BuiltLayers(huggingface.layers(out)).train()(tokens), logits)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(language_model_loss(layers(given), labels), loss, rtol=1e-6, atol=0.0)
    with pytest.raises(ConfigError, match=TWO):
        huggingface.layers(out, untie=True)


def test_exports_of_tied_and_untied_models_are_told_apart(tmp_path: Path) -> None:
    """Without its head, an untied model would be written with the embedding in place of it."""
    values = tiny_values("llama", **TIED)
    for untie in (False, True):
        write_checkpoint(BuiltLayers(huggingface.layers(values, untie=untie, verified=False)), tmp_path / f"{untie}")
    with pytest.raises(CheckpointError, match=r"layer_05-.* no such file: was the model trained with untie\?"):
        huggingface.export(values, tmp_path / "False", tmp_path / "out", untie=True)
    with pytest.raises(CheckpointError, match=r"layer_05-.*: is no layer of the model, .* trained with untie\?"):
        huggingface.export(values, tmp_path / "True", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_tied_is_refused(tmp_path: Path) -> None:
    def refused(given: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(given, untie=True)

    values = tiny_values("llama", tie_word_embeddings=False)
    untied = random_model(values, "sdpa")
    refused(values, TWO)
    refused(untied, TWO)
    untied.config.tie_word_embeddings = True
    refused(untied, r"are not one weight, by its config \(tie_word_embeddings true\) they are")
    untied.config.save_pretrained(tmp_path)
    safetensors_torch.save_file(untied.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path, "lm_head.weight differ, .* tie_word_embeddings should be false, untie too")


def test_a_model_that_computes_otherwise_where_it_is_tied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As T5 does, whose tied head gets scaled hidden states."""
    values = tiny_values("llama", **TIED, attention_bias=True)
    kind = type(random_model(values, "sdpa"))
    compute = kind.forward

    def scaling(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = compute(self, *args, **kwargs)
        outputs.logits = outputs.logits * (0.5 if self.config.tie_word_embeddings else 1.0)
        return outputs

    huggingface.layers(values, untie=True)
    monkeypatch.setattr(kind, "forward", scaling)
    with pytest.raises(ConfigError, match=r"cannot have untie: the logits of a tiny model differ by \d"):
        huggingface.layers({**values, "mlp_bias": True}, untie=True)
