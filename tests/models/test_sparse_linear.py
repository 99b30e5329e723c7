import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_dynmo.models.pruning.kernels import can_csr
from ds_dynmo.models.pruning.sparse_linear import PrunableConv1D, PrunableLinear


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


SHAPES: list[tuple[int, ...]] = [(7,), (2, 7), (2, 3, 7), (1, 1)]
either = pytest.mark.parametrize("csr_from", [NEVER, ALWAYS], ids=["dense", "CSR"])


@either
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 1.0])
def test_outputs_and_gradients_equal_those_of_a_masked_weight(sparsity: float, csr_from: float) -> None:
    for shape in SHAPES:
        linear = pruned(sparsity, csr_from)
        assert linear.computes_sparse == (csr_from == ALWAYS and sparsity < 1)
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
        if linear.computes_sparse or sparsity == 1:
            assert not linear.weight.grad[~linear.mask].any()
        assert linear.kept == round((1 - sparsity) * 480)


def test_a_fully_pruned_layer_computes_no_product() -> None:
    for dtype in (torch.float32, torch.bfloat16):
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


@either
def test_inputs_without_gradients_and_frozen_weights(csr_from: float) -> None:
    linear = pruned(0.8, csr_from)
    linear(seeded(3, 20)).sum().backward()
    assert linear.weight.grad is not None
    linear.weight.grad = None
    linear.requires_grad_(False)
    hidden = seeded(3, 20).requires_grad_()
    linear(hidden).sum().backward()
    assert hidden.grad is not None and linear.weight.grad is None


@either
def test_before_pruning_it_is_a_linear_layer(csr_from: float) -> None:
    linear = PrunableLinear(nn.Parameter(seeded(24, 20)), csr_from)
    hidden = seeded(3, 20, seed=1)
    assert torch.equal(linear(hidden), F.linear(hidden, linear.weight)) and linear.kept == 480


def test_bf16_stays_dense() -> None:
    linear = PrunableLinear(nn.Parameter(seeded(24, 20).bfloat16()), ALWAYS)
    linear.prune(seeded(24, 20, seed=3) > 1)
    assert not linear.computes_sparse
    linear(seeded(3, 20).bfloat16()).sum().backward()
    single = pruned(0.9, ALWAYS)
    assert single.computes_sparse
    single.bfloat16()  # as when a checkpoint is loaded into a bf16 run
    assert not single.computes_sparse
    single(seeded(3, 20).bfloat16()).sum().backward()


def test_pruning_again_replaces_the_structure() -> None:
    """And a copy computes the same."""
    linear = pruned(0.5, ALWAYS)
    mask = pruned(0.9, NEVER).mask
    assert mask is not None
    linear.prune(mask)
    hidden = seeded(3, 20)
    torch.testing.assert_close(linear(hidden), F.linear(hidden, seeded(24, 20) * mask), rtol=1e-5, atol=1e-5)
    assert torch.equal(copy.deepcopy(linear)(hidden), linear(hidden))


@either
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


# -- the vector of kept values -----------------------------------------------------------------------------


