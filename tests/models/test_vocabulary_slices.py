"""The GPT's vocabulary in slices: loss and gradients are those of whole matrices, and moves change nothing."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec

from ds_dynmo.config import parse_section
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import ModelConfig, gpt, language_model_loss, model_layers, with_labels
from ds_dynmo.models.exporting import weights_file
from ds_dynmo.models.gpt import Block, FinalNorm
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.huggingface.trial import BuiltLayers
from ds_dynmo.models.pruning.exporting import export
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.vocabulary import takes_labels
from ds_dynmo.models.vocabulary_slices import EmbeddingSlice, HeadSlice, rows_of, slice_layers
from tests.support import case_runs
from tests.support.case_runs import CaseRun
from tests.support.huggingface_families import nightly, write_checkpoint

SIZES = {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 12, "mlp_ratio": 2, "vocab_size": 258}
MOE = {"kind": "moe", "experts": 4}


def config_of(slices: Any, tied: bool = True, **more: Any) -> ModelConfig:
    section = {**SIZES, "tied_embedding": tied, "vocabulary_slices": slices, **more}
    return parse_section(ModelConfig, section, "model")


def layers_of(slices: Any, tied: bool = True, *, packed: bool = False, **more: Any) -> BuiltLayers:
    return BuiltLayers(model_layers(config_of(slices, tied, **more), packed=packed))


def batch(*, packed: bool = False, trained: float = 0.7) -> tuple[Any, torch.Tensor]:
    """Return inputs and labels, of which a part is -100."""
    generator = generator_for("slices")
    tokens = torch.randint(SIZES["vocab_size"], (3, 13), generator=generator)
    counts = torch.rand(3, 12, generator=generator) < trained
    positions = torch.arange(12).remainder(5).expand(3, -1)
    inputs = (tokens[:, :-1], positions) if packed else tokens[:, :-1]
    return inputs, tokens[:, 1:].where(counts, torch.tensor(-100))


def loss_and_gradients(layers: BuiltLayers, inputs: Any, labels: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients of the parts of the model: rows of slices are joined."""
    layers.zero_grad()
    loss = language_model_loss(layers(inputs), labels)
    loss.backward()
    parts = layers.parts().items()
    return loss.detach(), {name: torch.cat([weight.grad for weight in weights]) for name, weights in parts}


def check_as_whole(sliced: BuiltLayers, plain: BuiltLayers, *, tolerance: float, **of_batch: Any) -> None:
    inputs, labels = batch(**of_batch)
    expected, wanted = loss_and_gradients(plain, inputs, labels)
    found, gradients = loss_and_gradients(sliced, with_labels((inputs, labels))[0], labels)
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=0.0, equal_nan=True)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        off = (gradients[name] - gradient).abs().max()
        assert off <= tolerance * gradient.abs().max(), (name, off)


def test_loss_and_gradients_equal_those_of_whole_matrices() -> None:
    """Auxiliary losses, halves and packed documents go along; a micro-batch without labels trains nothing."""
    for tied in (True, False):
        for slices in (1, 4, 16):
            check_as_whole(layers_of(slices, tied), layers_of(None, tied), tolerance=2e-6)
    for packed in (False, True):
        more: dict[str, Any] = {"case": MOE, "split_blocks": True, "packed": packed}
        check_as_whole(layers_of(4, **more), layers_of(None, **more), tolerance=2e-6, packed=packed)
    check_as_whole(layers_of(4), layers_of(None), tolerance=0.0, trained=0.0)  # nan, as torch's cross entropy


def test_bf16_differs_by_its_rounding() -> None:
    """Gradients of slices are about as far from those in fp32 as gradients of whole matrices are, on any CPU."""
    inputs, labels = batch()
    plain = layers_of(None).bfloat16()
    loss, exact = loss_and_gradients(deepcopy(plain).float(), inputs, labels)
    _, whole = loss_and_gradients(plain, inputs, labels)
    found, sliced = loss_and_gradients(layers_of(4).bfloat16(), with_labels((inputs, labels))[0], labels)
    torch.testing.assert_close(found.float(), loss, rtol=2**-8, atol=0.0)
    for name, gradient in exact.items():
        off, off_whole = (float((other[name].float() - gradient).norm()) for other in (sliced, whole))
        assert off <= 2.0 * off_whole, (name, off, off_whole)


