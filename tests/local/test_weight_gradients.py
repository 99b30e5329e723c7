"""A backward pass in two parts gives what one pass gives, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ds_dynmo.engine.pipeline.weight_gradients import WeightGradients
from ds_dynmo.errors import ConfigError
from ds_dynmo.weight_gradients import defer_weight_gradient

WIDTH = 16
Passes = list[tuple[torch.Tensor, torch.Tensor]]


def inputs(*shape: int, dtype: torch.dtype = torch.float32, count: int = 3) -> Passes:
    """Make inputs and output gradients of several micro-batches."""
    generator = torch.Generator().manual_seed(len(shape))
    return [
        (torch.randn(*shape, generator=generator).to(dtype), torch.randn(*shape, generator=generator).to(dtype))
        for _ in range(count)
    ]


def in_one(model: nn.Module, passes: Passes) -> list[Any]:
    found = []
    for input, gradient in passes:
        entering = input.clone().requires_grad_()
        output = model(entering)
        output.backward(gradient)
        found.append((output.detach(), entering.grad))
    return found


def in_two(model: nn.Module, passes: Passes, lag: int = 1) -> list[Any]:
    """Run the second part of each pass after the first part of the ``lag`` passes that follow it."""
    gradients, found = WeightGradients(), []
    with gradients.splitting(model.modules()):
        for number, (input, gradient) in enumerate(passes):
            entering = input.clone().requires_grad_()
            with gradients.forward_pass(split=True):
                output = model(entering)
            with gradients.first_part():
                output.backward(gradient)
            found.append((output.detach(), entering.grad))
            if number >= lag:
                finish(gradients)
        for _ in range(min(lag, len(passes))):
            finish(gradients)
    return found


def finish(gradients: WeightGradients) -> None:
    for root in gradients.second_part().roots():
        root.backward()


def check_same(model: nn.Module, passes: Passes, lag: int = 1) -> None:
    other = copy.deepcopy(model)
    for one, two in zip(in_one(model, passes), in_two(other, passes, lag), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH, bias), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, WIDTH), (7, WIDTH), (1, 1, WIDTH), (2, 5, WIDTH), (4, 64, WIDTH)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_split(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    check_same(mlp(bias).to(dtype), inputs(*shape, dtype=dtype), lag=2)


class Apart(nn.Module):
    """A model whose parts are joined by a function."""

    def __init__(self, join: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.join, self.parts = join, nn.ModuleList(parts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.join(input, *self.parts)


class Half(nn.Linear):
    """Computes the result of nn.Linear in another way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 0.5


class Same(nn.Linear):
    """Computes as nn.Linear."""


def frozen_weight(model: nn.Module) -> nn.Module:
    model[0].weight.requires_grad_(False)  # type: ignore[index, operator, union-attr]
    return model


def shared(kind: type[nn.Module]) -> nn.Module:
    one, other = nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH)
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a subclass": lambda: nn.Sequential(Same(WIDTH, WIDTH), nn.Tanh()),
    "a subclass with a forward of its own": lambda: nn.Sequential(Half(WIDTH, WIDTH), nn.Tanh()),
    "a parametrised weight": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval(),
    "a frozen weight": lambda: frozen_weight(mlp()),
    "a module used twice": lambda: Apart(lambda x, one: one(torch.tanh(one(x))), nn.Linear(WIDTH, WIDTH)),
    "a weight of two modules": lambda: shared(nn.Linear),
    "a weight of two kinds of modules": lambda: shared(Half),
    "a weight in a function too": lambda: Apart(
        lambda x, one: nn.functional.linear(torch.tanh(one(x)), one.weight), nn.Linear(WIDTH, WIDTH)
    ),
    "three branches": lambda: Apart(
        lambda x, a, b, c: a(x) + b(x) * torch.sigmoid(c(x)), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    ),
    "an input that is not contiguous": lambda: Apart(
        lambda x, one: one(x.transpose(0, 1)).transpose(0, 1), nn.Linear(WIDTH, WIDTH)
    ),
    "four dimensions": lambda: Apart(lambda x, one: one(x[None])[0], nn.Linear(WIDTH, WIDTH)),
    "attention": lambda: Apart(
        lambda x, one: one(x, x, x, need_weights=False)[0], nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    ),
    "reentrant checkpointing": lambda: Apart(lambda x, one: checkpoint(one, x, use_reentrant=True), mlp()),
    "checkpointing": lambda: Apart(lambda x, one: checkpoint(one, x, use_reentrant=False), mlp()),
    "inputs that need no gradient": lambda: Apart(lambda x, one: one(x.detach()) + 0 * x, mlp()),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lag", [0, 1])