@either
@pytest.mark.parametrize("sparsity", [0.5, 0.9, 1.0])
def test_a_vector_computes_what_the_dense_weight_does(sparsity: float, csr_from: float) -> None:
    for shape in SHAPES:
        masked, vector = pruned(sparsity, csr_from), pruned(sparsity, csr_from)
        vector.compress()
        assert vector.mask is None and vector.index is not None and vector.computes_sparse == masked.computes_sparse
        results = []
        for linear in (masked, vector):
            hidden = seeded(*shape, 20, seed=1).requires_grad_()
            output = linear(hidden)
            output.backward(seeded(*shape, 24, seed=2))
            assert linear.weight.grad is not None
            results.append((output, hidden.grad, linear.weight.grad))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        assert torch.equal(results[0][2].view(-1)[vector.index.long()], results[1][2])
        assert vector.kept == masked.kept == vector.weight.numel()
        assert torch.equal(vector.dense_weight(), masked.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("kind", [PrunableLinear, PrunableConv1D])
def test_a_vector_beside_a_bias_computes_what_the_librarys_layer_does(
    kind: type[PrunableLinear], is_contiguous: bool, sparsity: float, dtype: torch.dtype
) -> None:
    """Also while it is dense, in training and in a sum that is longer than a block of the product."""
    inputs, outputs = 700, 24
    bias, given, gradient = seeded(outputs, seed=3), seeded(3, 7, inputs, seed=1), seeded(3, 7, outputs, seed=2)
    if kind is PrunableLinear:
        library: nn.Module = nn.Linear(inputs, outputs)
    else:
        library = pytest.importorskip("transformers.pytorch_utils").Conv1D(outputs, inputs)
    weight = seeded(*library.weight.shape)
    mask = weight.abs() >= weight.abs().flatten().quantile(sparsity) if sparsity < 1 else weight.abs() < 0
    library.load_state_dict({"weight": weight * mask, "bias": bias})
    library.to(dtype)
    masked = kind(nn.Parameter(weight.to(dtype)), bias=nn.Parameter(bias.to(dtype)))
    masked.prune(mask)
    vector = copy.deepcopy(masked)
    vector.compress()
    results = []
    for linear in (library, masked, vector):
        hidden = given.to(dtype).requires_grad_()
        used = hidden * 1 if is_contiguous else hidden.repeat(1, 1, 2)[..., :inputs]
        assert used.is_contiguous() == is_contiguous
        output = linear(used)
        output.backward(gradient.to(dtype))
        results.append((output, hidden.grad, linear.bias.grad, linear.weight.grad))
    assert vector.index is not None
    for found, places in ((results[1], ...), (results[2], vector.index.long())):
        for mine, theirs in zip(found[:3], results[0][:3], strict=True):
            assert torch.equal(mine, theirs)
        if sparsity < 1 or places is not ...:
            wanted = results[0][3] if places is ... else results[0][3].flatten()[places]
            assert torch.equal(found[3], wanted)


@pytest.mark.parametrize(("sparsity", "limit"), [(0.9, 0.15), (0.97, 0.05)])
def test_bytes_of_a_layer_fall_with_sparsity(sparsity: float, limit: float) -> None:
    held = []
    for share in (0.0, sparsity):
        linear = pruned(share, ALWAYS, 128, 96) if share else PrunableLinear(nn.Parameter(seeded(128, 96)))
        if share:
            assert linear.would_shrink(linear.kept)
            linear.compress()
        optimizer = torch.optim.AdamW(linear.parameters())
        linear(seeded(4, 96)).sum().backward()
        optimizer.step()
        assert linear.weight.grad is not None
        moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        tensors = [linear.weight, linear.weight.grad, *moments, *linear.buffers()]
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
    assert held[1] <= limit * held[0]


def test_from_where_a_vector_is_smaller() -> None:
    single = PrunableLinear(nn.Parameter(seeded(24, 20)))
    assert single.would_shrink(239) and not single.would_shrink(240)
    half = PrunableLinear(nn.Parameter(seeded(24, 20).bfloat16()))
    assert half.would_shrink(159) and not half.would_shrink(160)
    single.prune(single.weight.detach().abs() > 1)
    single.compress()
    assert single.would_shrink(single.kept - 1) and not single.would_shrink(single.kept)


def test_a_dense_transient_counts_as_workspace() -> None:
    linear = pruned(0.9, NEVER)
    assert linear.workspace_bytes == 0
    linear.compress()
    assert linear.workspace_bytes == 24 * 20 * 4
    linear.csr_from = ALWAYS
    assert linear.workspace_bytes == 0


def test_autocast_casts_a_vector_as_it_does_a_weight() -> None:
    plain, vector = pruned(0.9, NEVER), pruned(0.9, ALWAYS)
    vector.compress()
    hidden = seeded(7, 20, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        expected, output = plain(hidden), vector(hidden)
    assert output.dtype == torch.bfloat16 and torch.equal(output, expected)
    output.sum().backward()
    assert vector.weight.grad is not None and vector.weight.grad.dtype == torch.float32


def test_whether_there_is_csr_does_not_depend_on_who_asks_first() -> None:
    found = []
    for enabled in (True, False):
        can_csr.cache_clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(can_csr(torch.float32, torch.device("cpu")))
    assert found[0] is found[1]
