"""Hugging Face models, configs, files and sections of a configuration that are refused, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynmo.config import parse_section
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import ModelConfig, huggingface, model_layers, vocabulary_of
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model
from ds_dynmo.models.layer_numbers import block_numbers
from tests.support.huggingface_families import GPT2, SIZES, batch, write_checkpoint

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

LLAMA = {"model_type": "llama", **SIZES}
TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
QWEN3 = {"model_type": "qwen3", **SIZES, "head_dim": 16}


def library_model(values: dict[str, Any] = LLAMA, **changes: Any) -> Any:
    return random_model({**values, **changes}, "sdpa")


def built(model: Any) -> BuiltLayers:
    return BuiltLayers(huggingface.layers(model)).train()


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
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
    refused({**LLAMA, "hiden_size": 8}, 'hiden_size = 8: a llama config has no .*; did you mean "hidden_size"')
    refused({**LLAMA, "hidden_act": "none"}, "cannot build the model")
    refused({**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads 3: .* 4")
    refused({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers 0: should be at least 1")
    for chosen in (0, 5):
        refused({**MIXTRAL, "num_experts_per_tok": chosen}, f"num_experts_per_tok {chosen}: should be in 1 to .*, 4")
    for coefficient in (-0.1, float("nan")):
        refused({**MIXTRAL, "router_aux_loss_coef": coefficient}, "router_aux_loss_coef .*: should be 0 or more")
    refused({"vocab_size": 300}, "model_type null")
    refused({**GPT2, "add_cross_attention": True}, "add_cross_attention")
    refused(LLAMA, "sequence_length 65: the model has 64 positions", sequence_length=65)
    refused(LLAMA, "vocab_size 300: should be at least 301", vocab_size=301)
    refused(3, "got int")
    refused(nn.Linear(2, 2), "got Linear")
    refused(transformers.T5Config(), "model_type t5: should be one of")


def test_a_model_is_taken_if_its_weights_are_floating_whatever_its_config_says() -> None:
    """Of a GGUF file the library makes ordinary weights, and a config that says that they are quantized."""
    model = library_model()
    model.config.quantization_config = {"quant_method": "gguf"}
    tokens, _ = batch(300)
    assert torch.equal(built(model)(tokens), library_model()(tokens).logits)
    assert model.config.quantization_config
    said = r"quantization_config: quantized weights .* whose weights are floating"
    with pytest.raises(ConfigError, match=said):
        huggingface.layers(model.config)
    head = model.lm_head
    head.weight = nn.Parameter(head.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=said):
        huggingface.layers(model)


def with_more(model: Any) -> Any:
    model.model.layers[1].extra = nn.Linear(2, 2)
    return model


def with_fewer(model: Any) -> Any:
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 47, bias=False)
    return model


def tied_by_hand(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def untied_by_hand(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def with_another_function(model: Any) -> Any:
    model.model.layers[2].mlp.act_fn = nn.ReLU()
    return model


def test_a_model_that_is_not_what_its_config_says_is_refused() -> None:
    both = r"lm_head\.weight and model\.embed_tokens\.weight are"
    for values, change, message in (
        (LLAMA, with_more, r"the model: has model\.layers\.1\.extra\.bias, .*knows nothing of"),
        (LLAMA, with_fewer, r"layers\.1\.mlp\.up_proj\.weight \[47, 32\] not \[48, 32\]"),
        (LLAMA, tied_by_hand, rf"{both} one weight, by its config \(tie_word_embeddings false\) they are not"),
        (TIED, untied_by_hand, rf"{both} not one weight, by its config \(tie_word_embeddings true\) they are"),
        (LLAMA, with_another_function, r"layers\.2\.mlp\.act_fn is a ReLU, by its config a SiLUActivation"),
        (LLAMA, lambda model: model.model, "it is a LlamaModel, by its config a LlamaForCausalLM"),
    ):
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(change(library_model(values)))


def test_a_tied_head_with_values_of_its_own_in_the_files_is_refused(tmp_path: Path) -> None:
    """Transformers does not tie it then."""
    reference = library_model(TIED)
    reference.save_pretrained(tmp_path)
    embedding = reference.model.embed_tokens.weight.detach()
    tensors = {**safetensors_torch.load_file(tmp_path / "model.safetensors"), "lm_head.weight": embedding.clone()}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens, _ = batch(300)
    assert torch.equal(built(tmp_path)(tokens), reference(tokens).logits)
    tensors["lm_head.weight"][-1, 0] += 1
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight and lm_head\.weight differ, and its config ties them"):
        huggingface.layers(tmp_path)


def test_one_file_is_read_rather_than_an_index_as_by_the_library(tmp_path: Path) -> None:
    library_model().save_pretrained(tmp_path, max_shard_size="20KB")
    other = library_model(initializer_range=0.05)
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    tokens, _ = batch(300)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, other(tokens).logits)
    assert torch.equal(built(tmp_path)(tokens), other(tokens).logits)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(tmp_path)

    library_model().save_pretrained(tmp_path)
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
    library_model().save_pretrained(tmp_path, max_shard_size="20KB")
    next(iter(tmp_path.glob("model-00002-*"))).unlink()
    refused(r"has no file model-00002-of-\d+\.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").touch()
    refused(r"has no file model\.safetensors; files of pickle are not read")
    (tmp_path / "adapter_config.json").touch()
    refused(r"has adapter_config\.json: transformers would load the adapter too")


def test_exports_that_are_refused(tmp_path: Path) -> None:
    reference = library_model()
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(built(reference), checkpoint)
    with pytest.raises(ConfigError, match="is there already"):
        huggingface.export(reference.config, checkpoint, tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        huggingface.export(reference.config, tmp_path / "nowhere", tmp_path / "out")
    wider = transformers.AutoConfig.for_model(**{**LLAMA, "intermediate_size": 64})
    with pytest.raises(
        CheckpointError, match=r"layer_01.*down_proj\.weight has shape \[32, 48\], expected.*\[32, 64\]"
    ):
        huggingface.export(wider, checkpoint, tmp_path / "out")
    (checkpoint / "layer_02-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"layer_02-model_states\.pt: there is no such file"):
        huggingface.export(reference.config, checkpoint, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# -- the "model" section --------------------------------------------------------------------------------------


def test_the_model_section_accepts_a_config(tmp_path: Path) -> None:
    config = parse_section(ModelConfig, {"huggingface": QWEN3, "sequence_length": 64, "seed": 3}, "model")
    specs = model_layers(config)
    assert [spec.typename.__name__ for spec in specs] == [
        *["InputEmbedding", "DecoderLayer", "DecoderLayer", "DecoderLayer", "DecoderNorm", "LMHead"]
    ]
    path = write_config(tmp_path) / "config.json"
    config = parse_section(ModelConfig, {"huggingface": str(path), "sequence_length": 64}, "model")
    assert len(model_layers(config)) == 6
    for changes, message in (
        ({"sequence_length": 65}, "model.huggingface: sequence_length 65"),
        ({"huggingface": {**QWEN3, "vocab_size": 200}}, "model.huggingface: vocab_size 200: .* 256"),
        ({"huggingface": "nowhere"}, "model.huggingface: nowhere: there is no such"),
    ):
        block = {"huggingface": QWEN3, "sequence_length": 64, **changes}
        with pytest.raises(ConfigError, match=message):
            model_layers(parse_section(ModelConfig, block, "model"))


def test_bytes_need_a_vocabulary_of_256_and_the_tokens_of_a_folder_do_not(tmp_path: Path) -> None:
    settings = {**LLAMA, "vocab_size": 40}
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
    untied = {**GPT2, "tie_word_embeddings": False, "resid_pdrop": 0.1}
    refused(TIED, schedule, r"model\.case: would freeze the head .*: needs model\.untie = true")
    refused(GPT2, {"automatic": {}}, r"needs model\.untie = true")
    refused(untied, {"schedule": [[0.5, 4]]}, r"schedule freezes 4 blocks, model\.huggingface has 3")
    refused(untied, {"egeria": {}}, r"model\.huggingface: resid_pdrop 0\.1: should be 0: egeria")
    neox = {"model_type": "gpt_neox", "hidden_dropout": 0.1, "vocab_size": 300}
    refused(neox, {"egeria": {}}, r"model\.huggingface: hidden_dropout 0\.1: should be 0: egeria")
    block = parse_section(
        ModelConfig, {"huggingface": untied, "sequence_length": 64, "case": {"kind": "freezing", **schedule}}, "model"
    )
    assert block_numbers(model_layers(block)) == range(2, 5)


def test_expert_parallelism_that_a_model_cannot_have_is_refused() -> None:
    def refused(block: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            model_layers(parse_section(ModelConfig, {"expert_parallel": True, **block}, "model"))

    refused({"huggingface": LLAMA, "sequence_length": 64}, "model_type llama, has no experts to share out")
    refused({"case": {"kind": "moe"}}, '"case" of kind "moe" has one of its own')
    block = {"huggingface": MIXTRAL, "sequence_length": 64}
    refused(
        {**block, "case": {"kind": "freezing", "automatic": {}}},
        r"freezing: only schedule can be combined with expert_parallel",
    )
    specs = model_layers(parse_section(ModelConfig, {"expert_parallel": True, **block}, "model"))
    assert specs[1].build().experts.parallel and not huggingface.layers(MIXTRAL)[1].build().experts.parallel
