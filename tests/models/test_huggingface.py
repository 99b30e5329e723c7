"""The layers of a Hugging Face model, compared with transformers' own forward and backward pass."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ds_dynmo.models import huggingface, language_model_loss
from ds_dynmo.models.freezing.plasticity import WatchedBlock, capture_first, watch
from ds_dynmo.models.huggingface import adapter
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model
from ds_dynmo.models.seeding import generator_for
from tests.support.huggingface_families import (
    GPT2,
    SIZES,
    batch,
    compare_gradients,
    library_loss,
    logits_of,
    write_checkpoint,
)

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

LLAMA = {"model_type": "llama", **SIZES}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2 untied": {**GPT2, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},
    "llama tied": {**LLAMA, "tie_word_embeddings": True, "pad_token_id": 7},
    "mixtral balanced": {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.5},
}
OTHERS = {
    "gpt2": GPT2,
    "llama": {**LLAMA, "rope_theta": 5000.0},
    "mixtral": MIXTRAL,
    "qwen2": {"model_type": "qwen2", **SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16},
}
EACH = pytest.mark.parametrize("name", MODELS)


def library_model(name: str) -> Any:
    return random_model({**MODELS, **OTHERS}[name], "sdpa")


def built(model: Any, *, verified: bool = False, **settings: Any) -> BuiltLayers:
    return BuiltLayers(huggingface.layers(model, verified=verified, **settings)).train()


@EACH
def test_logits_loss_and_gradients_equal_the_librarys(name: str) -> None:
    """The loss of routers is absent in evaluation. In bf16 rotary frequencies stay in fp32, as in transformers."""
    reference, (tokens, labels) = library_model(name), batch(300)
    ours = built(reference, verified=True)
    expected, found = reference(tokens), ours(tokens)
    loss, own_loss = library_loss(reference, expected, labels), language_model_loss(found, labels)
    assert torch.equal(logits_of(found), expected.logits)
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=0)
    loss.backward()
    own_loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in reference.parameters())
    compare_gradients(ours, reference)
    if name == "mixtral balanced":
        auxiliary = reference.router_aux_loss_coef * expected.aux_loss
        assert found[1].shape == (1,) and found[1].item() > 0.5
        torch.testing.assert_close(found[1][0], auxiliary, rtol=1e-6, atol=0)
        evaluated, nothing = ours.eval()(tokens)
        assert nothing.item() == 0 and torch.equal(evaluated, found[0])
    else:
        own = ours.named_weights(reference)
        assert all(torch.equal(own[name].grad, one.grad) for name, one in reference.named_parameters())

    in_bf16, exact = built(reference).bfloat16(), dict(reference.named_buffers())
    reference.bfloat16()
    for buffer_name, buffer in exact.items():
        module, _, leaf = buffer_name.rpartition(".")
        setattr(reference.get_submodule(module), leaf, buffer)
    logits = logits_of(in_bf16(tokens))
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, reference(tokens).logits)


class Runs:
    """Counts how often transformers' ``forward`` is run for arguments of layers."""

    def __init__(self, layers: BuiltLayers) -> None:
        (self.stubbed,) = {layer.stubbed for layer in layers.layers if hasattr(layer, "stubbed")}
        self.count, self._run = 0, self.stubbed._run
        self.stubbed._run = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._run(*args, **kwargs)


def test_arguments_are_made_once_for_the_layers_of_a_stage() -> None:
    ours, (tokens, _) = built(library_model("qwen2")), batch(300)
    runs = Runs(ours)
    ours(tokens), ours(tokens.flip(1))
    assert runs.count == 1  # they depend on the batch's shape alone
    ours(tokens[:, 1:]), ours.bfloat16()(tokens[:, 1:])
    assert runs.count == 3
    with torch.inference_mode():
        ours(tokens[:, 1:])
    ours(tokens[:, 1:]).sum().backward()  # torch could not save what it made in inference mode
    assert runs.count == 5


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_micro_batches_in_flight_have_their_own_arguments(reentrant: bool | None) -> None:
    """Also where layers run again in the backward pass (None: they do not)."""
    reference = library_model("qwen3")
    ours = built(reference, inputs=("position_ids",))
    tokens, labels = batch(300)
    rows, length = tokens.shape
    packed = [torch.cat([torch.arange(n), torch.arange(length - n)]).expand(rows, -1).clone() for n in (3, 5)]

    def run(positions: torch.Tensor) -> torch.Tensor:
        activations = (tokens, positions)
        for layer in ours.layers:
            if reentrant is None or layer is ours.layers[0]:
                activations = layer(activations)
            else:
                activations = checkpoint(lambda *given, own=layer: own(given), *activations, use_reentrant=reentrant)
        return activations

    expected = [reference(tokens, position_ids=positions, use_cache=False).logits for positions in packed]
    F.cross_entropy(expected[0].flatten(0, 1), labels.flatten()).backward()
    runs = Runs(ours)
    found = [run(positions) for positions in packed]
    assert runs.count == 2 and all(map(torch.equal, found, expected))
    F.cross_entropy(found[0].flatten(0, 1), labels.flatten()).backward()
    assert runs.count == (2 if reentrant is None else 3)
    compare_gradients(ours, reference)
    packed[1].copy_(packed[0])
    assert torch.equal(run(packed[1]), expected[0])


