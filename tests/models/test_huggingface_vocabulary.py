"""Hugging Face models with their vocabulary in slices: loss and gradients are the library's, whatever the family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.cli.export import main as export_run
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import huggingface, language_model_loss
from ds_dynmo.models.huggingface import vocabulary
from ds_dynmo.models.huggingface.adapter import source_of
from ds_dynmo.models.huggingface.outline import outline_of
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model, trial_batches
from ds_dynmo.models.huggingface.verification import find_transforms
from ds_dynmo.models.huggingface.weights import Folder
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.slice_counts import rows_of_slices
from tests.support import case_runs
from tests.support.allocations import Allocations
from tests.support.case_runs import CaseRun
from tests.support.huggingface_families import tiny_values, write_checkpoint
from tests.support.huggingface_runs import LENGTH, MODELS
from tests.support.saved_runs import save_metadata

transformers = pytest.importorskip("transformers")

TIED = {"tie_word_embeddings": True}
MASK = ("attention_mask", "position_ids")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # by why they are here
    "scaled embedding and soft caps, tied": ("gemma2", {}),
    "bias of the head": ("phi", {}),
    "learned positions, tied": ("gpt2", {}),
    "router loss": ("mixtral", {}),
    "padding among the words, tied": ("llama", {**TIED, "pad_token_id": 2}),
    "scaled logits": ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "scaled logits, tied": ("cohere", {}),
    "embedding that scales": ("gemma3_text", {}),
    "dropout before the layers": ("gpt_neox", {"hidden_dropout": 0.2}),
    "eager attention alone": ("gpt_oss", {}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "router loss and shared experts, tied": ("qwen2_moe", TIED),
}
OFTEN = ("scaled embedding and soft caps, tied", "bias of the head", "router loss", "padding among the words, tied")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]
)
def test_a_family_equals_the_librarys(name: str) -> None:
    """Verification compares losses and gradients, with padding too."""
    kind, changes = FAMILIES[name]
    values = tiny_values(kind, **changes)
    specs = huggingface.layers(values, vocabulary_slices=4, inputs=MASK if kind != "gpt2" else ())
    tied = [spec.key for spec in specs if hasattr(spec, "key")]
    assert len(tied) == (8 if "tied" in name.split(", ")[-1].split() else 0)


def model_and_batch(**changes: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    model = random_model(tiny_values("llama", **changes), "sdpa")
    tokens, _ = next(trial_batches(model.config.vocab_size, ()))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[0, :4] = -100
    return model, tokens, labels


def gradients_of(layers: BuiltLayers) -> dict[str, torch.Tensor]:
    return {name: torch.cat([weight.grad for weight in weights]) for name, weights in layers.parts().items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("slices", [1, 4, 16])
def test_loss_and_gradients_equal_the_librarys(slices: int, tied: bool) -> None:
    model, tokens, labels = model_and_batch(tie_word_embeddings=tied)
    layers = BuiltLayers(huggingface.layers(model, vocabulary_slices=slices, verified=False))
    loss = language_model_loss(layers((tokens, labels)), labels)
    expected = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    loss.backward()
    expected.backward()
    found = gradients_of(layers)
    for one, name in ((0, "model.embed_tokens.weight"), *(() if tied else ((-1, "lm_head.weight"),))):
        gradient, wanted = [*found.values()][one], model.get_parameter(name).grad
        assert (gradient - wanted).abs().max() <= 1e-6 * wanted.abs().max()


EVERY = [(name, tied) for name in FAMILIES for tied in (True, False) if (FAMILIES[name][0], tied) != ("phi", True)]


def losses_of_both(name: str, slices: int, tied: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Compute a family's loss in slices, and by the library's cross entropy; return the pairs of gradients too."""
    kind, changes = FAMILIES[name]
    values = tiny_values(kind, **{**changes, "tie_word_embeddings": tied})
    model = random_model(values, "eager")
    tokens, _ = next(trial_batches(model.config.vocab_size, ()))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[0, :4] = -100
    specs = huggingface.layers(model, vocabulary_slices=slices, attn_implementation="eager", verified=False)
    layers = BuiltLayers(specs).to(dtype)
    for weight in model.parameters():  # a bf16 model of the library keeps frequencies in fp32
        weight.data = weight.data.to(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of dropout
        loss = language_model_loss(layers((tokens, labels)), labels)
        torch.manual_seed(0)
        outputs = model(tokens, use_cache=False)
    expected = F.cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten())
    if getattr(outputs, "aux_loss", None) is not None:
        expected = expected + model.config.router_aux_loss_coef * outputs.aux_loss
    loss.backward()
    expected.backward()
    paths = outline_of(model, name).paths
    pairs = {}
    for part, weights in layers.parts().items():
        number, _, own = part.partition(".")
        weight = model.get_parameter(f"{paths[int(number)]}.{own.removeprefix('part.')}")
        pairs[part] = torch.cat([one.grad for one in weights]), weight.grad
    return loss, expected, pairs


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "tied"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_of_families_equal_the_librarys(name: str, tied: bool, dtype: torch.dtype) -> None:
    """Gradients to a share of the model's largest: in exact arithmetic that of a bias of keys is zero."""
    tolerance = 1e-6 if dtype == torch.float32 else 2**-6
    for slices in (1, 4, 16):
        loss, expected, pairs = losses_of_both(name, slices, tied, dtype)
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0.0)
        largest = max(wanted.abs().max() for _, wanted in pairs.values())
        for part, (gradient, wanted) in pairs.items():
            off = (gradient - wanted).abs().max() / largest
            assert off <= tolerance, (slices, part, off)


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
    layers = BuiltLayers(huggingface.layers(model, vocabulary_slices=slices, verified=False))
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


