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
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_dynmo.config import parse_section
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import ModelConfig, huggingface, language_model_loss, model_layers, vocabulary_of
from ds_dynmo.models.freezing.plasticity import WatchedBlock, capture_first, watch
from ds_dynmo.models.huggingface import adapter
from ds_dynmo.models.layer_numbers import block_numbers
from ds_dynmo.models.seeding import generator_for

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "model_type": "gpt2",
    **{"vocab_size": 300, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 untied": {**GPT2, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},
    "llama": {"model_type": "llama", **SIZES, "rope_theta": 5000.0},
    "llama tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True, "pad_token_id": 7},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen2 sliding": {
        **{"model_type": "qwen2", **SIZES, "use_sliding_window": True, "sliding_window": 5},
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16},
    "mixtral": MIXTRAL,
    "mixtral sliding": {**MIXTRAL, "sliding_window": 6, "num_experts_per_tok": 1},
    "mixtral balanced": {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.5},
}
BATCH = 3
LENGTH = 11


def library_model(name: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    settings = dict(MODELS[name])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    with torch.no_grad():  # initial weights are so small that errors would not be seen
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def batch(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 300, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


class Whole(nn.Module):
    """The layer list as a PipelineModule builds it on one stage."""

    def __init__(self, specs: list[LayerSpec]) -> None:
        super().__init__()
        self.tied: dict[str, nn.Module] = {}
        self.layers = nn.ModuleList()
        self.functions: list[Any] = []
        for spec in specs:
            assert isinstance(spec, LayerSpec)
            layer = spec.build() if self._is_new(spec) else None
            if layer is not None:
                self.layers.append(layer)
            if isinstance(spec, TiedLayerSpec):
                tied = self.tied.setdefault(spec.key, layer)  # type: ignore[arg-type]
                function = spec.forward_fn
                self.functions.append(tied if function is None else lambda x, m=tied, f=function: f(m, x))
            else:
                self.functions.append(layer)

    def _is_new(self, spec: LayerSpec) -> bool:
        return not isinstance(spec, TiedLayerSpec) or spec.key not in self.tied

    def forward(self, activations: Any) -> Any:
        for function in self.functions:
            activations = function(activations)
        return activations

    def gradients(self, reference: Any) -> dict[str, torch.Tensor | None]:
        """Return gradients by transformers' names."""
        path = {id(module): name for name, module in reference.named_modules()}
        base = reference.base_model
        parts = [reference.get_input_embeddings()]
        parts += [base.wpe, *base.h, base.ln_f] if hasattr(base, "wpe") else [*base.layers, base.norm]
        parts += [] if len(parts) == len(self.layers) else [reference.get_output_embeddings()]
        return {
            f"{path[id(part)]}.{name.removeprefix('part.')}": parameter.grad
            for part, layer in zip(parts, self.layers, strict=True)
            for name, parameter in layer.named_parameters()
        }


def built(model: Any, **settings: Any) -> Whole:
    return Whole(huggingface.layers(model, **settings)).train()


def library_loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and total loss. Transformers takes unshifted labels, so the cross entropy is ours."""
    outputs = model(tokens)
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    if getattr(outputs, "aux_loss", None) is not None:
        loss = loss + model.router_aux_loss_coef * outputs.aux_loss
    return outputs.logits, loss


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal_the_librarys(name: str) -> None:
    reference, (tokens, labels) = library_model(name), batch()
    ours = built(reference)
    logits, loss = library_loss(reference, tokens, labels)
    outputs = ours(tokens)
    own_logits = outputs[0] if isinstance(outputs, tuple) else outputs
    own_loss = language_model_loss(outputs, labels)
    assert torch.equal(own_logits, logits)
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=0)
    loss.backward()
    own_loss.backward()
    gradients = ours.gradients(reference)
    assert gradients.keys() == dict(reference.named_parameters()).keys()
    for parameter_name, parameter in reference.named_parameters():
        assert parameter.grad is not None and parameter.grad.any()
        torch.testing.assert_close(gradients[parameter_name], parameter.grad, rtol=1e-5, atol=1e-7)
    if not isinstance(outputs, tuple):
        assert all(torch.equal(gradients[n], p.grad) for n, p in reference.named_parameters())  # type: ignore[arg-type]


def test_the_router_loss_equals_the_librarys_and_is_absent_in_evaluation() -> None:
    reference, (tokens, _) = library_model("mixtral balanced"), batch()
    ours = built(reference)
    expected = reference.router_aux_loss_coef * reference(tokens).aux_loss
    logits, auxiliary = ours(tokens)
    assert auxiliary.shape == (1,) and auxiliary.item() > 0.5
    torch.testing.assert_close(auxiliary[0], expected, rtol=1e-6, atol=0)
    evaluated, nothing = ours.eval()(tokens)
    assert nothing.item() == 0 and torch.equal(evaluated, logits)


class Runs:
    """Counts how often transformers' ``forward`` is run for arguments of layers."""

    def __init__(self, layers: Whole) -> None:
        (self.stubbed,) = {layer.stubbed for layer in layers.layers if hasattr(layer, "stubbed")}
        self.count, self._run = 0, self.stubbed._run
        self.stubbed._run = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._run(*args, **kwargs)


def test_arguments_are_made_once_for_the_layers_of_a_stage() -> None:
    ours, (tokens, _) = built(library_model("qwen2 sliding")), batch()
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
    tokens, labels = batch()
    packed = [torch.cat([torch.arange(n), torch.arange(LENGTH - n)]).expand(BATCH, -1).clone() for n in (3, 5)]

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
    gradients = ours.gradients(reference)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
    packed[1].copy_(packed[0])
    assert torch.equal(run(packed[1]), expected[0])


def test_bf16_results_equal_the_librarys() -> None:
    """DeepSpeed converts layers to bf16 as torch does. Transformers keeps rotary frequencies in fp32, and so do we."""
    for name in ("llama", "mixtral balanced", "gpt2"):
        reference, (tokens, _) = library_model(name), batch()
        ours = built(reference).bfloat16()
        exact = dict(reference.named_buffers())
        reference.bfloat16()
        for buffer_name, buffer in exact.items():
            module, _, leaf = buffer_name.rpartition(".")
            setattr(reference.get_submodule(module), leaf, buffer)
        outputs = ours(tokens)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        assert logits.dtype == torch.bfloat16 and torch.equal(logits, reference(tokens).logits)


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_read_layer_by_layer(name: str, tmp_path: Path) -> None:
    reference = library_model(name)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    tokens, _ = batch()
    ours = built(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    outputs = ours(tokens)
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    assert torch.equal(logits, loaded(tokens).logits) and torch.equal(logits, reference(tokens).logits)


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


@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "mixtral"])
def test_a_spec_holds_and_pickles_only_its_own_tensors(name: str) -> None:
    reference = library_model(name)
    in_memory = {parameter.data_ptr() for parameter in reference.parameters()}
    for spec in huggingface.layers(reference):
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
    reference, (tokens, _) = library_model("gpt2"), batch()
    reference.config.save_pretrained(tmp_path)
    state = {name: value.contiguous() for name, value in reference.transformer.state_dict().items()}
    state |= {"h.0.attn.bias": torch.ones(4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(built(tmp_path)(tokens), reference(tokens).logits)


@pytest.mark.parametrize("name", MODELS)
def test_fresh_weights_have_the_librarys_distribution(name: str) -> None:
    """Each layer has its own generator: weights depend neither on which other layers are built nor on torch's state."""
    settings = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**settings)
    reference = transformers.AutoModelForCausalLM.from_config(config)
    state = torch.get_rng_state()
    ours = built(settings, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    weights = dict(zip(ours.gradients(reference), ours.parameters(), strict=True))
    for parameter_name, parameter in reference.named_parameters():
        found = weights[parameter_name]
        assert found.shape == parameter.shape
        if parameter.numel() > 500:
            assert found.std().item() == pytest.approx(parameter.std().item(), rel=0.15)
            assert abs(found.mean() - parameter.mean()) < 0.25 * parameter.std()
        elif parameter.std() == 0:
            assert torch.equal(found, parameter)
    alone = huggingface.layers(settings, seed=5)[2].build()
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), ours.layers[2].parameters(), strict=True))
    other = huggingface.layers(settings, seed=6)[2].build()
    assert not all(torch.equal(a, b) for a, b in zip(alone.parameters(), other.parameters(), strict=True))