# -- weights ------------------------------------------------------------------------------------------------


@EACH
def test_a_folder_is_read_layer_by_layer_and_written_again(name: str, tmp_path: Path) -> None:
    """A checkpoint in bf16 is exported to files that transformers and our own reader accept."""
    reference, (tokens, _) = library_model(name), batch(300)
    given, out, library = (tmp_path / part for part in ("given", "out", "library"))
    reference.save_pretrained(given, max_shard_size="20KB")
    ours = built(given)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(given).train()
    logits = logits_of(ours(tokens))
    assert torch.equal(logits, loaded(tokens).logits) and torch.equal(logits, reference(tokens).logits)
    write_checkpoint(ours.bfloat16(), tmp_path / "checkpoint")
    huggingface.export(reference.config, tmp_path / "checkpoint", out)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and loaded.dtype == torch.bfloat16
    for parameter_name, parameter in reference.named_parameters():
        assert torch.equal(loaded.get_parameter(parameter_name), parameter.bfloat16())
    reference.save_pretrained(library, max_shard_size="20KB")
    found, expected = (json.loads((one / "model.safetensors.index.json").read_text()) for one in (out, library))
    assert found["weight_map"].keys() == expected["weight_map"].keys()
    assert torch.equal(logits_of(built(out).bfloat16()(tokens)), logits_of(ours(tokens)))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_layer_reads_only_its_own_tensors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_model(name).save_pretrained(tmp_path, max_shard_size="20KB")
    specs = huggingface.layers(tmp_path)
    read: list[str] = []
    original = adapter.Folder.read
    monkeypatch.setattr(adapter.Folder, "read", lambda self, names: (read.extend(names), original(self, names))[1])
    specs[2].build()
    assert read and all(name.startswith("model.layers.1.") for name in read)
    assert set(specs[2].module_args[0].tensors.shapes) == set(read)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index[name] for name in read}
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    specs[2].build()  # does not open the other files


@pytest.mark.parametrize("name", ["llama tied", "gpt2", "mixtral"])
def test_a_spec_holds_and_pickles_only_its_own_tensors(name: str) -> None:
    reference = library_model(name)
    in_memory = {parameter.data_ptr() for parameter in reference.parameters()}
    for spec in huggingface.layers(reference, verified=False):
        layer = spec.build()
        tensors = spec.module_args[0].tensors
        held = tensors.read(tensors.shapes)
        assert {tensor.data_ptr() for tensor in held.values()} <= in_memory  # no copies
        assert sum(t.nbytes for t in held.values()) == sum(p.nbytes for p in layer.parameters())
        pickled = io.BytesIO()
        torch.save(spec, pickled)
        with zipfile.ZipFile(pickled) as records:
            stored = sum(record.file_size for record in records.infolist() if "/data/" in record.filename)
        assert stored == sum(p.nbytes for p in layer.parameters())
        again = torch.load(io.BytesIO(pickled.getvalue()), weights_only=False).build()
        assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again.parameters(), strict=True))


