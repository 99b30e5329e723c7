"""LoRA adapters in pipeline layers, compared with peft's own model; and what is refused."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.cli.training.options import check_without_block
from ds_dynmo.config import parse_section
from ds_dynmo.engine.run.split_modules import forwards
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import ModelConfig, huggingface, language_model_loss, model_layers
from ds_dynmo.models.exporting import weights_file
from ds_dynmo.models.huggingface import adapter, lora_targets
from ds_dynmo.models.huggingface.configs import experts_key, families
from ds_dynmo.models.huggingface.lora import plain_name
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model, trial_batches
from tests.support.huggingface_families import tiny_values

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES: dict[str, Any] = {
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
LLAMA = {"model_type": "llama", **SIZES}
GPT2 = {
    "model_type": "gpt2",
    **{"vocab_size": 300, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
}
ALL = {"target_modules": "all-linear", "r": 4, "lora_alpha": 16}
ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {**ALL, "lora_dropout": 0.3}),
    "llama tied": ({**LLAMA, "tie_word_embeddings": True}, {**ALL, "use_dora": True}),
    "llama copies": (LLAMA, {**ALL, "modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "llama ends": (LLAMA, {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True}),
    "mistral": ({"model_type": "mistral", **SIZES, "sliding_window": 5}, {**ALL, "layers_to_transform": None}),
    "qwen2": (
        {"model_type": "qwen2", **SIZES},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1, 2], "bias": "lora_only"},
    ),
    "gpt2": (GPT2, {"target_modules": ["c_attn", "c_fc"], "bias": "all"}),
    "mixtral": (
        {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "output_router_logits": True},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}},
    ),
}


def library_model(values: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    values = dict(values)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def with_adapters(values: dict[str, Any], lora: dict[str, Any]) -> Any:
    model = peft.get_peft_model(library_model(values), peft.LoraConfig(**lora))
    with torch.no_grad():  # fresh adapters change nothing
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("name", ADAPTED)
def test_logits_loss_and_gradients_are_pefts(name: str) -> None:
    model = with_adapters(*ADAPTED[name])
    layers = BuiltLayers(huggingface.layers(model)).train()
    tokens, labels = batch()
    torch.manual_seed(7)
    expected = model(input_ids=tokens)
    loss = F.cross_entropy(expected.logits.flatten(0, 1), labels.flatten())
    if getattr(expected, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * expected.aux_loss
    torch.manual_seed(7)
    found = layers(tokens)
    own_loss = language_model_loss(found, labels)
    assert torch.equal(found[0] if isinstance(found, tuple) else found, expected.logits)
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=0)
    loss.backward(), own_loss.backward()
    own = layers.named_weights(library_model(ADAPTED[name][0]))
    reference = dict(model.get_base_model().named_parameters())
    assert own.keys() == reference.keys() and any("lora_" in key for key in own)
    for key, parameter in reference.items():
        assert own[key].requires_grad == parameter.requires_grad, key
        assert (own[key].grad is None) == (parameter.grad is None), key
        if parameter.grad is not None:
            torch.testing.assert_close(own[key].grad, parameter.grad, rtol=1e-5, atol=1e-7)


# Names of linear layers by which peft takes weights of experts too, and heads.
EXPERTS_TOO = ("lm_head", "gate", "gate_proj", "up_proj", "down_proj")


def tiny_model(kind: str) -> Any:
    model = random_model(tiny_values(kind), "eager")
    model.config.output_router_logits = False
    return model


def compare_family(kind: str) -> None:
    """Compare a tiny model of a family, with adapters on all linear layers outside of experts, with peft's."""
    model = tiny_model(kind)
    linear = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, transformers.pytorch_utils.Conv1D))]
    left_out = EXPERTS_TOO if experts_key(model.config) else ("lm_head", "embed_out")
    names = {name.rpartition(".")[2] for name in linear}.difference(left_out)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=sorted(names), r=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    compare_with_pefts(model, BuiltLayers(huggingface.layers(model, attn_implementation="eager", verified=False)))


