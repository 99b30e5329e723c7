"""Verification: layers that do not compute what transformers' model does are refused, with the difference."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch

from ds_dynmo.errors import ConfigError
from ds_dynmo.models import huggingface
from ds_dynmo.models.huggingface import adapter, tiny, verification
from ds_dynmo.models.huggingface.outline import outline_of
from ds_dynmo.models.huggingface.stubbed_model import StubbedModel
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model, trial_batches
from tests.support.huggingface_families import MASK, logits_of, tiny_values

transformers = pytest.importorskip("transformers")

NO_DROPOUT = {f"{name}_pdrop": 0.0 for name in ("embd", "attn", "resid")}


def verify(values: dict[str, Any], **changes: Any) -> None:
    """Compare what is made of a config with transformers' model; ``changes`` are to what verification found."""
    settings = {name: changes.pop(name) for name in ("inputs", "parallel") if name in changes}
    source = verification.find_transforms(adapter.source_of(values, 0, **settings), "a model")
    verification._compare_once.cache_clear()
    verification.verify(replace(source, **changes), "a model", adapter._specs_like)


def test_layers_that_leave_out_what_the_library_computes_are_refused_with_the_difference() -> None:
    values = tiny_values("granite", embedding_multiplier=12.0, logits_scaling=8.0)
    verify(values)
    for wrong in ({"has_input_transform": False}, {"has_output_transform": False}):
        with pytest.raises(ConfigError, match=r"granite with sdpa attention .*logits of a tiny model differ by \d"):
            verify(values, **wrong)