def test_a_file_of_the_model_without_its_head_is_accepted(tmp_path: Path) -> None:
    """The first GPT-2 files have no prefix, and buffers that no longer exist."""
    reference, (tokens, _) = library_model("gpt2"), batch(300)
    reference.config.save_pretrained(tmp_path)
    state = {name: value.contiguous() for name, value in reference.transformer.state_dict().items()}
    state |= {"h.0.attn.bias": torch.ones(4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(built(tmp_path)(tokens), reference(tokens).logits)


@EACH
def test_fresh_weights_have_the_librarys_distribution(name: str) -> None:
    """Each layer has its own generator: weights depend neither on which other layers are built nor on torch's state."""
    settings = MODELS[name]
    reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
    state = torch.get_rng_state()
    ours = built(settings, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    weights = ours.named_weights(reference)
    for parameter_name, parameter in reference.named_parameters():
        found = weights[parameter_name]
        assert found.shape == parameter.shape
        if parameter.numel() > 500:
            assert found.std().item() == pytest.approx(parameter.std().item(), rel=0.15)
            assert abs(found.mean() - parameter.mean()) < 0.25 * parameter.std()
        elif parameter.std() == 0:
            assert torch.equal(found, parameter)
    alone, other = (huggingface.layers(settings, seed=seed, verified=False)[2].build() for seed in (5, 6))
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), ours.layers[2].parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(alone.parameters(), other.parameters(), strict=True))


def test_what_is_frozen_in_a_model_in_memory_stays_frozen() -> None:
    """In halves too, and at both ends of a model that is untied."""
    model = library_model("llama tied")
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(False)
    mlp = [f"part.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    embedding, first = ["layers.0.part.weight"], [f"layers.1.{name}" for name in mlp]
    for settings, expected in (
        ({}, embedding + first),
        ({"untie": True}, [*embedding, *first, "layers.5.part.weight"]),
        ({"split_blocks": True}, [*embedding, *(f"layers.2.{name}" for name in mlp)]),
    ):
        parameters = built(model, **settings).named_parameters()
        assert [name for name, parameter in parameters if not parameter.requires_grad] == expected, settings


def test_a_model_in_memory_keeps_settings_that_its_config_does_not_say() -> None:
    for name, path, setting, value in (
        ("llama", "model.embed_tokens", "padding_idx", 7),
        ("llama tied", "model.embed_tokens", "padding_idx", None),
        ("llama", "model.layers.1.self_attn", "attention_dropout", 0.5),
        ("gpt2", "transformer.drop", "p", 0.5),
        ("gpt2", "transformer.h.1.mlp.dropout", "p", 0.5),
    ):
        reference = library_model(name)
        setattr(reference.get_submodule(path), setting, value)
        reference.gradient_checkpointing_enable()  # not a setting of layers: DeepSpeed recomputes
        ours = built(reference)
        reference.gradient_checkpointing_disable()
        tokens, labels = batch(300)
        tokens = tokens.index_fill(1, torch.tensor([4]), 7)
        torch.manual_seed(1)
        outputs = reference(tokens)
        torch.manual_seed(1)
        found = ours(tokens)
        assert torch.equal(found, outputs.logits), (name, path)
        library_loss(reference, outputs, labels).backward()
        language_model_loss(found, labels).backward()
        compare_gradients(ours, reference)


def test_neither_a_config_nor_a_dict_is_changed() -> None:
    config = transformers.AutoConfig.for_model(**LLAMA)
    before = config.to_dict()
    huggingface.layers(config)
    assert config.to_dict() == before and config._attn_implementation_internal is None
    scaled = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 8, "rope_theta": 10000.0}
    for key, nested in (("rope_parameters", scaled), ("rope_scaling", {"type": "dynamic", "factor": 2.0})):
        settings = {**LLAMA, key: nested}
        said = json.dumps(settings)
        huggingface.layers(settings)
        assert json.dumps(settings) == said


# -- experts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_choices_of_the_last_training_batch_are_counted_once(reentrant: bool) -> None:
    layer = huggingface.layers(MIXTRAL, verified=False)[1].build()
    routed: list[torch.Tensor] = []
    layer.part.mlp.experts.register_forward_pre_hook(lambda module, inputs: routed.append(inputs[1]))
    assert layer.load_signal() == 0.5  # 2 of 4 experts
    for micro_batches in (3, 2):
        layer.train()  # a batch begins
        routed.clear()
        for seed in range(micro_batches):
            hidden = torch.randn(2, 7, 32, generator=generator_for(seed)).requires_grad_()
            checkpoint(layer, hidden, use_reentrant=reentrant).sum().backward()
        first_passes = routed[::2]  # every second is recomputed
        assert len(routed) == 2 * micro_batches
        assert torch.equal(layer.choices, torch.cat(first_passes).flatten().bincount(minlength=4))
        layer.eval()(hidden)
        assert layer.choices.sum() == micro_batches * 2 * 7 * 2
    assert layer.load_signal() == 0.5
    layer.requires_grad_(False)
    assert layer.load_signal() == 0.0
    assert not hasattr(huggingface.layers(LLAMA, verified=False)[1].build(), "load_signal")


def test_a_reference_finds_its_arguments_by_itself() -> None:
    """It runs on another thread, in bf16 weights on the CPU. Rotary frequencies are fp32 all the same."""
    block = huggingface.layers(OTHERS["qwen2"], verified=False)[1].build()
    block.register_forward_hook(capture_first)
    found = []
    for _ in range(2):
        watch(block, True)
        block(torch.randn(1, 60, 32, generator=generator_for("hidden")))
        watched = WatchedBlock(block)
        if watched.comparable:
            assert watched._model.stubbed is not block.stubbed
            found.append(watched.plasticity())
    assert found[0] < 1e-4