def test_evaluation_equals_that_of_whole_matrices() -> None:
    inputs, labels = batch()
    sliced, plain = layers_of(4, case=MOE).eval(), layers_of(None, case=MOE).eval()
    with torch.no_grad():
        found = language_model_loss(sliced(with_labels((inputs, labels))[0]), labels)
        expected = language_model_loss(plain(inputs), labels)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def test_slices_have_the_rows_of_the_whole_matrix() -> None:
    for tied in (True, False):
        plain, sliced = layers_of(None, tied).layers, layers_of(4, tied).layers
        assert torch.equal(torch.cat([layer.weight for layer in sliced[:4]]), plain[0].weight)
        if not tied:
            assert torch.equal(torch.cat([layer.weight for layer in sliced[-4:]]), plain[-1].weight)


def test_a_slice_draws_little_more_than_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the whole matrix in any number of slices; an export draws none."""
    draw, drawn = gpt.init_normal, [0]

    def counted(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
        drawn[0] += len(weight)
        draw(weight, std, generator)

    monkeypatch.setattr(gpt, "init_normal", counted)
    sizes = {"vocab_size": 2000, "hidden_size": 8, "layers": 1, "heads": 1, "sequence_length": 8}
    whole = gpt.TokenEmbedding(GPTConfig(**sizes), 0).weight
    for slices in (1, 3, 7):
        front, back = slice_layers(GPTConfig(**sizes, vocabulary_slices=slices), packed=False)
        assert drawn[0] == 2000
        parts = [spec.build() for spec in front]
        assert torch.equal(torch.cat([part.weight for part in parts]), whole)
        assert drawn[0] <= 2 * 2000 + slices * 2 * gpt.DRAWN_ROWS
        assert [rows_of(spec) for spec in (*front, *back)] == [part.rows for part in parts] * 2
        drawn[0] = 2000


def test_the_layer_list_has_slices_at_both_ends() -> None:
    tied, untied = (model_layers(config_of(2, one)) for one in (True, False))
    assert [spec.typename for spec in untied] == [*[EmbeddingSlice] * 2, Block, Block, FinalNorm, *[HeadSlice] * 2]
    keys = ["embedding 0", "embedding 1"]
    assert [getattr(spec, "key", None) for spec in tied] == [*keys, None, None, None, *keys]
    assert all(isinstance(spec, TiedLayerSpec) and spec.forward_fn is None for spec in tied[:2])
    assert takes_labels(tied) and not takes_labels(model_layers(config_of(None)))


def test_auto_makes_slices_of_at_most_half_a_block() -> None:
    """A block has (4 + 2 * 2) * 16 * 16 + 12 * 16 = 2,240 multiplications per token, the head 16 per word."""
    assert config_of("auto", vocab_size=256).num_vocabulary_slices == 4
    assert config_of("auto", vocab_size=1120).num_vocabulary_slices == 16
    assert config_of("auto", hidden_size=64, vocab_size=256).num_vocabulary_slices == 0
    assert not takes_labels(model_layers(config_of("auto", hidden_size=64, vocab_size=256)))


def test_what_cannot_be_in_slices_is_refused() -> None:
    calm = {"kind": "early_exit", "method": "calm"}
    for section, message in (
        ({"vocabulary_slices": 259}, r"vocabulary_slices = 259: should be at most vocab_size, 258"),
        ({"vocabulary_slices": 0}, r"model\.vocabulary_slices = 0: .*1"),
        ({"vocabulary_slices": "all"}, r"model\.vocabulary_slices = \"all\": .*auto"),
        ({"vocabulary_slices": 2, "case": calm}, "early_exit: cannot be combined with vocabulary_slices"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_section(ModelConfig, {**SIZES, "layers": 4, **section}, "model")
    inputs, _ = batch(packed=True)
    with pytest.raises(ConfigError, match=r"has 1 tensors as its inputs: should be tokens, labels.*with_labels"):
        layers_of(4)(inputs[0])
    with pytest.raises(ConfigError, match="has 2 tensors as its inputs: should be tokens, positions, labels"):
        layers_of(4, packed=True)(inputs)


def test_tokens_that_no_slice_has_are_no_zeros() -> None:
    layers = layers_of(4)
    for number, of_labels in ((258, False), (258, True), (-1, False), (-1, True), (-100, False)):
        inputs, labels = batch()
        (labels if of_labels else inputs)[0, 3] = number
        with pytest.raises(IndexError):
            layers((inputs, labels))


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_has_whole_matrices(tied: bool, tmp_path: Path) -> None:
    specs, plain = model_layers(config_of(3, tied)), layers_of(None, tied)
    write_checkpoint(layers_of(3, tied), tmp_path / "saved")  # DeepSpeed writes a tied layer once
    export(specs, tmp_path / "saved", tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == len(plain.layers)
    for number, layer in enumerate(plain.layers):
        found = torch.load(tmp_path / "out" / weights_file(number), weights_only=True)
        assert found.keys() == layer.state_dict().keys()
        assert all(torch.equal(value, found[name]) for name, value in layer.state_dict().items())
    with pytest.raises(CheckpointError, match="has no 129 rows of the vocabulary: is it of the model"):
        export(model_layers(config_of(2, tied)), tmp_path / "saved", tmp_path / "other")


def load_exported(layers: BuiltLayers, folder: Path) -> None:
    """Load the files of whole layers, of which slices take their rows."""
    number = -1
    for layer in layers.layers:
        rows = layer.rows if isinstance(layer, EmbeddingSlice) else None
        number += rows is None or rows.start == 0
        state = torch.load(folder / weights_file(number), weights_only=True)
        layer.load_state_dict(state if rows is None else {"weight": state["weight"][rows.start : rows.stop]})


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_goes_on_from_its_export_with_any_slices(tied: bool, tmp_path: Path) -> None:
    """Weights are equal to the bit, the loss to rounding, and to the bit with as many slices as before."""
    inputs, labels = batch()
    slices, layers = 4, layers_of(4, tied)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    given = with_labels((inputs, labels))[0]
    for _ in range(3):
        loss_and_gradients(layers, given, labels)
        optimizer.step()
    weights = {name: torch.cat(parts) for name, parts in layers.parts().items()}
    loss = language_model_loss(layers(given), labels)
    for number, other in enumerate((8, None, 4)):
        saved, out = tmp_path / f"saved {number}", tmp_path / f"exported {number}"
        write_checkpoint(layers, saved)
        export(model_layers(config_of(slices, tied)), saved, out)
        slices, layers = other, layers_of(other, tied, seed=5)
        load_exported(layers, out)
        assert all(torch.equal(torch.cat(parts), weights[name]) for name, parts in layers.parts().items())
        found = language_model_loss(layers(given if slices else inputs), labels)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0.0)
    assert torch.equal(found, loss)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("precision", "tied"),
    [
        ("bf16 zero1", True),
        nightly("bf16 zero1", False),
        *(nightly(one, tied) for one in ("fp32", "bf16", "fp32 zero1") for tied in (True, False)),
    ],
)
def test_moves_of_slices_change_nothing(precision: str, tied: bool) -> None:
    """Both uses of a key are on one stage at times, and always in a V."""
    model = {"vocabulary_slices": 4, "tied_embedding": tied}
    still = CaseRun(model, precision=precision, clip=0.0, steps=4)
    case_runs.check_slices_move(still, {1: [0, 2, 13], 2: [0, 11, 13], 3: [0, 12, 13]})
