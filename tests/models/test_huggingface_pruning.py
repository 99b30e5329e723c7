"""Gradual pruning of Hugging Face models: an export computes what they do, and what cannot be pruned is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.config import parse_section
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig, PruningConfig, huggingface, model_layers
from ds_dynmo.models.huggingface import pruning
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from tests.support.huggingface_families import batch, logits_of, nightly, prune, tiny_values, write_checkpoint

transformers = pytest.importorskip("transformers")

PRUNING = PruningConfig()


@torch.no_grad()
@pytest.mark.parametrize(("kind", "split_blocks"), [("mixtral", True), nightly("gpt2", False)])
def test_an_export_computes_what_the_pruned_layers_do(kind: str, split_blocks: bool, tmp_path: Path) -> None:
    model = random_model(tiny_values(kind), "sdpa")
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model.save_pretrained(folder)
    settings: Any = {"split_blocks": split_blocks}
    built = BuiltLayers(huggingface.layers(folder, verified=False, pruning=PRUNING, **settings)).eval()
    prune(built, every=2)
    write_checkpoint(built, checkpoint)
    huggingface.export(folder, checkpoint, out, **settings)
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    tokens, _ = batch()
    torch.testing.assert_close(exported.eval()(tokens).logits, logits_of(built(tokens)), rtol=0.0, atol=0.0)
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, out))
    assert before == after
    left = sum(linear.kept for linear in prunable_linears(built))
    total = sum(linear.size for linear in prunable_linears(built))
    zeros = sum(int((weight == 0).sum()) for weight in exported.parameters())
    assert zeros - sum(int((weight == 0).sum()) for weight in model.parameters()) == total - left


def test_a_model_in_memory_keeps_what_trains() -> None:
    model = random_model(tiny_values("llama"), "sdpa")
    model.model.layers[0].mlp.requires_grad_(False)
    plain, prunable = (huggingface.layers(model, verified=False, pruning=case)[1].build() for case in (None, PRUNING))
    found, expected = (
        {name: one.requires_grad for name, one in layer.named_parameters()} for layer in (prunable, plain)
    )
    assert found == expected and set(found.values()) == {True, False}
    assert [*found] == [*expected]
    assert prunable.load_signal() == 1.0 and not hasattr(plain, "load_signal")
    for linear in prunable_linears(prunable):
        linear.prune(torch.arange(linear.size).view(linear.shape) % 4 == 0)
    assert prunable.load_signal() == 0.25
    assert prunable.requires_grad_(False).load_signal() == 0.0


def test_refused_beside_pruning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"peft: cannot be combined with pruning: .*\(export with merge\)"):
        huggingface.layers(tiny_values("llama"), peft={"r": 2}, pruning=PRUNING)
    with pytest.raises(ConfigError, match="expert_parallel: cannot be combined with pruning"):
        huggingface.layers(tiny_values("mixtral"), expert_parallel=True, pruning=PRUNING)
    section = {"huggingface": tiny_values("llama", vocab_size=256), "sequence_length": 8, "peft": {"r": 2}}
    with pytest.raises(ConfigError, match=r"model\.huggingface: .*peft: cannot be combined with pruning"):
        model_layers(parse_section(ModelConfig, {**section, "case": {"kind": "pruning"}}, "model"))
    monkeypatch.setattr(pruning, "_kinds", dict)
    with pytest.raises(ConfigError, match=r"model_type llama: pruning: its decoder layers have no nn\.Linear"):
        huggingface.layers(tiny_values("llama"), pruning=PRUNING)


def test_a_layer_that_reads_weights_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would find a vector."""
    kind = type(random_model(tiny_values("llama"), "eager").model.layers[0].mlp)

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(F.linear(hidden, self.gate_proj.weight)) * self.up_proj(hidden))

    monkeypatch.setattr(kind, "forward", forward)
    values = tiny_values("llama", attention_dropout=0.1)
    huggingface.layers(values)
    with pytest.raises(ConfigError, match="cannot be pruned: its linear layers are used in another way than called"):
        huggingface.layers(values, pruning=PRUNING)
