"""Gradual pruning of Hugging Face models: they compute what the library does, pruned too, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.config import parse_section
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig, PruningConfig, huggingface, language_model_loss, model_layers
from ds_dynmo.models.huggingface import pruning
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model, trial_batches
from ds_dynmo.models.pruning.kernels import dense
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from tests.support import case_runs
from tests.support.case_runs import CASES, CaseRun
from tests.support.harness import run_each
from tests.support.huggingface_families import tiny_values, write_checkpoint
from tests.support.huggingface_runs import LENGTH, MODELS
from tests.support.training import whole

transformers = pytest.importorskip("transformers")

# Plain, transposed weights with biases, biases of attention, a parallel feed-forward part, experts with a router loss,
# norms after both parts, shared experts beside linear layers.
FAMILIES = ("llama", "gpt2", "qwen2", "phi", "mixtral", "gemma2", "deepseek_v3")
PRUNING = PruningConfig()
CASE = {"sequence_length": LENGTH, "verified": False, **CASES["pruning"]}


def prune(built: BuiltLayers, every: int) -> None:
    """Prune the smaller part of each linear layer; every so many becomes a vector, 0: none."""
    for number, linear in enumerate(prunable_linears(built)):
        magnitudes = linear.weight.detach().float().abs()
        linear.prune(magnitudes >= magnitudes.flatten().quantile(0.7))
        if every and number % every == 0:
            linear.compress()


def logits(found: Any) -> torch.Tensor:
    """Leave out a router loss."""
    return found[0] if isinstance(found, tuple) else found


def trained(built: BuiltLayers) -> dict[str, torch.Tensor]:
    """Return logits, and gradients by their names in the model: dense, with zeros where it is pruned."""
    tokens, _ = next(trial_batches(32, ()))
    torch.manual_seed(0)  # of dropout
    found = built(tokens)
    language_model_loss(found, F.pad(tokens[:, 1:], (0, 1), value=-100)).backward()
    results = {"logits": logits(found)}
    linears = {id(linear.weight): linear for linear in prunable_linears(built)}
    for name, (parameter,) in built.parts().items():
        gradient, linear = parameter.grad, linears.get(id(parameter))
        assert gradient is not None
        if linear is not None and linear.is_compressed and linear.index is not None:
            gradient = dense(gradient, linear.index, linear.shape)
        elif linear is not None and linear.mask is not None:
            gradient = gradient * linear.mask
        results[name] = gradient
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_they_compute_the_same_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    """Before anything is pruned, as layers that cannot be; then vectors as weights with zeros."""
    plain, prunable, zeros, vectors = (
        BuiltLayers(huggingface.layers(tiny_values(kind), verified=False, seed=3, pruning=case)).to(dtype)
        for case in (None, PRUNING, PRUNING, PRUNING)
    )
    prune(zeros, every=0), prune(vectors, every=1)
    for one, other in ((plain, prunable), (zeros, vectors)):
        expected, found = trained(one), trained(other)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", [*FAMILIES[:5], pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_they_equal_the_librarys_pruned_too(kind: str) -> None:
    """Verification compares, with padding too."""
    inputs = ("attention_mask", "position_ids") if kind != "gpt2" else ()
    huggingface.layers(tiny_values(kind), inputs=inputs, pruning=PRUNING)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "split_blocks"), [("gpt2", False), ("mixtral", True)])
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
    tokens, _ = next(trial_batches(32, ()))
    torch.testing.assert_close(exported.eval()(tokens).logits, logits(built(tokens)), rtol=0.0, atol=0.0)
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


def transposed_in_a_chain() -> tuple[CaseRun, str, dict[int, list[int]]]:
    """In the order of zero bubble."""
    still = CaseRun({"huggingface": MODELS["gpt2"], **CASE}, precision="bf16 zero1")
    return still, "zero_bubble", {1: [0, 2, 7], 2: [0, 5, 7], 4: [0, 6, 7], 5: [0, 3, 7]}


def halves_in_a_v() -> tuple[CaseRun, str, dict[int, list[int]]]:
    """With slices and experts."""
    split = {"split_blocks": True, "vocabulary_slices": 2}
    still = CaseRun({"huggingface": MODELS["mixtral tied"], **CASE, **split})
    last = case_runs.num_layers(still)
    return still, "v", {1: [0, 1, 2, 4, last], 2: [0, 2, last], 4: [0, 3, 6, last - 1, last]}


@pytest.mark.ranks
@pytest.mark.parametrize("made", [transposed_in_a_chain, pytest.param(halves_in_a_v, marks=pytest.mark.nightly)])
def test_moves_and_checkpoints_change_nothing(
    made: Callable[[], tuple[CaseRun, str, dict[int, list[int]]]], tmp_path: Path
) -> None:
    still, kind, moves = made()
    moved = replace(still, moves=moves, dynmo={"interval": 0, "schedule": {"kind": kind}})
    expected, found = run_each(2, case_runs.train, (still,), (moved, str(tmp_path), 4))
    assert found[0]["losses"] == expected[0]["losses"] and found[0]["evaluated"] == expected[0]["evaluated"]
    assert whole(found) == whole(expected)
    signals = case_runs.signals(found)
    assert signals == case_runs.signals(expected) and min(signals.values()) < 0.2
