"""``split_blocks`` makes two layers of each block. The model stays the same, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_dynmo.config import parse_section
from ds_dynmo.models import ModelConfig, RunSizes, language_model_loss, model_layers
from ds_dynmo.models.freezing.config import FreezingConfig
from ds_dynmo.models.freezing.freezing import FreezingController
from ds_dynmo.models.gpt import FinalNorm, OutputHead, TokenEmbedding
from ds_dynmo.models.half_blocks import AttentionHalf, FeedForwardHalf
from ds_dynmo.models.layer_numbers import whole_layers
from ds_dynmo.models.moe.layer import MixtureOfExperts
from ds_dynmo.models.pruning.magnitude import select_largest
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.sparse_attention.attention import SparseAttention

SIZES = {"layers": 3, "hidden_size": 16, "heads": 2, "sequence_length": 12, "mlp_ratio": 2, "tied_embedding": False}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts, auxiliary loss": {"case": {"kind": "moe", "experts": 4}},
    "experts in the second block": {"case": {"kind": "moe", "experts": 4, "routing": "bias", "every": 2}},
    "pruning": {"case": {"kind": "pruning"}},
    "hash": {"case": {"kind": "sparse_attention", "pattern": "hash", "buckets": 4}},
    "qk and pruning": {"case": [{"kind": "sparse_attention", "pattern": "qk"}, {"kind": "pruning", "csr_from": 0.5}]},
    "qk and experts": {
        "case": [{"kind": "sparse_attention", "pattern": "qk"}, {"kind": "moe", "experts": 4, "capacity_factor": 0.8}]
    },
}


def build(split: bool, **block: Any) -> nn.Sequential:
    config = parse_section(ModelConfig, {**SIZES, **block, "split_blocks": split}, "model")
    return nn.Sequential(*(spec.build() for spec in model_layers(config)))


def whole_number(layer: int) -> int:
    """Return the number that a layer of the split list, or the block it is half of, has in the unsplit list."""
    blocks = SIZES["layers"]
    return (layer + 1) // 2 if layer <= 2 * blocks else layer - blocks


def by_block(names: dict[str, Any]) -> dict[str, Any]:
    """Rename the entries of a split model to the names of the unsplit one."""
    split = {tuple(name.split(".", 1)): value for name, value in names.items()}
    return {f"{whole_number(int(layer))}.{name}": value for (layer, name), value in split.items()}


def pair(**block: Any) -> tuple[nn.Sequential, nn.Sequential]:
    return build(False, **block), build(True, **block)


def prune(model: nn.Sequential, share: float) -> None:
    linears = {number: found for number, layer in enumerate(model) if (found := prunable_linears(layer))}
    sizes = sum(linear.weight.numel() for members in linears.values() for linear in members)
    keep = round(sizes * (1 - share))
    selection = select_largest(linears, keep, num_layers=len(model), sum_over_stages=torch.clone)
    for number, members in linears.items():
        for linear, mask in zip(members, selection.masks(number, members), strict=True):
            linear.prune(mask)


def step(model: nn.Sequential, *, recomputed: bool) -> dict[str, torch.Tensor]:
    """Return outputs, loss and gradients by their names."""
    tokens = torch.randint(256, (2, 13), generator=generator_for("tokens"))
    torch.manual_seed(3)  # sparse patterns use random numbers in the order of the layers
    states: Any = tokens[:, :-1]
    for layer in model:
        states = checkpoint(layer, states, use_reentrant=False) if recomputed else layer(states)
    loss = language_model_loss(states, tokens[:, 1:])
    loss.backward()
    outputs = states if isinstance(states, tuple) else (states,)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for name, gradient in gradients.items() if "mlp.e" not in name)
    made = {f"0.output {number}": output for number, output in enumerate(outputs)}
    return {**gradients, **made, "0.loss": loss}


def test_the_layer_list_has_two_layers_for_each_block() -> None:
    """Pieces are counted as whole layers."""
    config = ModelConfig(layers=2, split_blocks=True, tied_embedding=False)
    halves = [AttentionHalf, FeedForwardHalf]
    assert [spec.typename for spec in model_layers(config)] == [TokenEmbedding, *halves, *halves, FinalNorm, OutputHead]
    config = parse_section(ModelConfig, {**SIZES, "split_blocks": True, "vocabulary_slices": 3}, "model")
    layers = model_layers(config)
    assert whole_layers(layers, config.layers_per_block) == [0, 3, 5, 7, 9, 10, 13] and len(layers) == 13
    plain = parse_section(ModelConfig, SIZES, "model")
    assert whole_layers(model_layers(plain), plain.layers_per_block) == [*range(7)]


@pytest.mark.parametrize("case", CASES)
def test_weights_outputs_and_gradients_equal_those_of_whole_blocks(case: str) -> None:
    for dtype, recomputed in ((torch.float32, True), (torch.bfloat16, False)):
        whole, halves = pair(**CASES[case])
        initial, found = dict(whole.state_dict()), by_block(dict(halves.state_dict()))
        assert initial.keys() == found.keys()
        assert all(torch.equal(value, initial[name]) for name, value in found.items())
        if "pruning" in case:
            prune(whole, 0.7)
            prune(halves, 0.7)
        expected = step(whole.to(dtype), recomputed=recomputed)
        found = by_block(step(halves.to(dtype), recomputed=recomputed))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] is None and value is None) or torch.equal(found[name], value), (name, dtype)


def test_equal_magnitudes_are_pruned_in_the_order_of_whole_blocks() -> None:
    whole, halves = pair(case={"kind": "pruning"})
    for model in (whole, halves):
        for linear in prunable_linears(model):
            linear.weight.data.fill_(1.0)
        prune(model, 0.6)
    masks = [[linear.mask for linear in prunable_linears(model)] for model in (whole, halves)]
    assert len(masks[0]) == len(masks[1]) == 12
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*masks, strict=True))


def test_no_two_layers_share_a_random_stream() -> None:
    streams = [getattr(layer, "draws_as_layer", number) for number, layer in enumerate(build(True))]
    assert len(set(streams)) == len(streams) == 9
    assert streams[1::2][:3] == [1, 2, 3]  # attention has the streams of whole blocks


def test_each_half_has_its_own_load_signal() -> None:
    """That of a pruned one is its own retained fraction."""
    halves = build(True, case=[{"kind": "sparse_attention", "pattern": "qk"}, {"kind": "moe", "experts": 4}])
    step(halves, recomputed=False)
    attention, mlp = halves[1].attention, halves[2].mlp
    assert isinstance(attention, SparseAttention) and isinstance(mlp, MixtureOfExperts)
    assert halves[1].load_signal() == attention.load_signal() < 1.0
    assert halves[2].load_signal() == mlp.load_signal() == 2 / 4
    halves[1].requires_grad_(False)
    assert (halves[1].load_signal(), halves[2].load_signal()) == (0.0, 0.5)
    halves = build(True, case={"kind": "pruning"})
    query_key_value = prunable_linears(halves[1])[0]
    query_key_value.prune(torch.zeros_like(query_key_value.weight, dtype=torch.bool))  # 3 of the 4 h^2 of attention
    assert [halves[layer].load_signal() for layer in (1, 2)] == [pytest.approx(1 / 4), 1.0]


def freezing(block: dict[str, Any], layers_per_block: int) -> FreezingController:
    layers = 3 * layers_per_block
    sizes = {"num_layers": 3 + layers, "blocks": range(1, 1 + layers), "layers_per_block": layers_per_block}
    return FreezingController(parse_section(FreezingConfig, block, "freezing"), RunSizes(total_steps=10, **sizes))


def test_both_halves_of_a_block_are_frozen_together() -> None:
    """Automatic freezing adds their gradients."""
    controller = freezing({"schedule": [[0.0, 1], [0.5, 3], [0.8, 0]]}, layers_per_block=2)
    assert [controller.frozen_prefix(step) for step in (0, 5, 8)] == [3, 7, 0]
    automatic = {"automatic": {"interval": 0.1, "start": 0.0}}
    whole, halves = freezing(automatic, 1), freezing(automatic, 2)
    of_halves = [
        [9.0, 1.0, 3.0, 2.0, 2.0, 5.0, 5.0, 9.0, 9.0],
        [9.0, 3.0, 1.0, 2.0, 1.0, 1.0, 2.0, 9.0, 9.0],  # block 0: 4 and 4; block 1: 4, then 3; block 2: 10, then 3
    ]
    for done, magnitudes in enumerate(of_halves, start=1):
        blocks = [magnitudes[layer] + magnitudes[layer + 1] for layer in (1, 3, 5)]
        whole.add_gradients(torch.tensor([9.0, *blocks, 9.0, 9.0], dtype=torch.float64))
        halves.add_gradients(torch.tensor(magnitudes, dtype=torch.float64))
        whole.evaluate(done, torch.clone)
        halves.evaluate(done, torch.clone)
    assert (whole.frozen_prefix(2), halves.frozen_prefix(2)) == (2, 3)