def compare_with_pefts(model: Any, layers: BuiltLayers) -> None:
    """Compare logits and gradients with those of peft's model."""
    tokens, _ = next(iter(trial_batches(model.config.vocab_size, ())))
    layers.train()
    torch.manual_seed(1)
    expected = model(input_ids=tokens, use_cache=False).logits
    torch.manual_seed(1)
    found = layers(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    expected.square().mean().backward(), found.square().mean().backward()
    own = layers.named_weights(model.get_base_model())
    for name, parameter in model.get_base_model().named_parameters():
        assert (own[name].grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.nightly
def test_at_least_60_families_take_adapters() -> None:
    working = []
    for kind in families():
        try:
            huggingface.layers(tiny_model(kind), attn_implementation="eager")
        except Exception:  # a family that does not work; transformers raises many kinds
            continue
        compare_family(kind)
        working.append(kind)
    assert len(working) >= 60


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


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("olmo", "deepseek_v3") else pytest.param(kind, marks=pytest.mark.nightly) for kind in CHOSEN],
)
def test_without_targets_all_linear_layers_but_of_routers_and_experts_train_as_pefts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(adapter.logger, "warning", said.append)
    base = tiny_model(kind)
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


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_without_targets_pefts_default_stays(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.logger, "warning", pytest.fail)
    values = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}[kind]
    found = BuiltLayers(huggingface.layers(values, peft={})).named_weights(library_model(values))
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in found if "lora_" in name}
    assert adapted == ({"c_attn"} if kind == "gpt2" else {"q_proj", "v_proj"})


def test_a_family_without_any_layer_that_suits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_targets, "LEFT_OUT", re.compile(""))
    with pytest.raises(ConfigError, match=f"peft has no default for model_type olmo, .*; the model has {NAMES}$"):
        huggingface.layers({"model_type": "olmo", **SIZES}, peft={})


def weights(specs: list[Any]) -> dict[str, nn.Parameter]:
    return BuiltLayers(specs).named_weights(library_model(LLAMA))


@pytest.mark.parametrize(
    "lora", [{}, {"init_lora_weights": "gaussian", "bias": "all"}, {"use_dora": True, "modules_to_save": ["norm"]}]
)
def test_a_config_freezes_the_base_and_draws_the_same_adapters_in_any_layer(lora: dict[str, Any]) -> None:
    config = {"huggingface": LLAMA, "sequence_length": 32, "peft": {**ALL, **lora}}
    specs = model_layers(parse_section(ModelConfig, config, "model"))
    found = weights(specs)
    alone = {name: p for name, p in BuiltLayers(specs[2:3]).layers[0].part.named_parameters()}
    assert any("lora_A" in name for name in alone)
    for name, parameter in alone.items():
        assert torch.equal(parameter, found[f"model.layers.1.{name}"])
    base = weights(huggingface.layers(LLAMA))
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
    assert torch.equal(BuiltLayers(specs)(batch()[0]), model(input_ids=batch()[0]).logits)


def test_a_base_in_bf16_with_adapters_in_fp32_becomes_fp32() -> None:
    model = peft.get_peft_model(library_model(LLAMA).bfloat16(), peft.LoraConfig(**ALL))
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    found = weights(huggingface.layers(model))
    for name, parameter in model.get_base_model().named_parameters():
        assert torch.equal(found[name], parameter.float())


# -- what is refused --------------------------------------------------------------------------------------

TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
NAMES = "embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"


