import math

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from pydantic import ValidationError
from torch import nn

from ds_dynmo.config import parse_section
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig, model_layers
from ds_dynmo.models.gpt import (
    Block,
    CausalSelfAttention,
    FinalNorm,
    OutputHead,
    TokenEmbedding,
    apply_rotary,
    gpt_layers,
    language_model_loss,
)
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.vocabulary import with_labels

SMALL = GPTConfig(vocab_size=50, sequence_length=16, layers=3, hidden_size=32, heads=4, seed=7, tied_embedding=False)
TIED = SMALL.model_copy(update={"tied_embedding": True})


def build(config: GPTConfig) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(spec.build() for spec in gpt_layers(config)))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, shape, generator=generator_for("tokens", *shape))


def test_the_layer_list_is_embedding_blocks_norm_head() -> None:
    specs = gpt_layers(SMALL)
    assert [type(spec) for spec in specs] == [LayerSpec] * 6
    assert [spec.typename for spec in specs] == [TokenEmbedding, Block, Block, Block, FinalNorm, OutputHead]


def test_a_tied_head_uses_the_transposed_embedding() -> None:
    specs = gpt_layers(TIED)
    first, last = specs[0], specs[-1]
    assert isinstance(first, TiedLayerSpec) and isinstance(last, TiedLayerSpec)
    assert (first.key, first.typename, first.tied_weight_attr) == (last.key, last.typename, last.tied_weight_attr)
    assert first.forward_fn is None  # DeepSpeed keeps the state of that one in a checkpoint
    embedding, hidden = first.build(), torch.randn(2, 5, 32)
    assert torch.equal(last.forward_fn(embedding, hidden), hidden @ embedding.weight.T)
    assert torch.equal(embedding.weight, last.build().weight)


def test_activations_between_layers_are_batch_sequence_hidden() -> None:
    states = tokens(2, 16)
    for layer in build(SMALL)[:-1]:
        states = layer(states)
        assert states.shape == (2, 16, 32)
        assert states.dtype == torch.float32
    assert build(SMALL)(tokens(2, 16)).shape == (2, 16, 50)


def test_a_token_does_not_see_later_ones() -> None:
    model, text = build(SMALL), tokens(1, 16)
    changed = text.clone()
    changed[0, 9] = (text[0, 9] + 1) % SMALL.vocab_size
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert (before[0, 9:] != after[0, 9:]).any(dim=-1).all()


def test_packed_documents_are_computed_as_if_alone() -> None:
    sizes = {"layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 16, "tied_embedding": False}
    config = parse_section(ModelConfig, {**sizes, "case": {"kind": "moe", "experts": 4}}, "model")
    model = nn.Sequential(*(spec.build() for spec in model_layers(config, packed=True))).eval()
    alone = nn.Sequential(*(spec.build() for spec in model_layers(config))).eval()
    text, positions = tokens(2, 16), torch.tensor([[*range(5), *range(8), *range(3)], [*range(16)]])
    packed = model((text, positions))[0]
    for row, start, stop in ((0, 0, 5), (0, 5, 13), (0, 13, 16), (1, 0, 16)):
        torch.testing.assert_close(packed[row, start:stop], alone(text[row : row + 1, start:stop])[0][0])


def test_what_attends_across_packed_documents_is_refused() -> None:
    for case in (
        {"kind": "sparse_attention", "pattern": "qk"},
        {"kind": "mod"},
        {"kind": "early_exit", "method": "calm"},
    ):
        with pytest.raises(ConfigError, match=rf"model\.case: {case['kind']} cannot be combined with packed documents"):
            model_layers(parse_section(ModelConfig, {"case": case}, "model"), packed=True)


def test_attention_is_the_softmax_over_earlier_tokens() -> None:
    attention = CausalSelfAttention(SMALL, generator_for("test"))
    hidden = torch.randn(2, 16, 32, generator=generator_for("hidden"))
    expected = torch.zeros(2, 16, 32)
    query, key, value = (hidden @ attention.query_key_value.weight.T).chunk(3, dim=-1)
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        positions = torch.arange(16)
        rotated_query = apply_rotary(query[..., part], positions, SMALL.rope_base)
        rotated_key = apply_rotary(key[..., part], positions, SMALL.rope_base)
        scores = rotated_query @ rotated_key.transpose(1, 2) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -math.inf)
        expected[..., part] = scores.softmax(dim=-1) @ value[..., part]
    torch.testing.assert_close(
        attention(hidden, torch.arange(hidden.shape[1])), expected @ attention.output.weight.T, atol=1e-5, rtol=1e-5
    )


def test_rotated_products_depend_only_on_the_distance() -> None:
    query, key = torch.randn(2, 1, 8, generator=generator_for("pair"), dtype=torch.float32)

    def product(query_position: int, key_position: int) -> float:
        rotated_query = apply_rotary(query, torch.tensor([query_position]), 10000.0)
        rotated_key = apply_rotary(key, torch.tensor([key_position]), 10000.0)
        return float((rotated_query * rotated_key).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(8, 3), abs=1e-4)


