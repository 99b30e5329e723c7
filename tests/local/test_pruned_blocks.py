"""Pruning of square blocks: which are pruned, and products by those that are left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.config import parse_block
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig
from ds_dynmo.models.pruning.blocks import places_of_blocks
from ds_dynmo.models.pruning.magnitude import select_largest
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear
from tests.local.split_passes import WIDTH, check_same, inputs

SIDE, OUTPUTS, INPUTS = 4, 24, 20
NEVER, ALWAYS = 2.0, 0.0


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_blocks(keep: torch.Tensor) -> torch.Tensor:
    return keep.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)


def pruned(sparsity: float, csr_from: float = ALWAYS, dtype: torch.dtype = torch.float32) -> PrunableLinear:
    linear = PrunableLinear(nn.Parameter(seeded(OUTPUTS, INPUTS).to(dtype)), csr_from, SIDE)
    keep = torch.rand(OUTPUTS // SIDE, INPUTS // SIDE, generator=torch.Generator().manual_seed(3)) >= sparsity
    linear.prune(in_blocks(keep))
    return linear


def passes(linear: PrunableLinear, *shape: int) -> list[torch.Tensor]:
    """Return output, gradient of the input, and gradient of the weight."""
    dtype = linear.weight.dtype
    hidden = seeded(*shape, INPUTS, seed=1).to(dtype).requires_grad_()
    output = linear(hidden)
    output.backward(seeded(*shape, OUTPUTS, seed=2).to(dtype))
    assert hidden.grad is not None and linear.weight.grad is not None
    return [output.detach(), hidden.grad, linear.weight.grad]


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 7), (1, 1)])
def test_outputs_and_gradients_equal_those_of_a_masked_weight(sparsity: float, shape: tuple[int, ...]) -> None:
    linear = pruned(sparsity)
    assert linear.computes_sparse and linear.mask is not None
    weight = (linear.weight.detach() * linear.mask).double().requires_grad_()
    hidden = seeded(*shape, INPUTS, seed=1).double().requires_grad_()
    output = F.linear(hidden, weight)
    output.backward(seeded(*shape, OUTPUTS, seed=2).double())
    assert weight.grad is not None
    for mine, theirs in zip(passes(linear, *shape), (output, hidden.grad, weight.grad * linear.mask), strict=True):
        assert theirs is not None and mine.is_contiguous()
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("csr_from", [NEVER, ALWAYS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.7, 0.9, 1.0])
def test_a_vector_computes_what_the_dense_weight_does(sparsity: float, dtype: torch.dtype, csr_from: float) -> None:
    masked, vector = pruned(sparsity, csr_from, dtype), pruned(sparsity, csr_from, dtype)
    vector.compress()
    assert vector.is_compressed and vector.computes_sparse == (csr_from == ALWAYS and sparsity < 1.0)
    first, second = passes(masked, 2, 7), passes(vector, 2, 7)
    assert vector.index is not None
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert torch.equal(first[2].flatten()[vector.index.long()], second[2])
    assert torch.equal(vector.dense_weight(), masked.weight)


def test_a_backward_pass_in_two_parts_gives_the_same_gradients() -> None:
    linear = PrunableLinear(nn.Parameter(seeded(WIDTH, WIDTH)), ALWAYS, SIDE)
    linear.prune(in_blocks(seeded(WIDTH // SIDE, WIDTH // SIDE) > 0))
    linear.compress()
    assert check_same(nn.Sequential(linear), inputs(2, 5, WIDTH)) == {"0.weight"}


def largest_blocks(weights: list[torch.Tensor], keep: int) -> list[torch.Tensor]:
    """Select blocks by sorting all: largest weight first, then layer and position. Return masks."""
    scores = [w.float().abs().unfold(0, SIDE, SIDE).unfold(1, SIDE, SIDE).amax((2, 3)) for w in weights]
    every = torch.cat([score.flatten() for score in scores])
    stays = torch.zeros(len(every), dtype=torch.bool)
    stays[every.argsort(descending=True, stable=True)[:keep]] = True
    split = stays.split([score.numel() for score in scores])
    return [in_blocks(part.view(score.shape)) for part, score in zip(split, scores)]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_blocks_with_the_largest_weights_stay(dtype: torch.dtype, compress: bool) -> None:
    """Several prunings in turn: what is pruned stays pruned, and a vector is pruned as its dense weight is."""

    def linear(layer: int, place: int, *shape: int) -> PrunableLinear:
        weight = seeded(*shape, seed=10 * layer + place).round(decimals=1).to(dtype)
        return PrunableLinear(nn.Parameter(weight), NEVER, SIDE)

    layers = {layer: [linear(layer, 0, 8, 12), linear(layer, 1, 16, 4)] for layer in (1, 2)}
    flat = [linear for members in layers.values() for linear in members]
    for keep in (20, 11, 3, 0):
        before = [linear.dense_weight().clone() for linear in flat]
        expected = [weight * mask for weight, mask in zip(before, largest_blocks(before, keep))]
        selection = select_largest(layers, keep, num_layers=3, sum_over_stages=torch.clone)
        for number, members in layers.items():
            for linear, mask in zip(members, selection.masks(number, members), strict=True):
                linear.prune(mask)
                if compress and linear.mask is not None:
                    linear.compress()
        assert all(torch.equal(linear.dense_weight(), weight) for linear, weight in zip(flat, expected, strict=True))
        assert sum(linear.kept for linear in flat) == keep * SIDE**2


def test_places_of_blocks_are_in_the_order_of_their_first_elements() -> None:
    keep = torch.tensor([[False, True, True], [True, False, False]])
    index = in_blocks(keep).flatten().nonzero().squeeze(1).int()
    places = places_of_blocks(index, (2 * SIDE, 3 * SIDE), SIDE)
    assert index[places[:, 0, 0]].tolist() == [SIDE, 2 * SIDE, SIDE * 3 * SIDE]
    assert sorted(places.flatten().tolist()) == list(range(len(index)))


def test_blocks_that_do_not_divide_a_weight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.pruning.*block_size 48 should divide hidden_size, 128"):
        parse_block(ModelConfig, {"pruning": {"block_size": 48}}, "model")
    with pytest.raises(ConfigError, match="block_size = 7: does not divide a weight of 24 x 20"):
        PrunableLinear(nn.Parameter(seeded(OUTPUTS, INPUTS)), block_size=7)