def test_gradients_equal_those_of_one_pass(name: str, lag: int) -> None:
    torch.manual_seed(1)
    check_same(MODELS[name](), inputs(2, 5, WIDTH), lag)


def test_a_conv1d_of_hugging_face_is_split() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    check_same(nn.Sequential(conv1d(2 * WIDTH, WIDTH), nn.GELU(), conv1d(WIDTH, 2 * WIDTH)), inputs(2, 5, WIDTH))


def test_under_autocast_nothing_is_deferred() -> None:
    model = mlp()
    gradients = WeightGradients()
    with gradients.splitting(model.modules()), torch.autocast("cpu", torch.bfloat16):
        with gradients.forward_pass(split=True):
            output = model(torch.randn(2, WIDTH))
        with gradients.first_part():
            output.sum().backward()
        assert not gradients.second_part()
    assert model[0].weight.grad is not None  # type: ignore[index, union-attr]


def test_weight_gradients_come_in_the_second_part_and_hooks_run_once() -> None:
    model, seen = nn.Linear(WIDTH, WIDTH), []
    model.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    gradients = WeightGradients()
    with gradients.splitting([model]):
        for _ in range(2):
            with gradients.forward_pass(split=True):
                output = model(torch.randn(3, WIDTH))
            with gradients.first_part():
                output.sum().backward()
        assert model.weight.grad is None and not seen
        finish(gradients)
        assert len(seen) == 1
        finish(gradients)
    assert len(seen) == 2


def test_a_hook_that_would_see_a_gradient_twice_is_refused() -> None:
    """The weight is used by its module and in a penalty."""
    model = nn.Linear(WIDTH, WIDTH)
    model.weight.register_hook(lambda gradient: gradient.sign())
    gradients = WeightGradients()
    with gradients.splitting([model]):
        with gradients.forward_pass(split=True):
            output = model(torch.randn(3, WIDTH)).sum() + model.weight.square().sum()
        with gradients.first_part(), pytest.raises(ConfigError, match=r"shape \[16, 16\] has a hook of yours"):
            output.backward()


def test_a_pass_in_one_runs_the_modules_own_forward() -> None:
    model = mlp()
    gradients = WeightGradients()
    with gradients.splitting(model.modules()):
        with gradients.forward_pass(split=False):
            output = model(torch.randn(3, WIDTH))
        output.sum().backward()
    assert model[0].weight.grad is not None  # type: ignore[index, union-attr]


def test_modules_are_restored_afterwards() -> None:
    model = mlp()
    before = [dict(vars(module)) for module in model.modules()]
    with WeightGradients().splitting(model.modules()):
        assert "forward" in vars(model[0])  # type: ignore[index]
    assert [vars(module).keys() for module in model.modules()] == [b.keys() for b in before]
    assert not any(p._backward_hooks for p in model.parameters())


class Scale(torch.autograd.Function):
    """A kernel of the user's own."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, hidden: tuple[nn.Parameter], anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.hidden = hidden
        return input * hidden[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (input,), (weight,) = ctx.saved_tensors, ctx.hidden
        defer_weight_gradient(weight, lambda: (input * gradient).sum(0))
        return gradient * weight, None, None


def test_a_users_kernel_defers_in_a_first_part_only() -> None:
    weight, anchor = nn.Parameter(torch.arange(1.0, 4.0)), torch.empty(0, requires_grad=True)
    seen: list[str] = []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    Scale.apply(torch.ones(2, 3), (weight,), anchor).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0)) and seen == ["accumulated"]
    gradients = WeightGradients()
    with gradients.splitting([]):
        output = Scale.apply(torch.ones(2, 3), (weight,), anchor)
        with gradients.first_part():
            output.sum().backward()
        assert torch.equal(weight.grad, torch.full((3,), 2.0))
        finish(gradients)
    assert torch.equal(weight.grad, torch.full((3,), 4.0)) and len(seen) == 2