def test_bf16_differs_by_its_rounding() -> None:
    model, tokens, labels = model_and_batch()
    layers = BuiltLayers(huggingface.layers(model, vocabulary_slices=4, verified=False)).bfloat16()
    expected = F.cross_entropy(model.bfloat16()(tokens).logits.float().flatten(0, 1), labels.flatten())
    assert layers((tokens, labels)).dtype == torch.float32
    torch.testing.assert_close(language_model_loss(layers((tokens, labels)), labels), expected, rtol=2**-8, atol=0.0)


def test_padding_and_sizes_of_a_slice_are_its_own() -> None:
    specs = huggingface.layers(tiny_values("llama", **TIED, pad_token_id=9), vocabulary_slices=4, verified=False)
    parts = [spec.build().part for spec in specs[:4]]
    assert [part.padding_idx for part in parts] == [None, 1, None, None]
    assert [part.num_embeddings for part in parts] == [8] * 4


def test_auto_counts_weights() -> None:
    values = tiny_values("llama")
    source = source_of(values, 0)
    blocks = source.blocks[0]
    block = sum(weight.numel() for weight in blocks.parameters() if weight.dim() > 1)
    words = block // source.config.hidden_size + 1  # a head of a little more than a block
    assert vocabulary.slices_of(source, "auto", "it") == 0
    assert vocabulary.slices_of(source_of({**values, "vocab_size": words}, 0), "auto", "it") == 3
    assert vocabulary.slices_of(source_of({**values, "vocab_size": 4 * words}, 0), "auto", "it") == 9


@pytest.mark.parametrize(
    ("place", "tied"), [("folder", True), ("folder", False), ("memory", True), ("adapters", False)]
)
def test_a_slice_takes_the_memory_of_its_rows(place: str, tied: bool, tmp_path: Path) -> None:
    model: Any = random_model(tiny_values("llama", tie_word_embeddings=tied, pad_token_id=9), "sdpa")
    whole = [one.weight.detach().clone() for one in (model.get_input_embeddings(), model.get_output_embeddings())]
    if place == "folder":
        model.save_pretrained(tmp_path)
        model = tmp_path
    elif place == "adapters":
        peft = pytest.importorskip("peft")
        copied = ["embed_tokens", "lm_head"]
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=copied))
    specs = huggingface.layers(model, vocabulary_slices=4, verified=False)
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


def test_fresh_slices_are_rows_of_a_matrix_that_is_drawn_whole() -> None:
    values = tiny_values("phi", pad_token_id=9)  # with a bias
    plain, sliced = (
        BuiltLayers(huggingface.layers(values, vocabulary_slices=slices, verified=False)).parts()
        for slices in (None, 5)
    )
    for name, (weight,) in plain.items():
        assert torch.equal(torch.cat(sliced[name]), weight), name


class OtherHead(nn.Linear):
    """A head of a class of its own."""


