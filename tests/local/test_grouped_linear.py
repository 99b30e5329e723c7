"""Products of all groups in one kernel equal those of a loop, and the loop is used where there is no kernel."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from ds_dynmo.models.moe import grouped_linear as module
from ds_dynmo.models.moe.grouped_linear import grouped_linear

COUNTS = [5, 0, 9, 1, 0, 17]
WIDTHS = [(16, 24), (64, 8), (6, 5), (7, 12)]  # inputs, outputs; the last two are not aligned
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(module._grouped_mm is None, reason="this torch has no grouped_mm")


def computed(dtype: torch.dtype, inputs: int, outputs: int, offset: int = 0) -> list[torch.Tensor]:
    """Return the products and their gradients. Operands begin ``offset`` elements after an aligned place."""

    def drawn(*shape: int) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        values = torch.randn(numel, generator=generator).to(dtype)
        return torch.cat([values[:offset], values])[offset:].view(shape).requires_grad_()  # cat's result is aligned

    generator = torch.Generator().manual_seed(0)
    rows, weight = drawn(sum(COUNTS), inputs), drawn(len(COUNTS), outputs, inputs)
    made = grouped_linear(rows, weight, COUNTS)
    return [made.detach(), *torch.autograd.grad(made, (rows, weight), drawn(*made.shape).detach())]


def without_kernel(monkeypatch: pytest.MonkeyPatch, *args: Any) -> list[torch.Tensor]:
    with monkeypatch.context() as context:
        context.setattr(module, "_grouped_mm", None)
        return computed(*args)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the arguments of the kernel's calls, but for those that try it."""
    for device, dtype in product((CPU, torch.device("meta")), DTYPES):
        module._has_grouped_products(dtype, device)
    seen: list[tuple[Any, ...]] = []
    kernel = module._grouped_mm
    assert kernel is not None
    monkeypatch.setattr(module, "_grouped_mm", lambda *args, **named: (seen.append(args), kernel(*args, **named))[1])
    return seen


@needs_kernel
@pytest.mark.parametrize(("inputs", "outputs"), WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_loop_compute_the_same_bits(
    dtype: torch.dtype, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = without_kernel(monkeypatch, dtype, inputs, outputs)
    seen = calls(monkeypatch)
    found = computed(dtype, inputs, outputs)
    aligned = inputs * dtype.itemsize % 16 == 0 == outputs * dtype.itemsize % 16
    assert len(seen) == (3 if aligned and dtype != torch.float64 else 0)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not found[2][1].any()  # the weight's gradient of a group without rows


@needs_kernel
def test_operands_that_lie_anywhere_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch)
    found = computed(torch.float32, 16, 24, offset=1)
    assert all(operand.data_ptr() % 16 == 0 for call in seen for operand in call) and len(seen) == 3
    assert all(torch.equal(*pair) for pair in zip(found, computed(torch.float32, 16, 24)))


@needs_kernel
def test_an_expanded_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = torch.randn(32, 16, requires_grad=True), torch.randn(6, 8, 16, requires_grad=True)
    seen = calls(monkeypatch)
    grouped_linear(rows, weight, COUNTS).sum().backward()
    assert rows.grad is not None and len(seen) == 3
    torch.testing.assert_close(rows.grad[5:14], weight[2].sum(0).expand(9, 16))


@needs_kernel
def test_no_rows_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch)
    rows, weight = torch.empty(0, 16, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True)
    made = grouped_linear(rows, weight, [0, 0])
    made.sum().backward()
    assert made.shape == (0, 8) and weight.grad is not None and not weight.grad.any() and not seen


@needs_kernel
@pytest.mark.parametrize(("device", "kernels"), [("cpu", DTYPES[:3]), ("meta", [torch.bfloat16])])
def test_each_device_is_asked_for_its_dtypes(device: str, kernels: list[torch.dtype]) -> None:
    """On the device "meta" torch checks what its CUDA kernel takes."""
    found = [dtype for dtype in DTYPES if module._has_grouped_products(dtype, torch.device(device))]
    assert found == kernels


@needs_kernel
def test_operands_pass_the_checks_of_the_cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" checks shapes, strides and dtypes as CUDA does, and computes nothing."""
    seen = calls(monkeypatch)
    rows = torch.empty(sum(COUNTS), 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(len(COUNTS), 24, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    made = module._GroupedLinear.apply(rows, weight, COUNTS)  # there is no autocast for "meta"
    of_rows, of_weight = torch.autograd.grad(made, (rows, weight), torch.empty_like(made))
    assert (made.shape, of_rows.shape, of_weight.shape) == ((32, 24), rows.shape, weight.shape)
    assert [[operand.shape for operand in call] for call in seen] == [
        [(32, 16), (6, 16, 24)],
        [(32, 24), (6, 24, 16)],
        [(24, 32), (32, 16)],
    ]


@needs_kernel
def test_a_device_without_the_kernel_gets_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, seen = computed(torch.float32, 16, 24), calls(monkeypatch)
    monkeypatch.setattr(module, "_has_grouped_products", lambda dtype, device: False)
    assert all(torch.equal(*pair) for pair in zip(computed(torch.float32, 16, 24), expected, strict=True))
    assert not seen


@needs_kernel
def test_a_kernel_for_which_the_host_waits_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays a device whose module can refuse such waits, as ``torch.cuda`` can."""
    modes, kernel = ["warn"], module._grouped_mm
    assert kernel is not None

    def waits(*args: Any, **named: Any) -> Any:
        assert modes[-1] != "error"
        return kernel(*args, **named)

    monkeypatch.setattr(torch.cpu, "get_sync_debug_mode", lambda: modes[-1], raising=False)
    monkeypatch.setattr(torch.cpu, "set_sync_debug_mode", modes.append, raising=False)
    probe = module._has_grouped_products.__wrapped__
    assert probe(torch.float32, CPU)
    monkeypatch.setattr(module, "_grouped_mm", waits)
    assert not probe(torch.float32, CPU)
    assert modes == ["warn", "error", "warn", "error", "warn"]
