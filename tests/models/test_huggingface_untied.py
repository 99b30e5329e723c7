"""Hugging Face models whose head gets its own copy of the embedding's weights (``untie``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import TiedLayerSpec

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import huggingface, language_model_loss
from ds_dynmo.models.exporting import weights_file
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model, trial_batches
from tests.support.huggingface_families import tiny_values, write_checkpoint

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

TIED = {"tie_word_embeddings": True}
NO_DROPOUT = {f"{name}_pdrop": 0.0 for name in ("embd", "resid", "attn")}
# By why they are here; nightly but for the first ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "padding among the words": ("llama", {**TIED, "pad_token_id": 2}),
    "learned positions": ("gpt2", NO_DROPOUT),
    "scaled embedding, soft caps": ("gemma2", {}),
    "bias of the head, which refuses a tie": ("phi", TIED),
    "biases": ("qwen2", TIED),
    "scaled embedding that is a module": ("gemma", {}),
    "scaled logits": ("granite", {**TIED, "embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "layers without positions, as of SmolLM": ("smollm3", TIED),
    "norms of other names": ("starcoder2", TIED),
    "router loss": ("mixtral", TIED),
}
OFTEN = 4
ENDS = {"vocabulary_slices": 3, "split_blocks": True}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, _ = next(trial_batches(32, ()))
    return tokens, F.pad(tokens[:, 1:], (0, 1), value=-100)


def logits_of(outputs: Any) -> torch.Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def ends_of(layers: BuiltLayers) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Return the weights of embedding and head."""
    return layers.layers[0].get_parameter("part.weight"), layers.layers[-1].get_parameter("part.weight")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if at < OFTEN else pytest.mark.nightly) for at, name in enumerate(FAMILIES)],
)
def test_an_untied_model_begins_as_the_tied_one(name: str, tmp_path: Path) -> None:
    """From memory, from a folder, and fresh. Its two gradients add up to the one."""
    kind, changes = FAMILIES[name]
    values = tiny_values(kind, **changes)
    model, (tokens, labels) = random_model(values, "eager"), batch()
    model.save_pretrained(tmp_path)
    expected = model(tokens, use_cache=False).logits
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    for given in (model, tmp_path):
        specs = huggingface.layers(given, untie=True, attn_implementation="eager")
        assert not any(isinstance(spec, TiedLayerSpec) for spec in specs)
        layers = BuiltLayers(specs).train()
        logits, (embedding, head) = logits_of(layers(tokens)), ends_of(layers)
        assert torch.equal(logits, expected) and torch.equal(embedding, head)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        whole = model.get_input_embeddings().weight.grad
        assert embedding.grad is not None and head.grad is not None and embedding.data_ptr() != head.data_ptr()
        assert (embedding.grad + head.grad - whole).abs().max() <= 1e-6 * whole.abs().max()
    assert model.config.tie_word_embeddings and model.get_output_embeddings().weight.grad is whole
    if kind != "phi":  # whose head cannot be a tied layer
        fresh = [huggingface.layers(values, seed=3, untie=untie, verified=False) for untie in (False, True)]
        assert torch.equal(*(logits_of(BuiltLayers(specs).eval()(tokens)) for specs in fresh))
    embedding, head = ends_of(BuiltLayers(huggingface.layers(values, seed=3, untie=True, verified=False)))
    assert torch.equal(embedding, head) and embedding.std() > 0


@pytest.mark.parametrize("settings", [{}, ENDS])
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
    with pytest.raises(ConfigError, match="untie: its head and its embedding are two weights already: should be false"):
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


def test_a_frozen_weight_is_frozen_at_both_ends() -> None:
    model = random_model(tiny_values("llama", **TIED), "sdpa")
    model.get_input_embeddings().requires_grad_(False)
    layers = BuiltLayers(huggingface.layers(model, untie=True, verified=False))
    frozen = [name for name, parameter in layers.named_parameters() if not parameter.requires_grad]
    assert frozen == ["layers.0.part.weight", f"layers.{len(layers.layers) - 1}.part.weight"]


def test_what_is_not_tied_is_refused(tmp_path: Path) -> None:
    def refused(given: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(given, untie=True)

    two = "untie: its head and its embedding are two weights already: should be false"
    values = tiny_values("llama", tie_word_embeddings=False)
    untied = random_model(values, "sdpa")
    refused(values, two)
    refused(untied, two)
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


@pytest.mark.parametrize(
    "lora",
    [{"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, {"modules_to_save": ["embed_tokens", "lm_head"]}],
)
def test_adapters_are_at_the_ends_of_a_tied_model(lora: dict[str, Any], tmp_path: Path) -> None:
    """Alone they fit the tied base in peft; merged with it they are an untied model."""
    peft = pytest.importorskip("peft")
    tokens, _ = batch()
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    random_model(tiny_values("llama", **TIED), "sdpa").save_pretrained(base)
    settings = {"target_modules": ["q_proj"], "r": 2, "task_type": "CAUSAL_LM", **lora}
    layers = BuiltLayers(huggingface.layers(base, untie=True, peft=settings)).train()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0.0)
    assert any(parameter.requires_grad for parameter in layers.layers[-1].parameters())
    checkpoint.mkdir()
    for number, layer in enumerate(layers.layers):  # as "save_base": false
        trains = {name: value for name, value in layer.named_parameters() if value.requires_grad}
        torch.save(trains, checkpoint / weights_file(number))
    huggingface.export(base, checkpoint, tmp_path / "adapter", peft=settings, untie=True)
    huggingface.export(base, checkpoint, tmp_path / "merged", peft=settings, untie=True, merge=True)
    tied = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
    adapted = peft.PeftModel.from_pretrained(tied, tmp_path / "adapter", is_trainable=True).train()
    assert torch.equal(adapted(input_ids=tokens).logits, layers(tokens))
    in_memory = BuiltLayers(huggingface.layers(adapted, untie=True)).train()
    assert torch.equal(in_memory(tokens), layers(tokens))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").train()
    assert not merged.config.tie_word_embeddings
    torch.testing.assert_close(merged(tokens).logits, layers(tokens), rtol=1e-4, atol=1e-5)