def test_a_frozen_parameter_of_a_model_stays_frozen() -> None:
    reference = library_model("llama")
    reference.get_input_embeddings().requires_grad_(False)
    ours = built(reference)
    frozen = [name for name, parameter in ours.named_parameters() if not parameter.requires_grad]
    assert frozen == ["layers.0.part.weight"]


@pytest.mark.parametrize(
    ("name", "path", "setting", "value"),
    [
        ("llama", "model.embed_tokens", "padding_idx", 7),
        ("llama tied", "model.embed_tokens", "padding_idx", None),
        ("llama", "model.layers.1.self_attn", "attention_dropout", 0.5),
        ("gpt2", "transformer.drop", "p", 0.5),
        ("gpt2", "transformer.h.1.mlp.dropout", "p", 0.5),
    ],
)
def test_a_model_in_memory_keeps_settings_that_its_config_does_not_say(
    name: str, path: str, setting: str, value: Any
) -> None:
    reference = library_model(name)
    setattr(reference.get_submodule(path), setting, value)
    reference.gradient_checkpointing_enable()  # not a setting of layers: DeepSpeed recomputes
    ours = built(reference)
    reference.gradient_checkpointing_disable()
    tokens, labels = batch()
    tokens = tokens.index_fill(1, torch.tensor([4]), 7)
    torch.manual_seed(1)
    logits, loss = library_loss(reference, tokens, labels)
    torch.manual_seed(1)
    found = ours(tokens)
    assert torch.equal(found, logits)
    loss.backward(), language_model_loss(found, labels).backward()
    gradients = ours.gradients(reference)
    for parameter_name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[parameter_name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_the_models_config_is_not_changed() -> None:
    settings = dict(MODELS["llama"])
    config = transformers.AutoConfig.for_model(**settings)
    before = config.to_dict()
    huggingface.layers(config)
    assert config.to_dict() == before and config._attn_implementation_internal is None


def test_a_dict_is_not_changed() -> None:
    scaled = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 8, "rope_theta": 10000.0}
    for key, nested in (("rope_parameters", scaled), ("rope_scaling", {"type": "dynamic", "factor": 2.0})):
        settings = {**MODELS["llama"], key: nested}
        before = json.dumps(settings)
        huggingface.layers(settings)
        assert json.dumps(settings) == before


