"""Hugging Face models in pieces: their vocabulary in slices, their decoder layers in halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.cli.export import main as export_run
from ds_dynmo.config import parse_section
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import ModelConfig, huggingface, language_model_loss, model_layers
from ds_dynmo.models.huggingface import verification, vocabulary
from ds_dynmo.models.huggingface.adapter import source_of
from ds_dynmo.models.huggingface.experts import MoEDecoderLayer
from ds_dynmo.models.huggingface.halves import Half
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model
from ds_dynmo.models.huggingface.weights import Folder
from ds_dynmo.models.layer_numbers import block_numbers
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.slice_counts import rows_of_slices
from tests.support.allocations import Allocations
from tests.support.huggingface_families import batch, tiny_values, write_checkpoint
from tests.support.saved_runs import save_metadata

transformers = pytest.importorskip("transformers")

TIED = {"tie_word_embeddings": True}


def built(given: Any, **settings: Any) -> BuiltLayers:
    return BuiltLayers(huggingface.layers(given, verified=False, **settings))


def loss_of(layers: BuiltLayers, slices: int | None, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return language_model_loss(layers((tokens, labels) if slices else tokens), labels)


# -- slices -----------------------------------------------------------------------------------------------------------


def learnable_batches(count: int) -> Iterator[torch.Tensor]:
    """Yield tokens that follow from those before them, but for one in eight."""
    generator = generator_for("curve")
    for _ in range(count):
        tokens = torch.randint(32, (4, 24), generator=generator)
        known = torch.rand(4, 24, generator=generator) < 7 / 8
        for place in range(1, 24):
            after = (3 * tokens[:, place - 1] + 5).remainder(32)
            tokens[:, place] = torch.where(known[:, place], after, tokens[:, place])
        yield tokens


OF_CURVES = {
    **{"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None},
}


def curve(slices: int | None, tied: bool, renamed: torch.Tensor | None = None) -> torch.Tensor:
    """Train 200 steps, and return the losses.

    Args:
        renamed: numbers of the words: the same model in exact arithmetic, of which sums are in another order.
    """
    model = random_model({**OF_CURVES, "tie_word_embeddings": tied}, "sdpa")
    if renamed is not None:
        for end in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            end.data = torch.empty_like(end).index_copy_(0, renamed, end.detach())
    layers = built(model, vocabulary_slices=slices)
    optimizer, losses = torch.optim.AdamW(layers.parameters(), lr=3e-3), []
    for tokens in learnable_batches(200):
        tokens = tokens if renamed is None else renamed[tokens]
        loss = loss_of(layers, slices, tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_of_200_steps_follows_that_of_the_whole_head(tied: bool) -> None:
    """As near as that of a whole head whose words have other numbers: Adam enlarges differences of rounding."""
    whole = curve(None, tied)
    assert whole[-20:].mean() < 0.5 * whole[:20].mean()
    apart = {slices: (curve(slices, tied) / whole - 1).abs() for slices in (1, 4, 16)}
    order = (curve(None, tied, torch.randperm(32, generator=generator_for("words"))) / whole - 1).abs()
    for slices, off in apart.items():
        assert off[:10].max() <= 1e-6, (slices, off[:10])
        assert off.max() <= 4 * order.max(), (slices, off.max(), order.max())


def test_slices_are_rows_of_a_matrix_that_is_drawn_whole() -> None:
    """Padding is in one of them."""
    values = tiny_values("phi", pad_token_id=9)  # with a bias
    plain, sliced = (built(values, vocabulary_slices=slices).parts() for slices in (None, 5))
    for name, (weight,) in plain.items():
        assert torch.equal(torch.cat(sliced[name]), weight), name
    tied = tiny_values("llama", **TIED, pad_token_id=9)
    parts = [spec.build().part for spec in huggingface.layers(tied, vocabulary_slices=4, verified=False)[:4]]
    assert [part.padding_idx for part in parts] == [None, 1, None, None]
    assert [part.num_embeddings for part in parts] == [8] * 4


def test_auto_counts_weights() -> None:
    values = tiny_values("llama")
    source = source_of(values, 0)
    block = sum(weight.numel() for weight in source.blocks[0].parameters() if weight.dim() > 1)
    words = block // source.config.hidden_size + 1  # a head of a little more than a block
    assert vocabulary.slices_of(source, "auto", "it") == 0
    for vocab_size, slices in ((words, 3), (4 * words, 9)):
        assert vocabulary.slices_of(source_of({**values, "vocab_size": vocab_size}, 0), "auto", "it") == slices


def given_as(place: str, model: Any, folder: Path) -> Any:
    """Return a model, the folder that it was saved in, or the model with adapters and copies of both ends."""
    if place == "folder":
        model.save_pretrained(folder)
        return folder
    if place == "adapters":
        peft = pytest.importorskip("peft")
        copied = ["embed_tokens", "lm_head"]
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=copied))
    return model


@pytest.mark.parametrize(("place", "tied"), [("folder", False), ("memory", True), ("adapters", False)])
def test_a_slice_takes_the_memory_of_its_rows(place: str, tied: bool, tmp_path: Path) -> None:
    model: Any = random_model(tiny_values("llama", tie_word_embeddings=tied, pad_token_id=9), "sdpa")
    whole = [one.weight.detach().clone() for one in (model.get_input_embeddings(), model.get_output_embeddings())]
    specs = huggingface.layers(given_as(place, model, tmp_path), vocabulary_slices=4, verified=False)
    for number, rows in enumerate(rows_of_slices(32, 4)):
        for spec, weight in ((specs[number], whole[0]), (specs[number - 4], whole[1])):
            with Allocations() as allocations:
                layer = spec.build()
            for own in layer.parameters():
                assert torch.equal(own, weight[rows.start : rows.stop])
                assert allocations.largest == own.nbytes == weight.nbytes // 4


def test_tensors_of_a_file_take_no_memory_before_they_are_copied(tmp_path: Path) -> None:
    """Else a slice would read all rows of its matrix."""
    random_model(tiny_values("llama"), "sdpa").save_pretrained(tmp_path)
    found = Folder(tmp_path).read(["lm_head.weight"])["lm_head.weight"]
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("safetensors")]
    inside = [range(*(int(end, 16) for end in where.split("-"))) for where, *_ in mapped]
    assert any(found.data_ptr() in addresses for addresses in inside)


class OtherHead(nn.Linear):
    """A head of a class of its own."""


def test_what_cannot_be_in_slices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(tiny_values("llama"), **{"vocabulary_slices": 3, **settings})

    for slices in (33, 0, True, "some"):
        refused("should be from 1 to 32, the vocabulary of", vocabulary_slices=slices)
    pytest.importorskip("peft")
    adapters = {"target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    refused("peft: lm_head is a target, and lora_A.default.weight belongs to all", peft=adapters)
    with pytest.raises(ConfigError, match=r"has 1 tensors: should be tokens and labels \(call engine\.set_batch_fn"):
        built(tiny_values("llama"), vocabulary_slices=3)(torch.zeros(2, 3, dtype=torch.int64))

    source = verification.find_transforms(source_of(tiny_values("granite", logits_scaling=8.0), 0), "it")
    assert vocabulary.slices_of(source, 3, "it") == 3
    monkeypatch.setattr(source.stubbed, "logits", lambda hidden, head: head(hidden).softmax(-1))
    with pytest.raises(ConfigError, match=r"model_type granite: vocabulary_slices 3: .* is not of each word alone"):
        vocabulary.slices_of(source, 3, "it")
    monkeypatch.setattr(source.skeleton, "lm_head", OtherHead(4, 32, bias=False))
    with pytest.raises(ConfigError, match=r"lm_head, is no product with a matrix but a OtherHead"):
        vocabulary.slices_of(source, 3, "it")


# -- halves -----------------------------------------------------------------------------------------------------------


def test_attention_beside_the_feed_forward_part_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        huggingface.layers(tiny_values("phi"), split_blocks=True)
    assert "model_type phi: split_blocks: PhiDecoderLayer is no attention and then " in str(error.value)
    assert "no cut between its modules, input_layernorm, " in str(error.value)
    assert str(error.value).endswith("makes two layers that compute the same: should be false")


def with_dropout(kind: Any, patch: pytest.MonkeyPatch) -> None:
    """Drop out parts of the residual stream, as each half would."""
    compute = kind.forward

    def dropping(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.dropout(compute(self, *args, **kwargs), 0.2, self.training)

    patch.setattr(kind, "forward", dropping)


def with_scale(kind: Any, patch: pytest.MonkeyPatch) -> None:
    build = kind.__init__

    def scaled(self: Any, *args: Any) -> None:
        build(self, *args)
        self.scale = nn.Parameter(torch.ones(()))

    patch.setattr(kind, "__init__", scaled)


def with_a_value_handed_on(kind: Any, patch: pytest.MonkeyPatch) -> None:
    """Hand a value from one half to the other through an argument, which halves on two stages do not share."""
    compute = kind.forward

    def handing_on(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: Any) -> torch.Tensor:
        handed_on = position_embeddings[0]
        if hasattr(self.self_attn, "q_proj"):
            handed_on.mean_before = hidden_states.detach().mean()
        hidden = compute(self, hidden_states, position_embeddings=position_embeddings, **kwargs)
        return hidden + getattr(handed_on, "mean_before", 0.0) if hasattr(self.mlp, "up_proj") else hidden

    patch.setattr(kind, "forward", handing_on)


def with_wrong_cuts(kind: Any, patch: pytest.MonkeyPatch) -> None:
    """Verification finds it, whatever a cut says."""
    wrong = (("input_layernorm", 0), ("self_attn", 2), ("post_attention_layernorm", 0)), (("mlp", 0),)
    halves = tuple(Half(absent) for absent in reversed(wrong))
    patch.setattr(verification, "_cut_once", lambda tiny, implementation: (halves,) * 3)


DIFFER = r"cannot have split_blocks: the logits of a tiny model differ by \d"


@pytest.mark.parametrize(
    ("change", "other", "message"),  # with another config each, as cuts of one are made once
    [
        (with_dropout, {"attention_bias": True}, "LlamaDecoderLayer is no attention and then feed-forward"),
        (with_scale, {"mlp_bias": True}, "LlamaDecoderLayer has a tensor of its own, scale, beside"),
        (with_a_value_handed_on, {"attention_bias": True, "mlp_bias": True}, DIFFER),
        (with_wrong_cuts, {}, DIFFER),
    ],
)
def test_layers_that_are_no_two_halves_are_refused(
    change: Callable[[Any, pytest.MonkeyPatch], None],
    other: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(type(random_model(tiny_values("llama"), "eager").model.layers[0]), monkeypatch)
    with pytest.raises(ConfigError, match=message):
        huggingface.layers(tiny_values("llama", **other), split_blocks=True)


def test_halves_of_other_layers_are_refused() -> None:
    source = source_of(tiny_values("llama"), 0)
    halves = verification.find_halves(source, "it").halves[0]
    verification.check_has_all(halves, source.blocks[0])
    with pytest.raises(ValueError, match="ModuleDict has another module than that of a tiny model, block"):
        verification.check_has_all(halves, nn.ModuleDict({"block": nn.Linear(2, 2)}))


def test_experts_and_their_load_signal_are_in_the_second_half() -> None:
    specs = huggingface.layers(tiny_values("mixtral"), split_blocks=True, verified=False)
    attention, experts = specs[1].build(), specs[2].build()
    assert not hasattr(attention, "load_signal") and not hasattr(attention.part.mlp, "experts")
    assert isinstance(experts, MoEDecoderLayer) and experts.load_signal() == 2 / 8
    assert not [*experts.part.self_attn.parameters()]


def test_a_half_takes_the_memory_of_its_own_modules(tmp_path: Path) -> None:
    model = random_model(tiny_values("llama"), "sdpa")
    model.save_pretrained(tmp_path)
    layer = model.model.layers[0]
    for given in (model, tmp_path):
        found = []
        for spec in huggingface.layers(given, split_blocks=True, verified=False)[1:3]:
            with Allocations() as allocations:
                half = spec.build()
            assert allocations.total == sum(own.nbytes for own in half.parameters()) > 0
            found.append(allocations.total)
            assert all(torch.equal(own, layer.get_parameter(name)) for name, own in half.part.named_parameters())
        assert sum(found) == sum(weight.nbytes for weight in layer.parameters())


def test_fresh_adapters_of_halves_are_those_of_whole_layers(tmp_path: Path) -> None:
    """They are drawn for both halves, whose base is read once."""
    pytest.importorskip("peft")
    random_model(tiny_values("qwen2"), "sdpa").save_pretrained(tmp_path)
    for settings in ({"init_lora_weights": "gaussian"}, {"use_dora": True}, {"bias": "all"}):
        lora = {"r": 2, "target_modules": ["q_proj", "v_proj", "up_proj"], **settings}
        expected, found = (built(tmp_path, peft=lora, split_blocks=split).parts() for split in (False, True))
        assert found.keys() == expected.keys() and any("lora_B" in name for name in found)
        for name, (weight,) in expected.items():
            assert torch.equal(found[name][0], weight), (settings, name)


def test_freezing_counts_whole_layers() -> None:
    def layers_of(blocks: int) -> list[Any]:
        case = {"kind": "freezing", "schedule": [[0.5, blocks]]}
        model = {"huggingface": tiny_values("llama", vocab_size=256), "sequence_length": 8, "verified": False}
        return model_layers(parse_section(ModelConfig, {**model, "split_blocks": True, "case": case}, "model"))

    assert block_numbers(layers_of(3)) == range(1, 7)
    with pytest.raises(ConfigError, match=r"schedule freezes 4 blocks, model\.huggingface has 3"):
        layers_of(4)


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tied", "settings"),
    [
        ("mixtral", False, {"split_blocks": True, "vocabulary_slices": 3}),
        ("llama", True, {"vocabulary_slices": 3}),
    ],
)
def test_an_export_has_whole_layers_and_matrices(
    kind: str, tied: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(tiny_values(kind, tie_word_embeddings=tied), "sdpa")
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model.save_pretrained(folder)
    write_checkpoint(built(folder, **settings), checkpoint)
    huggingface.export(folder, checkpoint, out, **settings)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, weight in model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], weight), name

    def refused(message: str, source: str, **others: Any) -> None:
        with pytest.raises(CheckpointError, match=message):
            huggingface.export(folder, tmp_path / source, tmp_path / "wrong", **others)

    if "split_blocks" in settings:
        write_checkpoint(built(folder), tmp_path / "whole")
        whole_layers = r"is not layer 1 of the model, model\.layers\.0: mlp.* has no tensor"
        refused(whole_layers, "checkpoint", vocabulary_slices=3)
        refused("no such file: was the model trained with split_blocks", "whole", split_blocks=True)
    else:
        refused(r"is not layer 0 .* has shape \[10, ", "checkpoint")
        refused("trained with vocabulary_slices 5", "checkpoint", vocabulary_slices=5)


def save_as_the_command(layers: BuiltLayers, folder: Path, **model: Any) -> None:
    write_checkpoint(layers, folder / "global_step3")
    facts = {"step": 3, "steps": 3, "stages": 1, "partition": [0, 9], "cases": {}}
    save_metadata(folder / "global_step3", {**facts, "model": {"sequence_length": 12, "verified": False, **model}})


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_goes_on_from_its_export_with_any_slices(tied: bool, tmp_path: Path) -> None:
    """Weights are equal to the bit, the loss to rounding, and to the bit with as many slices as before."""
    tokens, labels = batch()
    folder, slices = tmp_path / "given", 4
    random_model(tiny_values("llama", tie_word_embeddings=tied), "sdpa").save_pretrained(folder)
    layers = built(folder, vocabulary_slices=slices)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(layers, slices, tokens, labels).backward()
        optimizer.step()
    weights = {name: torch.cat(parts) for name, parts in layers.parts().items()}
    loss = loss_of(layers, slices, tokens, labels)
    for number, other in enumerate((8, None, 4)):
        run, out = tmp_path / f"run {number}", tmp_path / f"exported {number}"
        save_as_the_command(layers, run, huggingface=str(folder), vocabulary_slices=slices)
        assert export_run([str(run), str(out)]) == 0
        folder, slices = out, other
        layers = built(folder, vocabulary_slices=slices)
        found = {name: torch.cat(parts) for name, parts in layers.parts().items()}
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        torch.testing.assert_close(loss_of(layers, slices, tokens, labels), loss, rtol=1e-6, atol=0.0)
    assert torch.equal(loss_of(layers, slices, tokens, labels), loss)