def test_rotary_is_complex_multiplication_and_keeps_position_0_and_dtype() -> None:
    states, positions = torch.randn(3, 5, 6, generator=generator_for("states")), torch.tensor([0, 1, 2, 9, 4])
    angles = positions[:, None] * 100.0 ** (-torch.arange(3) / 3)
    turned = torch.complex(states[..., :3], states[..., 3:]) * torch.polar(torch.ones(5, 3), angles)
    rotated = apply_rotary(states, positions, 100.0)
    torch.testing.assert_close(rotated, torch.cat((turned.real, turned.imag), dim=-1))
    assert torch.equal(rotated[:, 0], states[:, 0])
    assert apply_rotary(states.bfloat16(), positions, 10.0).dtype == torch.bfloat16
    several = torch.tensor([[0, 2, 5], [1, 3, 4]])  # positions per sequence
    states = torch.randn(2, 4, 3, 8)
    rotated = apply_rotary(states, several[:, None], 10000.0)
    for sequence in range(2):
        torch.testing.assert_close(rotated[sequence], apply_rotary(states[sequence], several[sequence], 10000.0))


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_initial_weights_depend_only_on_seed_and_layer(config: GPTConfig) -> None:
    """Earlier random numbers do not matter, and the global generator is left alone."""
    forwards = [spec.build().state_dict() for spec in gpt_layers(config)]
    torch.rand(3)
    before = torch.get_rng_state()
    backwards = [spec.build().state_dict() for spec in reversed(gpt_layers(config))][::-1]
    assert torch.equal(before, torch.get_rng_state())
    for one, other in zip(forwards, backwards, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_layers_and_seeds_have_weights_of_their_own() -> None:
    other = SMALL.model_copy(update={"seed": 8})
    weights = [spec.build().mlp.expand.weight for config in (SMALL, other) for spec in gpt_layers(config)[1:4]]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_initial_weights_are_gpt_2s() -> None:
    config = GPTConfig(layers=8, hidden_size=128, heads=4)
    block = gpt_layers(config)[1].build()
    assert block.mlp.expand.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.mlp.contract.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert torch.equal(block.mlp_norm.weight, torch.ones(128))


def test_the_first_loss_is_that_of_a_uniform_guess_and_every_parameter_gets_a_gradient() -> None:
    model = build(SMALL)
    loss = language_model_loss(model(tokens(4, 16)), tokens(4, 16))
    assert loss.item() == pytest.approx(math.log(50), abs=0.1)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_the_loss_is_computed_in_fp32() -> None:
    logits = 10 * torch.randn(2, 3, 50, generator=generator_for("logits")).bfloat16()
    labels = tokens(2, 3)
    loss = language_model_loss(logits, labels)
    assert loss.dtype == torch.float32
    rows = -logits.float().log_softmax(-1)
    expected = sum(rows[b, s, labels[b, s]] for b in range(2) for s in range(3)) / 6
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_mean_of_micro_batches_is_that_of_their_tokens(per_token: bool) -> None:
    """One of them has no label. With logits, and with the cross entropy of each token, as slices give it."""
    logits = torch.randn(3, 2, 20, 50, generator=generator_for("logits")).requires_grad_()
    labels = tokens(3, 2, 20).masked_fill(torch.arange(40).view(2, 20) >= torch.tensor([1, 0, 40]).view(3, 1, 1), -100)
    entropies = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(3, 2, 20)
    expected = F.cross_entropy(logits.flatten(0, 2), labels.flatten())
    count = torch.tensor(41 / 3)
    outputs = entropies if per_token else logits
    losses = [language_model_loss(one, (of, count)) for one, of in zip(outputs, labels)]
    assert losses[1].item() == 0.0
    torch.testing.assert_close(sum(losses) / 3, expected)
    gradients = [torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (sum(losses) / 3, expected)]
    torch.testing.assert_close(*gradients)
    assert gradients[0][1].count_nonzero() == 0


def test_auxiliary_losses_are_means_of_micro_batches_beside_the_mean_over_tokens() -> None:
    logits, labels = torch.randn(2, 5, 50, generator=generator_for("logits")), tokens(2, 5)
    entropy, auxiliary, weight = F.cross_entropy(logits.flatten(0, 1), labels.flatten()), torch.ones(1), torch.ones(1)
    counted = labels, torch.tensor(20.0)
    torch.testing.assert_close(language_model_loss((logits, auxiliary), counted), entropy / 2 + 1)
    torch.testing.assert_close(language_model_loss((logits, auxiliary, 0.3 * weight), counted), 0.3 * entropy / 2 + 1)


def test_labels_go_with_inputs_and_their_count_does_not() -> None:
    ids, labels, count = tokens(2, 5), tokens(2, 5), torch.tensor(3.0)
    assert with_labels((ids, labels)) == ((ids, labels), labels)
    assert with_labels(((ids, ids), (labels, count))) == ((ids, ids, labels), (labels, count))


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_training_memorises_a_sentence(config: GPTConfig) -> None:
    specs = gpt_layers(config)
    model = torch.nn.Sequential(*(spec.build() for spec in specs))
    if config.tied_embedding:
        model[-1] = model[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = tokens(1, 17)
    for _ in range(60):
        hidden = model[:-1](text[:, :-1])
        logits = F.linear(hidden, model[-1].weight)
        loss = language_model_loss(logits, text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_the_load_signal_tells_whether_any_parameter_trains() -> None:
    for layer in build(SMALL):
        assert layer.load_signal() == 1.0
        layer.requires_grad_(False)
        assert layer.load_signal() == 0.0


def test_impossible_sizes_are_refused() -> None:
    for wrong, message in (
        ({"heads": 3}, "should divide hidden_size, 32"),
        ({"heads": 32}, "makes heads 1 wide"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"rope_base": 1.0}, "greater than 1"),
        ({"hidden": 3}, "Extra inputs"),
    ):
        with pytest.raises(ValidationError, match=message):
            GPTConfig(**{"hidden_size": 32, "heads": 4, **wrong})