def refusal(values: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        huggingface.layers(values, **{"vocabulary_slices": 3, **settings})
    return str(error.value)


def test_what_cannot_be_in_slices_is_refused() -> None:
    pytest.importorskip("peft")
    values = tiny_values("llama")
    for slices in (33, 0, True, "some"):
        assert "should be from 1 to 32, the vocabulary of" in refusal(values, vocabulary_slices=slices)
    adapters = {"target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    assert "peft: lm_head is a target, and lora_A.default.weight belongs to all" in refusal(values, peft=adapters)


def test_a_head_that_is_no_matrix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_transforms(source_of(tiny_values("granite", logits_scaling=8.0), 0), "it")
    assert vocabulary.slices_of(source, 3, "it") == 3
    monkeypatch.setattr(source.stubbed, "logits", lambda hidden, head: head(hidden).softmax(-1))
    with pytest.raises(ConfigError, match=r"model_type granite: vocabulary_slices 3: .* is not of each word alone"):
        vocabulary.slices_of(source, 3, "it")
    monkeypatch.setattr(source.skeleton, "lm_head", OtherHead(4, 32, bias=False))
    with pytest.raises(ConfigError, match=r"lm_head, is no product with a matrix but a OtherHead"):
        vocabulary.slices_of(source, 3, "it")


def test_a_micro_batch_without_labels_is_refused() -> None:
    layers = BuiltLayers(huggingface.layers(tiny_values("llama"), vocabulary_slices=3, verified=False))
    with pytest.raises(ConfigError, match=r"has 1 tensors: should be tokens and labels \(call engine\.set_batch_fn"):
        layers(torch.zeros(2, 3, dtype=torch.int64))


def loss_of(layers: BuiltLayers, slices: int | None, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return language_model_loss(layers((tokens, labels) if slices else tokens), labels)


def save_as_the_command(layers: BuiltLayers, folder: Path, **model: Any) -> None:
    write_checkpoint(layers, folder / "global_step3")
    facts = {"step": 3, "steps": 3, "stages": 1, "partition": [0, 9], "cases": {}}
    save_metadata(folder / "global_step3", {**facts, "model": {"sequence_length": LENGTH, "verified": False, **model}})


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_goes_on_from_its_export_with_any_slices(tied: bool, tmp_path: Path) -> None:
    """Weights are equal to the bit, the loss to rounding, and to the bit with as many slices as before."""
    model, tokens, labels = model_and_batch(tie_word_embeddings=tied)
    folder, slices = tmp_path / "given", 4
    model.save_pretrained(folder)
    layers = BuiltLayers(huggingface.layers(folder, vocabulary_slices=slices, verified=False))
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
        layers = BuiltLayers(huggingface.layers(folder, vocabulary_slices=slices, verified=False))
        found = {name: torch.cat(parts) for name, parts in layers.parts().items()}
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        torch.testing.assert_close(loss_of(layers, slices, tokens, labels), loss, rtol=1e-6, atol=0.0)
    assert torch.equal(loss_of(layers, slices, tokens, labels), loss)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_one_matrix(tied: bool, tmp_path: Path) -> None:
    model, _, _ = model_and_batch(tie_word_embeddings=tied)
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model.save_pretrained(folder)
    write_checkpoint(BuiltLayers(huggingface.layers(folder, vocabulary_slices=3, verified=False)), checkpoint)
    huggingface.export(folder, checkpoint, out, vocabulary_slices=3)
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, weight in model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], weight), name
    for slices, message in ((None, r"is not layer 0 .* has shape \[10, "), (5, "trained with vocabulary_slices 5")):
        with pytest.raises(CheckpointError, match=message):
            huggingface.export(folder, checkpoint, tmp_path / f"wrong {slices}", vocabulary_slices=slices)


def test_adapters_beside_slices_and_a_head_that_trains_are_exported(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, tokens, labels = model_and_batch()
    settings = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        adapted.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    built = BuiltLayers(huggingface.layers(adapted, vocabulary_slices=3, verified=False))
    loss = language_model_loss(built((tokens, labels)), labels)
    expected = F.cross_entropy(adapted(tokens).logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    loss.backward()
    trained = {name for name, weights in built.parts().items() if weights[0].grad is not None}
    assert trained and all("lora_" in name or "modules_to_save" in name for name in trained)
    write_checkpoint(built, tmp_path / "checkpoint")
    huggingface.export(adapted, tmp_path / "checkpoint", tmp_path / "adapter", vocabulary_slices=3)
    huggingface.export(adapted, tmp_path / "checkpoint", tmp_path / "merged", merge=True, vocabulary_slices=3)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)
    read = peft.PeftModel.from_pretrained(random_model(tiny_values("llama"), "sdpa"), tmp_path / "adapter")
    torch.testing.assert_close(read(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("granite", "fp32"),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("granite", "bf16"), ("granite", "bf16 zero1"))),
        *(pytest.param(name, "bf16 zero1", marks=pytest.mark.nightly) for name in ("mixtral tied", "gpt2", "qwen3")),
    ],
)
def test_moves_of_slices_change_nothing(name: str, precision: str) -> None:
    """In the order of zero bubble on a chain, and in a V, where both uses of a key are on one stage."""
    model = {"huggingface": MODELS[name], "sequence_length": LENGTH, "verified": False, "vocabulary_slices": 4}
    still = CaseRun(model, precision=precision, clip=0.0)
    chain = {1: [0, 2, 13], 2: [0, 11, 13], 4: [0, 12, 13]}
    case_runs.check_slices_move(still, chain)