# -- export -------------------------------------------------------------------------------------------------


def checkpoint_of(whole: Whole, folder: Path) -> Path:
    """Write the layer files of a DeepSpeed checkpoint, and return its folder."""
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    for number, layer in enumerate(whole.layers):
        torch.save(layer.state_dict(), folder / "global_step3" / f"layer_{number:02d}-model_states.pt")
    return folder


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_checkpoint_loads_in_the_library(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference, (tokens, _) = library_model(name), batch()
    checkpoint = checkpoint_of(built(reference).to(dtype), tmp_path / "checkpoint")
    huggingface.export(reference.config, checkpoint, tmp_path / "out")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == dtype
    for parameter_name, parameter in reference.named_parameters():
        assert torch.equal(loaded.get_parameter(parameter_name), parameter.to(dtype))
    reference.save_pretrained(tmp_path / "library", max_shard_size="20KB")
    ours, theirs = (
        json.loads((tmp_path / folder / "model.safetensors.index.json").read_text()) for folder in ("out", "library")
    )
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert built(tmp_path / "out")(tokens) is not None  # our own reader accepts it, too


def test_exports_that_are_refused(tmp_path: Path) -> None:
    reference = library_model("llama")
    checkpoint = checkpoint_of(built(reference), tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="is there already"):
        huggingface.export(reference.config, checkpoint, tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        huggingface.export(reference.config, tmp_path / "nowhere", tmp_path / "out")
    wider = transformers.AutoConfig.for_model(**{**MODELS["llama"], "intermediate_size": 64})
    with pytest.raises(
        CheckpointError, match=r"layer_01.*down_proj\.weight has shape \[32, 48\], expected.*\[32, 64\]"
    ):
        huggingface.export(wider, checkpoint, tmp_path / "out")
    (checkpoint / "global_step3" / "layer_02-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"layer_02-model_states\.pt: there is no such file"):
        huggingface.export(reference.config, checkpoint, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# -- experts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_choices_of_the_last_training_batch_are_counted_once(reentrant: bool) -> None:
    layer = huggingface.layers(MODELS["mixtral"])[1].build()
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


def test_a_dense_layer_has_no_load_signal() -> None:
    assert not hasattr(huggingface.layers(MODELS["llama"])[1].build(), "load_signal")


def test_expert_parallelism_that_a_model_cannot_have_is_refused() -> None:
    def refused(block: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            model_layers(parse_section(ModelConfig, {"expert_parallel": True, **block}, "model"))

    refused({"huggingface": MODELS["llama"], "sequence_length": 64}, "model_type llama, has no experts to share out")
    refused({"case": {"kind": "moe"}}, '"case" of kind "moe" has one of its own')
    block = {"huggingface": MIXTRAL, "sequence_length": 64}
    refused(
        {**block, "case": {"kind": "freezing", "automatic": {}}},
        r"freezing: only schedule can be combined with expert_parallel",
    )
    specs = model_layers(parse_section(ModelConfig, {"expert_parallel": True, **block}, "model"))
    assert specs[1].build().experts.parallel and not huggingface.layers(MIXTRAL)[1].build().experts.parallel


# -- refusals -----------------------------------------------------------------------------------------------


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODELS["llama"], **changes}))
    return folder


def test_wrong_configs_are_named(tmp_path: Path) -> None:
    def refused(model: Any, message: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(model, **settings)

    refused(tmp_path / "nowhere", "nowhere: there is no such folder or file")
    refused(tmp_path, r"config\.json: cannot be read")
    refused(write_config(tmp_path, model_type="bert"), r'config\.json: model_type "bert": should be one of gpt2, llama')
    refused(write_config(tmp_path), r"has no file model\.safetensors; .*config\.json instead")
    refused(write_config(tmp_path, hidden_size="wide"), r"config\.json: is not a config of a llama model")
    refused(
        {**MODELS["llama"], "hiden_size": 8}, 'hiden_size = 8: a llama config has no .*; did you mean "hidden_size"'
    )
    refused({**MODELS["llama"], "hidden_act": "none"}, "cannot build the model")
    refused({**MODELS["llama"], "num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads 3: .* 4")
    refused({**MODELS["llama"], "num_hidden_layers": 0}, "num_hidden_layers 0: should be at least 1")
    for chosen in (0, 5):
        refused({**MIXTRAL, "num_experts_per_tok": chosen}, f"num_experts_per_tok {chosen}: should be in 1 to .*, 4")
    for coefficient in (-0.1, float("nan")):
        refused({**MIXTRAL, "router_aux_loss_coef": coefficient}, "router_aux_loss_coef .*: should be 0 or more")
    refused({"vocab_size": 300}, "model_type null")
    refused({**GPT2, "add_cross_attention": True}, "add_cross_attention")
    refused({**MODELS["llama"]}, "sequence_length 65: the model has 64 positions", sequence_length=65)
    refused({**MODELS["llama"]}, "vocab_size 300: should be at least 301", vocab_size=301)
    refused(3, "got int")
    refused(nn.Linear(2, 2), "got Linear")
    refused(transformers.T5Config(), "model_type t5: should be one of")


def test_a_model_is_taken_if_its_weights_are_floating_whatever_its_config_says() -> None:
    """Of a GGUF file the library makes ordinary weights, and a config that says that they are quantized."""
    model = library_model("llama")
    model.config.quantization_config = {"quant_method": "gguf"}
    tokens, _ = batch()
    assert torch.equal(built(model)(tokens), library_model("llama")(tokens).logits)
    assert model.config.quantization_config
    with pytest.raises(ConfigError, match=r"quantization_config: quantized weights .* whose weights are floating"):
        huggingface.layers(model.config)
    head = model.lm_head
    head.weight = nn.Parameter(head.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"quantization_config: quantized weights .* whose weights are floating"):
        huggingface.layers(model)


def test_a_model_whose_weights_are_not_its_configs_is_refused() -> None:
    model = library_model("llama")
    model.model.layers[1].extra = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"the model: has model\.layers\.1\.extra\.bias, .*knows nothing of"):
        huggingface.layers(model)
    model = library_model("llama")
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 47, bias=False)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight \[47, 32\] not \[48, 32\]"):
        huggingface.layers(model)


def test_a_model_that_is_not_built_as_its_config_says_is_refused() -> None:
    def refused(model: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(model)

    both = r"lm_head\.weight and model\.embed_tokens\.weight are"
    model = library_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    refused(model, rf"{both} one weight, by its config \(tie_word_embeddings false\) they are not")
    model = library_model("llama tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    refused(model, rf"{both} not one weight, by its config \(tie_word_embeddings true\) they are")
    model = library_model("llama")
    model.model.layers[2].mlp.act_fn = nn.ReLU()
    refused(model, r"model\.layers\.2\.mlp\.act_fn is a ReLU, by its config a SiLUActivation")
    refused(library_model("llama").model, "it is a LlamaModel, by its config a LlamaForCausalLM")


def test_a_tied_head_with_values_of_its_own_in_the_files_is_refused(tmp_path: Path) -> None:
    """Transformers does not tie it then."""
    reference = library_model("llama tied")
    reference.save_pretrained(tmp_path)
    embedding = reference.model.embed_tokens.weight.detach()
    tensors = {**safetensors_torch.load_file(tmp_path / "model.safetensors"), "lm_head.weight": embedding.clone()}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens, _ = batch()
    assert torch.equal(built(tmp_path)(tokens), reference(tokens).logits)
    tensors["lm_head.weight"][-1, 0] += 1
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight and lm_head\.weight differ, and its config ties them"):
        huggingface.layers(tmp_path)


def test_one_file_is_read_rather_than_an_index_as_by_the_library(tmp_path: Path) -> None:
    library_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    other = library_model("llama", seed=4)
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    tokens, _ = batch()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, other(tokens).logits)
    assert torch.equal(built(tmp_path)(tokens), other(tokens).logits)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(tmp_path)

    library_model("llama").save_pretrained(tmp_path)
    write_config(tmp_path, num_hidden_layers=4)
    refused(r"lacks model\.layers\.3\.self_attn\.q_proj\.weight, .* and 5 more, which its config asks for")
    write_config(tmp_path, num_hidden_layers=2)
    refused(r"has .*model\.layers\.2\..* and 5 more, which its config knows nothing of")
    write_config(tmp_path, vocab_size=299)
    refused(r"embed_tokens\.weight \[300, 32\] not \[299, 32\] and 1 more")
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not at all")
    refused(r"model\.safetensors: cannot be read")
    (tmp_path / "model.safetensors").unlink()
    library_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    next(iter(tmp_path.glob("model-00002-*"))).unlink()
    refused(r"has no file model-00002-of-\d+\.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").touch()
    refused(r"has no file model\.safetensors; files of pickle are not read")
    (tmp_path / "adapter_config.json").touch()
    refused(r"has adapter_config\.json: transformers would load the adapter too")


# -- the "model" section --------------------------------------------------------------------------------------


def test_the_model_section_accepts_a_config(tmp_path: Path) -> None:
    config = parse_section(ModelConfig, {"huggingface": MODELS["qwen3"], "sequence_length": 64, "seed": 3}, "model")
    specs = model_layers(config)
    assert [spec.typename.__name__ for spec in specs] == [
        *["InputEmbedding", "DecoderLayer", "DecoderLayer", "DecoderLayer", "DecoderNorm", "LMHead"]
    ]
    path = write_config(tmp_path) / "config.json"
    config = parse_section(ModelConfig, {"huggingface": str(path), "sequence_length": 64}, "model")
    assert len(model_layers(config)) == 6
    for changes, message in (
        ({"sequence_length": 65}, "model.huggingface: sequence_length 65"),
        ({"huggingface": {**MODELS["qwen3"], "vocab_size": 200}}, "model.huggingface: vocab_size 200: .* 256"),
        ({"huggingface": "nowhere"}, "model.huggingface: nowhere: there is no such"),
    ):
        block = {"huggingface": MODELS["qwen3"], "sequence_length": 64, **changes}
        with pytest.raises(ConfigError, match=message):
            model_layers(parse_section(ModelConfig, block, "model"))


def test_bytes_need_a_vocabulary_of_256_and_the_tokens_of_a_folder_do_not(tmp_path: Path) -> None:
    settings = {**MODELS["llama"], "vocab_size": 40}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    block = {"huggingface": str(tmp_path), "sequence_length": 64}
    assert len(model_layers(parse_section(ModelConfig, block, "model"))) == 6
    assert vocabulary_of(parse_section(ModelConfig, block, "model")) == 40
    for changes in ({"tokens": "bytes"}, {"huggingface": str(tmp_path / "config.json")}):
        with pytest.raises(ConfigError, match=r"model\.huggingface: vocab_size 40: should be at least 256"):
            model_layers(parse_section(ModelConfig, {**block, **changes}, "model"))


def test_freezing_that_a_model_cannot_do_is_refused() -> None:
    def refused(model: dict[str, Any], freezing: dict[str, Any], message: str) -> None:
        block = parse_section(
            ModelConfig,
            {"huggingface": model, "sequence_length": 64, "case": {"kind": "freezing", **freezing}},
            "model",
        )
        with pytest.raises(ConfigError, match=message):
            model_layers(block)

    schedule = {"schedule": [[0.5, 3]]}
    untied = {**MODELS["gpt2 untied"], "resid_pdrop": 0.1}
    refused(MODELS["llama tied"], schedule, r"model\.case: would freeze the head .*: needs model\.untie = true")
    refused(GPT2, {"automatic": {}}, r"needs model\.untie = true")
    refused(untied, {"schedule": [[0.5, 4]]}, r"schedule freezes 4 blocks, model\.huggingface has 3")
    refused(untied, {"egeria": {}}, r"model\.huggingface: resid_pdrop 0\.1: should be 0: egeria")
    neox = {"model_type": "gpt_neox", "hidden_dropout": 0.1, "vocab_size": 300}
    refused(neox, {"egeria": {}}, r"model\.huggingface: hidden_dropout 0\.1: should be 0: egeria")
    block = parse_section(
        ModelConfig, {"huggingface": untied, "sequence_length": 64, "case": {"kind": "freezing", **schedule}}, "model"
    )
    assert block_numbers(model_layers(block)) == range(2, 5)


def test_a_reference_finds_its_arguments_by_itself() -> None:
    """It runs on another thread, in bf16 weights on the CPU. Rotary frequencies are fp32 all the same."""
    block = huggingface.layers(MODELS["qwen2"])[1].build()
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
