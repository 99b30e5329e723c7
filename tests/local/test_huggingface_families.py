"""Families of causal language models beside the library's, one for each mechanism, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_dynmo.errors import ConfigError
from ds_dynmo.models import huggingface
from ds_dynmo.models.huggingface import adapter, verification
from ds_dynmo.models.huggingface.configs import families
from ds_dynmo.models.huggingface.verification import BuiltLayers, random_model, trial_batches
from families import CHECKS, tiny_values, try_family

transformers = pytest.importorskip("transformers")

ALL = set(CHECKS)
# By family: why it is here, and the checks that it passes.
MECHANISMS = {
    "gemma2": ("scaled embedding, soft caps, layers of two kinds", ALL),
    "olmo": ("norms without weights", ALL),
    "gpt_neox": ("other names, dropout before the layers", ALL),
    "qwen2_moe": ("experts that files have one by one, router loss", ALL),
    "gpt_oss": ("eager attention alone, experts with biases", ALL),
}


@pytest.mark.parametrize("kind", MECHANISMS)
def test_a_family_equals_the_librarys(kind: str) -> None:
    found = try_family(kind)
    assert not found.refusal
    assert set(found.passed) == MECHANISMS[kind][1], found.failed


@pytest.mark.fuzz
def test_at_least_40_families_work() -> None:
    found = [try_family(kind) for kind in families()]
    working = [one for one in found if not one.refusal]
    assert len(working) >= 40
    assert not [(one.kind, one.failed) for one in working if one.failed]


def like(values: dict[str, Any], **settings: Any) -> Any:
    """Return the source of a tiny model's layers, for what verification finds."""
    source = adapter.source_of(values, 0, **settings)
    return verification.find_surroundings(source, "a model")


def test_layers_that_leave_out_what_the_library_computes_are_refused_with_the_difference() -> None:
    source = like(tiny_values("granite", embedding_multiplier=12.0, logits_scaling=8.0))
    assert source.has_entry and source.has_exit
    verification.verify(source, "a model", adapter._specs_like)
    for wrong in (replace(source, has_entry=False), replace(source, has_exit=False)):
        with pytest.raises(ConfigError, match=r"granite with sdpa attention .*logits of a tiny model differ by \d"):
            verification.verify(wrong, "a model", adapter._specs_like)


def test_a_config_of_which_no_tiny_model_can_be_made_is_refused_unless_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(config: Any) -> dict[str, Any]:
        raise KeyError("a size")

    values = tiny_values("qwen3")
    monkeypatch.setattr(verification, "tiny_config", fails)
    with pytest.raises(ConfigError, match=r"qwen3 cannot be verified: .*'a size'; verified=False trusts"):
        huggingface.layers(values)
    assert len(huggingface.layers(values, verified=False)) == values["num_hidden_layers"] + 3


def test_families_that_are_no_chain_are_refused_by_name() -> None:
    def refused(values: dict[str, Any], message: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            huggingface.layers(values, **settings)

    refused({"model_type": "mamba"}, r'model_type "mamba": should be one of gpt2, .*base_model_pp_plan')
    code = {"model_type": "their_own", "auto_map": {"AutoModelForCausalLM": "modeling.Their"}}
    refused(code, r'model_type "their_own": .*auto_map names code of its own, which is never run')
    refused({"model_type": "gemma3n_text", "num_kv_shared_layers": 2}, "num_kv_shared_layers 2: layers that share keys")
    refused(tiny_values("qwen3"), r"inputs \['labels'\]: should be different ones of", inputs=("labels",))
    refused(tiny_values("qwen3"), r"inputs \['position_ids', 'position_ids'\]", inputs=("position_ids",) * 2)
    refused(tiny_values("qwen3"), "cannot build the model", attn_implementation="none")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "mixtral"])
def test_padded_and_packed_batches_give_the_librarys_logits(kind: str, implementation: str) -> None:
    model = random_model(tiny_values(kind), implementation)
    for inputs in (("attention_mask",), ("position_ids",), ("attention_mask", "position_ids")):
        built = BuiltLayers(
            huggingface.layers(model, inputs=inputs, attn_implementation=implementation, verified=False)
        ).train()
        for tokens, beside in trial_batches(model.config.vocab_size, inputs):
            expected, found = model(tokens, use_cache=False, **beside), built((tokens, *beside.values()))
            logits = found[0] if isinstance(found, tuple) else found
            counts = beside.get("attention_mask", torch.ones_like(tokens)).bool()
            assert torch.equal(logits[counts], expected.logits[counts])
            if isinstance(found, tuple):
                wanted = model.config.router_aux_loss_coef * expected.aux_loss
                torch.testing.assert_close(found[1][0], wanted, rtol=1e-6, atol=0)


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


def test_a_buffer_that_the_library_keeps_in_fp32_stays_so() -> None:
    built = BuiltLayers(huggingface.layers(tiny_values("deepseek_v3"), verified=False)).bfloat16()
    dtypes = {name.rpartition(".")[2]: buffer.dtype for name, buffer in built.named_buffers()}
    assert dtypes["e_score_correction_bias"] == torch.float32
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}


def test_a_tied_head_with_a_bias_of_its_own_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model_type phi is no chain of layers: it has weights of no layer: lm_head\.bias"
    ):
        huggingface.layers(tiny_values("phi", tie_word_embeddings=True))


def test_verification_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    huggingface.layers(tiny_values("gpt_neox", hidden_dropout=0.1))
    assert torch.equal(state, torch.get_rng_state())