@pytest.mark.parametrize(
    ("values", "lora", "said"),
    [
        (LLAMA, {"lora_apha": 3}, 'peft.lora_apha = 3: a LoraConfig has no such key; did you mean "lora_alpha"?'),
        (LLAMA, {"rank": 8}, 'peft.rank = 8: a LoraConfig has no such key; did you mean "r"?'),
        (LLAMA, {"zzz": 8}, "peft.zzz = 8: a LoraConfig has no such key; should be one of .*lora_dropout"),
        (LLAMA, {"r": 0}, "peft.r = 0: should be an integer above 0"),
        (LLAMA, {"r": "8"}, "peft.r = '8': should be an integer above 0"),
        (LLAMA, {"lora_dropout": 1.5}, "peft.lora_dropout = 1.5: should be a number from 0 to below 1"),
        (LLAMA, {"bias": "some"}, "peft.bias = 'some': should be"),
        (LLAMA, {"init_lora_weights": "pissa"}, "peft.init_lora_weights = 'pissa': should be true"),
        (
            LLAMA,
            {"trainable_token_indices": [1]},
            r"peft.trainable_token_indices = \[1\]: does not work layer by layer",
        ),
        (LLAMA, {"inference_mode": True}, "inference_mode = true: no adapter would train"),
        (LLAMA, {"target_modules": ["nope"]}, f"peft.target_modules: the model has no module nope; it has {NAMES}$"),
        (LLAMA, {"target_modules": ["q_proj", "nope"]}, "peft.target_modules: the model has no module nope; it has"),
        (LLAMA, {"target_modules": ".*nope"}, rf"the model has no module \.\*nope; it has {NAMES}$"),
        (GPT2, {"target_modules": ["nope"]}, "it has wte, wpe, c_attn, c_proj, c_fc, lm_head$"),
        (LLAMA, {"target_modules": "(q_proj"}, "peft: missing \\), unterminated"),
        (LLAMA, {"modules_to_save": ["nope"]}, "peft.modules_to_save: the model has no module nope; it has .*norm,"),
        (LLAMA, {"peft_type": "IA3"}, "peft_type IA3: works in no pipeline, LORA alone does"),
        (
            TIED,
            {"modules_to_save": ["lm_head"]},
            "lm_head is a target.*one weight with model.embed_tokens.*untie = true",
        ),
        (TIED, {"target_modules": ["embed_tokens"]}, "embed_tokens is a target.*one weight with lm_head"),
        (MIXTRAL, ALL, "peft.target_parameters = .*experts"),
        (MIXTRAL, {"target_parameters": ["gate_up_proj"]}, "peft.target_parameters = .*experts"),
    ],
)
def test_adapters_that_a_pipeline_cannot_have_are_refused(
    values: dict[str, Any], lora: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        huggingface.layers(values, peft=lora)


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scaled, r"layers\.1\.mlp\.up_proj: its adapter's scaling is 8\.0, by the adapter's config 4\.0"),
        (without_dropout, r"layers\.0\..*: its adapter's dropout is 0\.0, by the adapter's config 0\.1"),
        (lambda model: model.merge_and_unload(), "none of its parameters has requires_grad: nothing would train"),
        (quantized_by_config, "quantization_config: quantized weights cannot be trained"),
        (merged_in, "q_proj: its adapter is merged into its base"),
        (disabled, "q_proj: its adapter is disabled"),
        (lambda model: model.requires_grad_(False), "nothing of its adapter trains"),
        (quantized, r"up_proj.base_layer.weight should be a floating-point tensor .* has torch.int8 .*quantized"),
        (lambda model: model.get_base_model(), "LlamaForCausalLM: has adapters and is no PeftModel"),
    ],
)
def test_models_with_adapters_that_cannot_train_are_refused(change: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        lora = peft.LoraConfig(**ALL, lora_dropout=0.1)
        huggingface.layers(change(peft.get_peft_model(library_model(LLAMA), lora)))


def test_other_tuners_are_refused_by_name() -> None:
    ia3 = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(ConfigError, match="peft_type IA3"):
        huggingface.layers(peft.get_peft_model(library_model(LLAMA), ia3))
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="peft_type PROMPT_TUNING"):
        huggingface.layers(peft.get_peft_model(library_model(LLAMA), prompt))


