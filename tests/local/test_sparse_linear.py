import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_dynmo.models.pruning.sparse_linear import PrunableLinear, csr_is_faster, csr_structure


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pruned(sparsity: float, csr_from: float, outputs: int = 24, inputs: int = 20) -> PrunableLinear:
    linear = PrunableLinear(nn.Parameter(seeded(outputs, inputs)), csr_from)
    order = linear.weight.detach().abs().flatten().argsort()
    mask = torch.ones(outputs * inputs, dtype=torch.bool)
    mask[order[: round(sparsity * len(mask))]] = False
    linear.prune(mask.view(outputs, inputs))
    return linear


NEVER, ALWAYS = 2.0, 0.0


@pytest.mark.parametrize("csr_from", [NEVER, ALWAYS])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7), (1, 1)])
def test_outputs_and_gradients_equal_those_of_a_masked_weight(
    sparsity: float, csr_from: float, shape: tuple[int, ...]
) -> None:
    linear = pruned(sparsity, csr_from)
    assert linear.computes_in_csr == (csr_from == ALWAYS and sparsity < 1)
    assert linear.mask is not None
    hidden = seeded(*shape, 20, seed=1).requires_grad_()
    gradient = seeded(*shape, 24, seed=2)
    linear(hidden).backward(gradient)

    weight = seeded(24, 20).double().requires_grad_()
    given = hidden.detach().double().requires_grad_()
    wanted = F.linear(given, weight * linear.mask)
    wanted.backward(gradient.double())
    assert linear.weight.grad is not None and weight.grad is not None
    mine_left = linear.weight.grad * linear.mask
    for mine, theirs in ((linear(hidden), wanted), (hidden.grad, given.grad), (mine_left, weight.grad)):
        assert mine is not None and theirs is not None
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-5)
        assert mine.is_contiguous()
    if linear.computes_in_csr or sparsity == 1:
        assert not linear.weight.grad[~linear.mask].any()
    assert linear.kept == round((1 - sparsity) * 480)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fully_pruned_layer_computes_no_product(dtype: torch.dtype) -> None:
    linear = PrunableLinear(nn.Parameter(seeded(24, 20).to(dtype)))
    linear.prune(torch.zeros(24, 20, dtype=torch.bool))
    with FlopCounterMode(display=False) as counter:
        output = linear(seeded(7, 20).to(dtype).requires_grad_())
        output.sum().backward()
    assert counter.get_total_flops() == 0
    assert output.dtype == dtype and linear.weight.grad is not None and not linear.weight.grad.any()


def test_while_dense_it_runs_the_operators_of_a_linear_layer() -> None:
    """It computes no further product and applies no mask, so it is as fast."""
    linear = pruned(0.8, NEVER)
    plain = nn.Linear(20, 24, bias=False)
    plain.weight = nn.Parameter(linear.weight.detach().clone())
    results, operators = [], []
    for layer in (linear, plain):
        hidden = seeded(7, 20, seed=1).requires_grad_()
        with torch.profiler.profile() as profile:
            output = layer(hidden)
            output.square().sum().backward()
        results.append((output, hidden.grad, layer.weight.grad))
        operators.append({event.key: event.count for event in profile.key_averages() if event.key.startswith("aten::")})
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert operators[0] == operators[1]


def test_in_csr_pruned_elements_do_not_count_whatever_their_value() -> None:
    linear = pruned(0.8, ALWAYS)
    results = []
    for alive in (False, True):
        if alive:
            assert linear.mask is not None
            linear.weight.detach()[~linear.mask] = 5.0
        hidden = seeded(7, 20, seed=1).requires_grad_()
        linear.weight.grad = None
        output = linear(hidden)
        output.square().sum().backward()
        results.append((output, hidden.grad, linear.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("csr_from", [NEVER, ALWAYS])
def test_inputs_without_gradients_and_frozen_weights(csr_from: float) -> None:
    linear = pruned(0.8, csr_from)
    linear(seeded(3, 20)).sum().backward()
    assert linear.weight.grad is not None
    linear.weight.grad = None
    linear.requires_grad_(False)
    hidden = seeded(3, 20).requires_grad_()
    linear(hidden).sum().backward()
    assert hidden.grad is not None and linear.weight.grad is None


def test_the_rows_of_the_structure() -> None:
    mask = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1]]).bool()
    crow, col, index = csr_structure(mask)
    assert (crow.tolist(), col.tolist(), index.tolist()) == ([0, 1, 1, 3], [1, 0, 2], [1, 6, 8])


@pytest.mark.parametrize("csr_from", [NEVER, ALWAYS])
def test_before_pruning_it_is_a_linear_layer(csr_from: float) -> None:
    linear = PrunableLinear(nn.Parameter(seeded(24, 20)), csr_from)
    hidden = seeded(3, 20, seed=1)
    assert torch.equal(linear(hidden), F.linear(hidden, linear.weight)) and linear.kept == 480


def test_bf16_stays_dense() -> None:
    linear = PrunableLinear(nn.Parameter(seeded(24, 20).bfloat16()), ALWAYS)
    linear.prune(seeded(24, 20, seed=3) > 1)
    assert not linear.computes_in_csr
    linear(seeded(3, 20).bfloat16()).sum().backward()
    single = pruned(0.9, ALWAYS)
    assert single.computes_in_csr
    single.bfloat16()  # as when a checkpoint is loaded into a bf16 run
    assert not single.computes_in_csr
    single(seeded(3, 20).bfloat16()).sum().backward()


def test_pruning_again_replaces_the_structure() -> None:
    linear = pruned(0.5, ALWAYS)
    mask = pruned(0.9, NEVER).mask
    assert mask is not None
    linear.prune(mask)
    hidden = seeded(3, 20)
    torch.testing.assert_close(linear(hidden), F.linear(hidden, seeded(24, 20) * mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("csr_from", [NEVER, ALWAYS])
def test_optimizer_steps_keep_zeros(csr_from: float) -> None:
    linear = pruned(0.7, csr_from)
    assert linear.mask is not None
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(5):
        optimizer.zero_grad()
        linear(seeded(6, 20, seed=step)).square().sum().backward()
        assert linear.weight.grad is not None
        linear.weight.grad.mul_(linear.mask)
        optimizer.step()
    assert not linear.weight[~linear.mask].any() and linear.weight[linear.mask].all()
    assert not optimizer.state[linear.weight]["exp_avg_sq"][~linear.mask].any()


def test_where_csr_is_faster() -> None:
    assert csr_is_faster(1024, 1024, round(0.05 * 1024**2)) and not csr_is_faster(1024, 1024, round(0.1 * 1024**2))
    assert csr_is_faster(1024, 256, round(0.05 * 1024 * 256))
    assert not csr_is_faster(384, 128, round(0.05 * 384 * 128)) and csr_is_faster(384, 128, 0)
    assert not csr_is_faster(64, 64, 0)


def test_a_copy_computes_the_same() -> None:
    linear = pruned(0.9, ALWAYS)
    assert torch.equal(copy.deepcopy(linear)(seeded(3, 20)), linear(seeded(3, 20)))