def test_layers_can_be_made_where_gradients_are_off() -> None:
    """And without drawing random numbers."""
    for without_gradients in (torch.no_grad, torch.inference_mode):
        verification._compare_once.cache_clear()
        state = torch.get_rng_state()
        with without_gradients():
            specs = huggingface.layers(tiny_values("gpt_neox", hidden_dropout=0.1))
        assert torch.equal(state, torch.get_rng_state())
        layers = BuiltLayers(specs).train()
        layers(torch.arange(8).view(2, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in layers.parameters())


# -- broken layers and adapters ----------------------------------------------------------------------------------------


def detached(compute: Any, self: Any, block: int, hidden: torch.Tensor, inputs: Any) -> Any:
    """Call the first layer with hidden states that nothing behind it trains."""
    args, kwargs = compute(self, block, hidden, inputs)
    return (args[0].detach() if block == 0 else args[0], *args[1:]), kwargs


def of_the_first_layer(compute: Any, self: Any, block: int, hidden: torch.Tensor, inputs: Any) -> Any:
    """Take masks and positions from the first layer's call for all others."""
    return compute(self, 0, hidden, inputs)


def without_mask(compute: Any, self: Any, block: int, hidden: torch.Tensor, inputs: Any) -> Any:
    args, kwargs = compute(self, block, hidden, inputs)
    return args, {**kwargs, "attention_mask": None}


def without_dropout(compute: Any, self: Any, embedded: torch.Tensor, inputs: Any, *, training: bool) -> Any:
    return compute(self, embedded, inputs, training=False)


def handing_on(compute: Any, self: Any, hidden_states: Any, position_embeddings: Any, **kwargs: Any) -> Any:
    """Hand values on through an argument: such layers could not be on different stages."""
    hidden = compute(self, hidden_states, position_embeddings=position_embeddings, **kwargs)
    if self.self_attn.layer_idx:
        hidden = hidden + getattr(position_embeddings[0], "handed_on", 0.0)
    position_embeddings[0].handed_on = hidden.detach()
    return hidden


def leaning(compute: Any, self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
    """Make arguments that depend on the values of hidden states."""
    cos, sin = compute(self, x, position_ids)
    return cos + 1e-3 * x.detach().mean(), sin


def with_offset(compute: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute what is not zero for an expert that nobody chose."""
    return compute(self, *args, **kwargs) + 0.01


LOGITS = "logits of a tiny model differ by"
OURS: dict[str, Any] = {"arguments": StubbedModel, "enter": StubbedModel}
PARTS = {"layer": "layers.0", "rotary": "rotary_emb", "experts": "layers.0.mlp.experts"}


@pytest.mark.parametrize(
    ("broken", "part", "kind", "changes", "message"),
    [
        (detached, "arguments", "llama", {}, r"gradient of model\.embed_tokens\.weight of a tiny model differs by"),
        (of_the_first_layer, "arguments", "gemma2", {}, LOGITS),
        (of_the_first_layer, "arguments", "gemma3_text", {"sliding_window": 64}, LOGITS),  # two rotaries
        (without_mask, "arguments", "mistral", {"sliding_window": 5}, LOGITS),
        (without_dropout, "enter", "gpt_neox", {"hidden_dropout": 0.2}, LOGITS),
        (handing_on, "layer", "llama", {}, LOGITS),
        (leaning, "rotary", "llama", {}, f"{LOGITS} nan"),
        (with_offset, "experts", "gpt_oss", {}, "experts give other results where replicas share them"),
    ],
)
def test_what_is_broken_is_refused(
    broken: Any, part: str, kind: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of our own model of arguments, or the forward pass of a part of transformers'."""
    values, parallel = tiny_values(kind, **changes), part == "experts"
    verify(values, parallel=parallel)
    name = part if part in OURS else "forward"
    owner = OURS.get(part) or type(random_model(values, "eager").model.get_submodule(PARTS[part]))
    compute = getattr(owner, name)

    @wraps(compute)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return broken(compute, *args, **kwargs)

    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(ConfigError, match=message):
        verify(values, parallel=parallel)


def test_another_router_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = tiny_values("mixtral", router_aux_loss_coef=0.5)
    verify(values)
    monkeypatch.setattr(adapter, "find_router_loss", lambda model, blocks, place: (None, [False] * len(blocks)))
    with pytest.raises(ConfigError, match=r"the loss of a tiny model is \d.*, transformers' \d"):
        verify(values)


def test_a_tensor_to_which_the_library_gives_no_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = tiny_values("deepseek_v3")
    kind = type(random_model(values, "eager"))
    monkeypatch.setattr(kind, "_init_weights", lambda self, module: None)
    with pytest.raises(ConfigError, match=r"inv_freq: transformers gives no value to it"):
        huggingface.layers(values)
    values = tiny_values("apertus")
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.act_fn\.alpha_p: transformers gives no value to it"):
        huggingface.layers(values)
    huggingface.layers(random_model(values, "eager"))


def test_what_the_library_does_not_train_is_not_trained() -> None:
    values = tiny_values("afmoe")
    verify(values)
    built = BuiltLayers(huggingface.layers(values, verified=False))
    frozen = {name.rpartition(".")[2] for name, parameter in built.named_parameters() if not parameter.requires_grad}
    assert frozen == {"expert_bias"}


def test_all_kinds_of_layers_are_tried() -> None:
    def kept(**changes: Any) -> int:
        config = transformers.AutoConfig.for_model("qwen2", num_hidden_layers=40, **changes)
        source = adapter.source_of(config, 0)
        return tiny.tiny_config(config, source.blocks)["num_hidden_layers"]

    assert kept() == 3
    assert kept(use_sliding_window=True, max_window_layers=30) == 31
    assert kept(layer_types=["full_attention"] * 5 + ["sliding_attention"] * 35, use_sliding_window=True) == 6


def test_a_config_of_which_no_tiny_model_can_be_made_is_refused_unless_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(config: Any, blocks: Any) -> dict[str, Any]:
        raise KeyError("a size")

    values = tiny_values("qwen3")
    monkeypatch.setattr(verification, "tiny_config", fails)
    with pytest.raises(ConfigError, match=r"qwen3 cannot be verified .*'a size'; verified=False trusts"):
        huggingface.layers(values)
    assert len(huggingface.layers(values, verified=False)) == values["num_hidden_layers"] + 3


def test_models_that_are_no_chain_are_refused_by_name() -> None:
    def refused(values: dict[str, Any], message: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(values, **settings)

    refused({"model_type": "mamba"}, r'model_type "mamba": should be one of gpt2, .*base_model_pp_plan')
    code = {"model_type": "their_own", "auto_map": {"AutoModelForCausalLM": "modeling.Their"}}
    refused(code, r'model_type "their_own": .*auto_map names code of its own, which is never run')
    refused({"model_type": "dots3_note_text"}, r"cannot be verified .*sizes differ from layer to layer; verified=False")
    refused({"model_type": "gemma3n_text", "num_kv_shared_layers": 2}, "num_kv_shared_layers 2: layers that share keys")
    refused(tiny_values("qwen3"), r"inputs \['labels'\]: should be different ones of", inputs=("labels",))
    refused(tiny_values("qwen3"), r"inputs \['position_ids', 'position_ids'\]", inputs=("position_ids",) * 2)
    refused(tiny_values("qwen3"), "cannot build the model", attn_implementation="none")
    fetched = "names code to be fetched, which is never run"
    refused(tiny_values("qwen3"), fetched, attn_implementation="someone/attention")
    bias = r"model_type phi is no chain of layers: it has weights of no layer: lm_head\.bias"
    refused(tiny_values("phi", tie_word_embeddings=True), bias)
    model = random_model(tiny_values("llama"), "sdpa")
    model.model.layers[2].mlp = model.model.layers[0].mlp
    with pytest.raises(ConfigError, match=r"llama is no chain .* model\.layers\.0 and model\.layers\.2 share weights"):
        outline_of(model, "a model")


# -- what is beside the tokens ----------------------------------------------------------------------------------------


def test_documents_of_a_packed_sequence_do_not_see_each_other() -> None:
    model = random_model(tiny_values("qwen3"), "sdpa")
    packed = BuiltLayers(huggingface.layers(model, inputs=("position_ids",), verified=False)).train()
    alone = BuiltLayers(huggingface.layers(model, verified=False)).train()
    tokens = torch.arange(12).unsqueeze(0)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0)
    both = packed((tokens, positions))
    apart = torch.cat([alone(tokens[:, :5]), alone(tokens[:, 5:])], dim=1)
    torch.testing.assert_close(both, apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(alone(tokens)[:, 5:], apart[:, 5:], atol=1e-2)


def test_a_batch_with_other_inputs_is_refused() -> None:
    tokens = torch.arange(12).unsqueeze(0)
    packed = huggingface.layers(tiny_values("qwen3"), inputs=("position_ids",), verified=False)[0].build()
    with pytest.raises(ConfigError, match="a micro-batch has 1 tensors: should be tokens and position_ids"):
        packed(tokens)
    short = huggingface.layers(tiny_values("qwen3", max_position_embeddings=11), verified=False)[0].build()
    with pytest.raises(ConfigError, match="sequences of 12 tokens: the model has 11 positions"):
        short(tokens)


def test_buffers_have_the_dtypes_of_the_librarys_bf16_model(monkeypatch: pytest.MonkeyPatch) -> None:
    build = type(random_model(tiny_values("llama"), "eager").model.layers[0].mlp).__init__

    def with_buffers(self: Any, *args: Any) -> None:
        build(self, *args)
        self.register_buffer("exact", torch.ones(2, dtype=torch.float32))
        self.register_buffer("rounded", torch.ones(2))

    def dtypes(kind: str) -> dict[str, torch.dtype]:
        model = random_model(tiny_values(kind), "eager")
        built = BuiltLayers(huggingface.layers(model, verified=False)).bfloat16()
        assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}
        return {name.rpartition(".")[2]: buffer.dtype for name, buffer in built.named_buffers()}

    assert dtypes("deepseek_v3")["e_score_correction_bias"] == torch.float32
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.__init__", with_buffers)
    assert dtypes("llama") == {"exact": torch.float32, "rounded": torch.bfloat16}


def test_padded_and_packed_batches_give_the_librarys_logits() -> None:
    """To the bit, by either attention."""
    for kind, changes in (("gpt2", NO_DROPOUT), ("qwen3", {}), ("mixtral", {})):
        for implementation in ("sdpa", "eager"):
            model = random_model(tiny_values(kind, **changes), implementation)
            for inputs in (("attention_mask",), ("position_ids",), MASK):
                case = (kind, implementation, inputs)
                settings = {"inputs": inputs, "attn_implementation": implementation, "verified": False}
                built = BuiltLayers(huggingface.layers(model, **settings)).train()
                for tokens, beside in trial_batches(model.config.vocab_size, inputs):
                    expected, found = model(tokens, use_cache=False, **beside), built((tokens, *beside.values()))
                    counts = beside.get("attention_mask", torch.ones_like(tokens)).bool()
                    assert torch.equal(logits_of(found)[counts], expected.logits[counts]), case
                    if isinstance(found, tuple):
                        wanted = model.config.router_aux_loss_coef * expected.aux_loss
                        assert found[1].item() == pytest.approx(wanted.item(), rel=1e-6), case