def test_adapters_are_given_once() -> None:
    with pytest.raises(ConfigError, match="the model is a PeftModel, which says"):
        huggingface.layers(with_adapters(LLAMA, ALL), peft=ALL)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"peft": ALL}, "peft: is for a Hugging Face model"),
        (
            {"huggingface": LLAMA, "peft": ALL, "case": {"kind": "freezing", "schedule": [[0.5, 1]]}},
            "freezing: cannot be combined with peft",
        ),
        ({"huggingface": LLAMA, "save_base": False}, "save_base = false: without peft"),
    ],
)
def test_sections_that_do_not_fit_are_refused(block: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_section(ModelConfig, block, "model")


def test_stock_deepspeed_trains_no_adapters() -> None:
    model = parse_section(ModelConfig, {"huggingface": LLAMA, "peft": ALL}, "model")
    with pytest.raises(ConfigError, match=r'model\.peft: needs a "dynmo" section'):
        check_without_block(Namespace(record=None, keep=None, newest_whole=False), model)


def test_the_base_of_split_backward_passes_has_no_weight_gradients() -> None:
    """In a backward pass in two parts, adapters alone have a second one."""
    layer = BuiltLayers(huggingface.layers(LLAMA, peft=ALL)).layers[1]
    names = {id(module): name for name, module in layer.named_modules()}
    found = {names[id(module)].rpartition(".")[0].rpartition(".")[2] for module, _ in forwards([*layer.modules()])}
    assert found == {"lora_A", "lora_B"}


# -- export -----------------------------------------------------------------------------------------------


def checkpoint_of(
    specs: list[Any], folder: Path, *, without_base: bool = False, dtype: torch.dtype = torch.float32
) -> BuiltLayers:
    """Write the files of layers as DeepSpeed does."""
    folder.mkdir()
    built = BuiltLayers(specs).to(dtype)
    for number, layer in enumerate(built.layers):
        trains = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
        state = {name: value for name, value in layer.state_dict().items() if not without_base or name in trains}
        torch.save(state, folder / weights_file(number))
    return built.eval()


@pytest.mark.parametrize("name", ["llama", "llama tied", "llama copies", "qwen2", "gpt2"])
def test_an_export_is_read_by_peft(name: str, tmp_path: Path) -> None:
    model, tokens = with_adapters(*ADAPTED[name]), batch()[0]
    base = library_model(ADAPTED[name][0])
    base.load_state_dict({str(plain_name(n)): v for n, v in model.get_base_model().state_dict().items()
                          if plain_name(n) is not None and "modules_to_save" not in n})  # fmt: skip
    base.save_pretrained(tmp_path / "base")
    built = checkpoint_of(huggingface.layers(model), tmp_path / "checkpoint", without_base=True)
    huggingface.export(model, tmp_path / "checkpoint", tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="sdpa")
    read = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert torch.equal(read(input_ids=tokens).logits, built(tokens))
    lora = model.peft_config["default"]
    huggingface.export(tmp_path / "base", tmp_path / "checkpoint", tmp_path / "merged", peft=lora, merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="sdpa").eval()
    torch.testing.assert_close(merged(tokens).logits, built(tokens), rtol=1e-4, atol=1e-4)
    assert not any("lora" in key for key in merged.state_dict())


def test_a_merged_export_has_the_dtype_of_the_training(tmp_path: Path) -> None:
    model = with_adapters(LLAMA, ALL)
    library_model(LLAMA).save_pretrained(tmp_path / "base")
    checkpoint_of(huggingface.layers(model), tmp_path / "checkpoint", without_base=True, dtype=torch.bfloat16)
    huggingface.export(tmp_path / "base", tmp_path / "checkpoint", tmp_path / "merged", peft=ALL, merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}


def test_exports_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    model = with_adapters(LLAMA, ALL)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    checkpoint_of(huggingface.layers(model), tmp_path / "checkpoint", without_base=True)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: trains, and is no part of an adapter"):
        huggingface.export(model, tmp_path / "checkpoint", tmp_path / "out")
    with pytest.raises(CheckpointError, match="a model with fresh weights has no other"):
        huggingface.export(LLAMA, tmp_path / "checkpoint", tmp_path / "merged", peft=ALL, merge=True)
    with pytest.raises(CheckpointError, match=r"lora_A.default.weight has shape \[4, 32\], expected shape \[2, 32\]"):
        huggingface.export(LLAMA, tmp_path / "checkpoint", tmp_path / "other", peft={**ALL, "r": 2})
    with pytest.raises(ConfigError, match="merge: the model has no adapters"):
        huggingface.export(LLAMA, tmp_path / "checkpoint", tmp_path / "none", merge=True)
    biased = {**ALL, "lora_bias": True}
    checkpoint_of(huggingface.layers(LLAMA, peft=biased), tmp_path / "biased")
    with pytest.raises(ConfigError, match=r"model\.layers\.0: peft cannot merge its adapters: .*lora_bias"):
        huggingface.export(LLAMA, tmp_path / "biased", tmp_path / "merged biases", peft=biased, merge=True)
