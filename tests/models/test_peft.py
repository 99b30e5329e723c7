"""LoRA adapters in pipeline layers, compared with peft's own model; and what is refused."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynmo.cli.training.options import check_without_block
from ds_dynmo.config import parse_section
from ds_dynmo.engine.run.split_modules import forwards
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import ModelConfig, huggingface, language_model_loss, model_layers
from ds_dynmo.models.exporting import weights_file
from ds_dynmo.models.huggingface import adapter, lora_targets
from ds_dynmo.models.huggingface.lora import plain_name
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model
from tests.support.huggingface_families import (
    GPT2,
    SIZES,
    batch,
    compare_gradients,
    compare_with_pefts,
    library_loss,
    logits_of,
    often,
    tiny_values,
)

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LLAMA = {"model_type": "llama", **SIZES}
TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
ALL = {"target_modules": "all-linear", "r": 4, "lora_alpha": 16}
ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {**ALL, "lora_dropout": 0.3}),
    "llama tied": (TIED, {**ALL, "use_dora": True}),
    "llama copies": (LLAMA, {**ALL, "modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "llama ends": (LLAMA, {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True}),
    "mistral": ({"model_type": "mistral", **SIZES, "sliding_window": 5}, {**ALL, "layers_to_transform": None}),
    "qwen2": (
        {"model_type": "qwen2", **SIZES},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1, 2], "bias": "lora_only"},
    ),
    "gpt2": (GPT2, {"target_modules": ["c_attn", "c_fc"], "bias": "all"}),
    "mixtral": (
        {**MIXTRAL, "output_router_logits": True},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}},
    ),
}


def library_model(values: dict[str, Any]) -> Any:
    return random_model(values, "sdpa")


def with_adapters(values: dict[str, Any], lora: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(library_model(values), peft.LoraConfig(**lora))
    with torch.no_grad():  # fresh adapters change nothing
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", often([*ADAPTED], ("llama tied", "llama ends", "gpt2", "mixtral")))
def test_logits_loss_and_gradients_are_pefts(name: str) -> None:
    model = with_adapters(*ADAPTED[name])
    layers = BuiltLayers(huggingface.layers(model)).train()
    tokens, labels = batch(300)
    torch.manual_seed(7)
    expected = model(input_ids=tokens)
    loss = library_loss(model, expected, labels)
    torch.manual_seed(7)
    found = layers(tokens)
    own_loss = language_model_loss(found, labels)
    assert torch.equal(logits_of(found), expected.logits)
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=0)
    loss.backward(), own_loss.backward()
    compare_gradients(layers, model.get_base_model())
    assert any("lora_" in name for name in layers.named_weights(model.get_base_model()))


# -- without target_modules -------------------------------------------------------------------------------

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DENSE = ["gate_proj", "up_proj", "down_proj"]
# By family that peft has no default for, its linear layers but those of routers, of experts, and those that peft takes
# for experts.
CHOSEN = {
    "olmo": [*ATTENTION, *DENSE],
    "deepseek_v3": LATENT,
    "gpt_oss": ATTENTION,
    "phi3": ["o_proj", "qkv_proj", "gate_up_proj", "down_proj"],
    "axk2": ["q_a_proj", "q_gate_proj", *LATENT[2:], *(f"mlp.{name}" for name in DENSE)],  # experts have these too
    "glm4": [*ATTENTION, "gate_up_proj", "down_proj"],
    "granite": [*ATTENTION, *DENSE],
    "qwen2_moe": ATTENTION,
    "olmo_hybrid": [*DENSE, *ATTENTION[:3], "a_proj", "b_proj", "g_proj", "o_proj"],
    "starcoder2": [*ATTENTION, "c_fc", "c_proj"],
}


@pytest.mark.parametrize("kind", often([*CHOSEN], ("olmo", "deepseek_v3")))
def test_without_targets_all_linear_layers_but_of_routers_and_experts_train_as_pefts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(adapter.logger, "warning", said.append)
    base = random_model({**tiny_values(kind), "output_router_logits": False}, "eager")
    specs = huggingface.layers(base, attn_implementation="eager", verified=False, peft={"r": 2})
    assert said == [
        f"peft has no default target_modules for model_type {base.config.model_type}: LoRA adapters are on "
        + ", ".join(CHOSEN[kind])
    ]
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=CHOSEN[kind], r=2, task_type="CAUSAL_LM"))
    layers = BuiltLayers(specs)
    own, reference = layers.named_weights(base), dict(base.named_parameters())
    assert own.keys() == reference.keys()
    with torch.no_grad():
        for name, parameter in reference.items():
            if "lora_" in name:  # fresh ones are drawn in other ways, and change nothing
                own[name].copy_(nn.init.normal_(parameter, std=0.2))
    compare_with_pefts(model, layers)
    for parameters in (own, reference):
        torch.optim.AdamW([one for one in parameters.values() if one.requires_grad], lr=0.01).step()
    for name, parameter in reference.items():
        torch.testing.assert_close(own[name], parameter, rtol=1e-4, atol=1e-5)
        own[name].grad = parameter.grad = None
    compare_with_pefts(model, layers)


def test_without_targets_pefts_default_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.logger, "warning", pytest.fail)
    for values, names in ((LLAMA, {"q_proj", "v_proj"}), (GPT2, {"c_attn"}), (MIXTRAL, {"q_proj", "v_proj"})):
        layers = BuiltLayers(huggingface.layers(values, peft={}, verified=False))
        found = layers.named_weights(library_model(values))
        assert {name.partition(".lora_")[0].rpartition(".")[2] for name in found if "lora_" in name} == names


# -- what is made -----------------------------------------------------------------------------------------


def weights(specs: list[Any]) -> dict[str, nn.Parameter]:
    return BuiltLayers(specs).named_weights(library_model(LLAMA))


def test_a_config_freezes_the_base_and_draws_the_same_adapters_in_any_layer() -> None:
    base = weights(huggingface.layers(LLAMA))
    for lora in ({}, {"init_lora_weights": "gaussian", "bias": "all"}, {"use_dora": True, "modules_to_save": ["norm"]}):
        config = {"huggingface": LLAMA, "sequence_length": 32, "verified": False, "peft": {**ALL, **lora}}
        specs = model_layers(parse_section(ModelConfig, config, "model"))
        found = weights(specs)
        alone = {name: p for name, p in BuiltLayers(specs[2:3]).layers[0].part.named_parameters()}
        assert any("lora_A" in name for name in alone)
        for name, parameter in alone.items():
            assert torch.equal(parameter, found[f"model.layers.1.{name}"])
        adapters = peft.get_peft_model(library_model(LLAMA), peft.LoraConfig(**{**ALL, **lora}))
        for name, parameter in adapters.get_base_model().named_parameters():
            assert found[name].requires_grad == parameter.requires_grad and found[name].shape == parameter.shape
            if plain_name(name) is not None:
                assert torch.equal(found[name], base[str(plain_name(name))])
            elif "lora_B" in name:
                assert not found[name].any()
            elif "lora_A" in name:
                assert 0.5 < found[name].std() / parameter.std() < 2
        assert not torch.equal(*(found[f"model.layers.{n}.mlp.up_proj.lora_A.default.weight"] for n in (0, 1)))


def test_the_active_adapter_of_several_is_taken() -> None:
    model = with_adapters(LLAMA, ALL)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["k_proj"]))
    model.set_adapter("other")
    specs = huggingface.layers(model)
    assert {name.split(".")[-2] for name in weights(specs) if "lora_" in name} == {"other"}
    tokens, _ = batch(300)
    assert torch.equal(BuiltLayers(specs)(tokens), model(input_ids=tokens).logits)


def test_a_base_in_bf16_with_adapters_in_fp32_becomes_fp32() -> None:
    model = peft.get_peft_model(library_model(LLAMA).bfloat16(), peft.LoraConfig(**ALL))
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    found = weights(huggingface.layers(model))
    for name, parameter in model.get_base_model().named_parameters():
        assert torch.equal(found[name], parameter.float())


def test_the_base_of_split_backward_passes_has_no_weight_gradients() -> None:
    """In a backward pass in two parts, adapters alone have a second one."""
    layer = BuiltLayers(huggingface.layers(LLAMA, peft=ALL)).layers[1]
    names = {id(module): name for name, module in layer.named_modules()}
    found = {names[id(module)].rpartition(".")[0].rpartition(".")[2] for module, _ in forwards([*layer.modules()])}
    assert found == {"lora_A", "lora_B"}


# -- what is refused --------------------------------------------------------------------------------------

NAMES = "embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"


def refused(said: str, model: Any, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        huggingface.layers(model, **settings)


def test_adapters_that_a_pipeline_cannot_have_are_refused() -> None:
    no_nope, indices = "peft.target_modules: the model has no module nope; it has", "trainable_token_indices"
    for lora, said in (
        ({"lora_apha": 3}, 'peft.lora_apha = 3: a LoraConfig has no such key; did you mean "lora_alpha"?'),
        ({"rank": 8}, 'peft.rank = 8: a LoraConfig has no such key; did you mean "r"?'),
        ({"zzz": 8}, "peft.zzz = 8: a LoraConfig has no such key; should be one of .*lora_dropout"),
        ({"r": 0}, "peft.r = 0: should be an integer above 0"),
        ({"r": "8"}, "peft.r = '8': should be an integer above 0"),
        ({"lora_dropout": 1.5}, "peft.lora_dropout = 1.5: should be a number from 0 to below 1"),
        ({"bias": "some"}, "peft.bias = 'some': should be"),
        ({"init_lora_weights": "pissa"}, "peft.init_lora_weights = 'pissa': should be true"),
        ({indices: [1]}, rf"peft.{indices} = \[1\]: does not work layer by layer"),
        ({"inference_mode": True}, "inference_mode = true: no adapter would train"),
        ({"target_modules": ["nope"]}, f"{no_nope} {NAMES}$"),
        ({"target_modules": ["q_proj", "nope"]}, no_nope),
        ({"target_modules": ".*nope"}, rf"the model has no module \.\*nope; it has {NAMES}$"),
        ({"target_modules": "(q_proj"}, "peft: missing \\), unterminated"),
        ({"modules_to_save": ["nope"]}, "peft.modules_to_save: the model has no module nope; it has .*norm,"),
        ({"peft_type": "IA3"}, "peft_type IA3: works in no pipeline, LORA alone does"),
    ):
        refused(said, LLAMA, peft=lora)
    for values, lora, said in (
        (GPT2, {"target_modules": ["nope"]}, "it has wte, wpe, c_attn, c_proj, c_fc, lm_head$"),
        (TIED, {"modules_to_save": ["lm_head"]}, "lm_head is a target.*weight with model.embed_tokens.*untie = true"),
        (TIED, {"target_modules": ["embed_tokens"]}, "embed_tokens is a target.*one weight with lm_head"),
        (MIXTRAL, ALL, "peft.target_parameters = .*experts"),
        (MIXTRAL, {"target_parameters": ["gate_up_proj"]}, "peft.target_parameters = .*experts"),
    ):
        refused(said, values, peft=lora)
    refused("the model is a PeftModel, which says", with_adapters(LLAMA, ALL), peft=ALL)
    ia3 = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    refused("peft_type IA3", peft.get_peft_model(library_model(LLAMA), ia3))
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    refused("peft_type PROMPT_TUNING", peft.get_peft_model(library_model(LLAMA), prompt))


def test_a_family_without_any_layer_that_suits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_targets, "LEFT_OUT", re.compile(""))
    said = f"peft has no default for model_type olmo, .*; the model has {NAMES}$"
    refused(said, {"model_type": "olmo", **SIZES}, peft={})


def merged_in(model: Any) -> Any:
    model.merge_adapter()
    return model


def disabled(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


def quantized(model: Any) -> Any:
    linear = model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    return model


def quantized_by_config(model: Any) -> Any:
    model.get_base_model().config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return quantized(model)


def scaled(model: Any) -> Any:
    model.get_base_model().model.layers[1].mlp.up_proj.set_scale("default", 2.0)
    return model


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_models_with_adapters_that_cannot_train_are_refused() -> None:
    for change, said in (
        (scaled, r"layers\.1\.mlp\.up_proj: its adapter's scaling is 8\.0, by the adapter's config 4\.0"),
        (without_dropout, r"layers\.0\..*: its adapter's dropout is 0\.0, by the adapter's config 0\.1"),
        (lambda model: model.merge_and_unload(), "none of its parameters has requires_grad: nothing would train"),
        (quantized_by_config, "quantization_config: quantized weights cannot be trained"),
        (merged_in, "q_proj: its adapter is merged into its base"),
        (disabled, "q_proj: its adapter is disabled"),
        (lambda model: model.requires_grad_(False), "nothing of its adapter trains"),
        (quantized, r"up_proj.base_layer.weight should be a floating-point tensor .* has torch.int8 .*quantized"),
        (lambda model: model.get_base_model(), "LlamaForCausalLM: has adapters and is no PeftModel"),
    ):
        lora = peft.LoraConfig(**ALL, lora_dropout=0.1)
        refused(said, change(peft.get_peft_model(library_model(LLAMA), lora)))


def test_sections_that_do_not_fit_are_refused() -> None:
    freezing = {"kind": "freezing", "schedule": [[0.5, 1]]}
    for block, said in (
        ({"peft": ALL}, "peft: is for a Hugging Face model"),
        ({"huggingface": LLAMA, "peft": ALL, "case": freezing}, "freezing: cannot be combined with peft"),
        ({"huggingface": LLAMA, "save_base": False}, "save_base = false: without peft"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_section(ModelConfig, block, "model")
    model = parse_section(ModelConfig, {"huggingface": LLAMA, "peft": ALL}, "model")
    with pytest.raises(ConfigError, match=r'model\.peft: needs a "dynmo" section'):  # stock DeepSpeed trains none
        check_without_block(Namespace(record=None, keep=None, newest_whole=False), model)


# -- export -----------------------------------------------------------------------------------------------


def checkpoint_of(layers: BuiltLayers, folder: Path, *, without_base: bool = False) -> None:
    """Write the files of layers as DeepSpeed does."""
    folder.mkdir()
    for number, layer in enumerate(layers.layers):
        trains = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
        state = {name: value for name, value in layer.state_dict().items() if not without_base or name in trains}
        torch.save(state, folder / weights_file(number))


# By the adapters of :data:`ADAPTED`, settings of the layers.
EXPORTED: dict[str, dict[str, Any]] = {
    "llama tied": {},
    "llama copies": {"vocabulary_slices": 3},  # and a head that trains
    "gpt2": {"split_blocks": True},
    "llama": {},
    "qwen2": {},
}


@pytest.mark.parametrize("name", often([*EXPORTED], ("llama tied", "llama copies", "gpt2")))
def test_an_export_is_read_by_peft(name: str, tmp_path: Path) -> None:
    """And merged, by transformers."""
    settings = EXPORTED[name]
    model, (tokens, labels) = with_adapters(*ADAPTED[name]), batch(300)
    folder, checkpoint, out, merged = (tmp_path / part for part in ("base", "checkpoint", "out", "merged"))
    base = library_model(ADAPTED[name][0])
    base.load_state_dict({str(plain_name(n)): v for n, v in model.get_base_model().state_dict().items()
                          if plain_name(n) is not None and "modules_to_save" not in n})  # fmt: skip
    base.save_pretrained(folder)
    layers = BuiltLayers(huggingface.layers(model, verified=False, **settings)).eval()
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens).logits
        if "vocabulary_slices" in settings:
            loss = language_model_loss(layers((tokens, labels)), labels)
            torch.testing.assert_close(loss, nn.functional.cross_entropy(expected.mT, labels), rtol=1e-6, atol=0.0)
        else:
            assert torch.equal(layers(tokens), expected)
    checkpoint_of(layers, checkpoint, without_base=True)
    huggingface.export(model, checkpoint, out, **settings)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    read = peft.PeftModel.from_pretrained(base, out).eval()
    assert torch.equal(read(input_ids=tokens).logits, expected)
    lora = model.peft_config["default"]
    huggingface.export(folder, checkpoint, merged, peft=lora, merge=True, **settings)
    again = transformers.AutoModelForCausalLM.from_pretrained(merged, attn_implementation="sdpa").eval()
    torch.testing.assert_close(again(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert not any("lora" in key for key in again.state_dict())


@pytest.mark.parametrize(
    "lora",
    often(
        [{"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, {"modules_to_save": ["embed_tokens", "lm_head"]}],
        [{"target_modules": ["q_proj", "embed_tokens", "lm_head"]}],
    ),
)
def test_adapters_are_at_the_ends_of_a_tied_model(lora: dict[str, Any], tmp_path: Path) -> None:
    """Alone they fit the tied base in peft; merged with it they are an untied model."""
    tokens, _ = batch()
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    library_model(tiny_values("llama", tie_word_embeddings=True)).save_pretrained(base)
    settings = {"target_modules": ["q_proj"], "r": 2, "task_type": "CAUSAL_LM", **lora}
    layers = BuiltLayers(huggingface.layers(base, untie=True, peft=settings, verified=False)).train()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0.0)
    assert any(parameter.requires_grad for parameter in layers.layers[-1].parameters())
    checkpoint_of(layers, checkpoint, without_base=True)
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


def test_a_merged_export_has_the_dtype_of_the_training(tmp_path: Path) -> None:
    library_model(LLAMA).save_pretrained(tmp_path / "base")
    layers = BuiltLayers(huggingface.layers(with_adapters(LLAMA, ALL), verified=False)).bfloat16()
    checkpoint_of(layers, tmp_path / "checkpoint", without_base=True)
    huggingface.export(tmp_path / "base", tmp_path / "checkpoint", tmp_path / "merged", peft=ALL, merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}


def test_exports_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    def cannot_export(error: type[Exception], said: str, given: Any, checkpoint: str, **settings: Any) -> None:
        with pytest.raises(error, match=said):
            huggingface.export(given, tmp_path / checkpoint, tmp_path / "out", **settings)

    model = with_adapters(LLAMA, ALL)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    checkpoint_of(BuiltLayers(huggingface.layers(model)), tmp_path / "saved", without_base=True)
    cannot_export(ConfigError, r"model\.norm\.weight: trains, and is no part of an adapter", model, "saved")
    fresh = "a model with fresh weights has no other"
    cannot_export(CheckpointError, fresh, LLAMA, "saved", peft=ALL, merge=True)
    other_rank = r"lora_A.default.weight has shape \[4, 32\], expected shape \[2, 32\]"
    cannot_export(CheckpointError, other_rank, LLAMA, "saved", peft={**ALL, "r": 2})
    cannot_export(ConfigError, "merge: the model has no adapters", LLAMA, "saved", merge=True)
    biased = {**ALL, "lora_bias": True}
    checkpoint_of(BuiltLayers(huggingface.layers(LLAMA, peft=biased)), tmp_path / "biased")
    said = r"model\.layers\.0: peft cannot merge its adapters: .*lora_bias"
    cannot_export(ConfigError, said, LLAMA, "biased", peft=biased, merge=True)
