"""A backward pass in two parts gives what one pass gives, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ds_dynmo
from ds_dynmo.engine.comm.message_forms import MessageForm
from ds_dynmo.engine.run.messages import Entrance, packed_gradients
from ds_dynmo.engine.run.weight_gradients import DeferredGradients, WeightGradients
from ds_dynmo.errors import ConfigError
from ds_dynmo.weight_gradients import defer_weight_gradient
from tests.support.pages import code_blocks
from tests.support.split_passes import WIDTH, check_same, finish, in_one, in_two, inputs, mlp, same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, WIDTH), (7, WIDTH), (1, 1, WIDTH), (2, 5, WIDTH), (4, 64, WIDTH)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_split(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    names = {"0.weight", "2.weight", *(["0.bias", "2.bias"] if bias else [])}
    assert check_same(mlp(bias).to(dtype), inputs(*shape, dtype=dtype), lag=2) == names


def test_weight_gradients_come_in_the_second_part_and_hooks_run_once() -> None:
    model, seen = nn.Linear(WIDTH, WIDTH), []
    model.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    gradients = WeightGradients()
    with gradients.splitting([model]):
        for micro_batch in range(2):
            with gradients.forward_pass(split=True):
                output = model(torch.randn(3, WIDTH))
            with gradients.first_part((0, micro_batch)):
                output.sum().backward()
        assert model.weight.grad is None and not seen
        finish(gradients)
        assert len(seen) == 1
        finish(gradients, 1)
        assert len(seen) == 2
        with gradients.forward_pass(split=False):  # the module's own forward
            output = model(torch.randn(3, WIDTH))
        output.sum().backward()
        assert len(seen) == 3


def test_a_hook_that_would_see_a_gradient_twice_is_refused() -> None:
    """The weight is used by its module and in a penalty."""
    model = nn.Linear(WIDTH, WIDTH)
    model.weight.register_hook(lambda gradient: gradient.sign())
    gradients = WeightGradients()
    with gradients.splitting([model]):
        with gradients.forward_pass(split=True):
            output = model(torch.randn(3, WIDTH)).sum() + model.weight.square().sum()
        with gradients.first_part((0, 0)), pytest.raises(ConfigError, match=r"shape \[16, 16\] has a hook of yours"):
            output.backward()


def test_rows_are_added_up_as_by_autograd() -> None:
    """A sum of zeros is negative only where all of them are."""
    zeros = -torch.zeros(3)
    for rows in ([1], [1, 1], [0, 1], [1, None]):
        weights = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
        (sum((weights[0] if row is None else weights[0][row]) * zeros for row in rows)).sum().backward()  # type: ignore[union-attr]
        deferred = DeferredGradients()
        for row in reversed(rows):
            deferred.add(weights[1], row, lambda row=row: zeros.expand(2, 3) if row is None else zeros)
        for root in deferred.roots():
            root.backward()
        assert same_bits(weights[0].grad, weights[1].grad), rows


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
        with gradients.first_part((0, 0)):
            output.sum().backward()
        assert torch.equal(weight.grad, torch.full((3,), 2.0))
        finish(gradients)
    assert torch.equal(weight.grad, torch.full((3,), 4.0)) and len(seen) == 2


# -- what is made of the same memory ---------------------------------------------------------------------


class Placed(nn.Module):
    """Adds places of its own to a product: for one sample, both get the same gradient."""

    def __init__(self, product_first: bool) -> None:
        super().__init__()
        self.product, self.product_first = nn.Linear(WIDTH, WIDTH), product_first
        self.places = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.product_first:
            return torch.tanh(self.product(input) + self.places[None])
        return torch.tanh(self.places[None] + self.product(input))


def test_later_micro_batches_do_not_add_to_a_gradient_that_waits() -> None:
    for product_first in (True, False):
        deferred = check_same(Placed(product_first), inputs(1, 5, WIDTH), lag=2)
        assert deferred == {"product.weight", "product.bias"}, product_first


def test_gradients_kept_by_autograd_are_nobody_elses() -> None:
    """With no pass in two parts either: messages are on their way while later passes run."""
    weight, entrance, received = nn.Parameter(torch.zeros(2, WIDTH)), Entrance(), torch.ones(2, WIDTH)
    (entering,) = entrance.enter([received], MessageForm.of([received], [True], in_tuple=False))
    (entering.view(1, 2, WIDTH) + weight.view(1, 2, WIDTH)).tanh().sum().backward()
    gradients = entrance.gradients(last_layer=3)
    (sent,) = packed_gradients(gradients, MessageForm.of_gradients(gradients))
    before = sent.clone()
    (weight * 3).sum().backward()
    assert torch.equal(sent, before)


class Reusing(nn.Module):
    """Writes each micro-batch's input over the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("room", torch.zeros(1, 5, WIDTH))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(self.room.copy_(input.detach())) + input


class Halving(torch.autograd.Function):
    """Changes the gradient that it is given, which autograd asks nobody to do."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.mul_(0.5)


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        half = Halving.apply(input)
        return torch.tanh(self.product(input) + half)


@pytest.mark.parametrize("kind", [Reusing, Halved])
def test_what_waits_and_is_changed_in_place_is_an_error(kind: type[nn.Module]) -> None:
    passes = inputs(1, 5, WIDTH)
    check_same(kind(), passes, lag=0) if kind is Reusing else in_one(kind(), passes)
    with pytest.raises(ConfigError, match=r'of 5 rows, was changed in place .* dynmo.schedule.kind to "1f1b"'):
        in_two(kind(), passes)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(torch.complex(input, 1 - input)).abs()


def test_products_of_complex_numbers_run_in_one() -> None:
    assert check_same(Complex(), inputs(2, 5, WIDTH)) == set()


def test_the_printed_kernel_has_the_gradients_of_autograd() -> None:
    names: dict[str, Any] = {"torch": torch, "ds_dynmo": ds_dynmo}
    exec(code_blocks("internals/schedules.md", "Split backward passes", "python")[0], names)
    given, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    names["Scale"].apply(given, (weight,), torch.empty(0, requires_grad=True)).square().sum().backward()
    expected = torch.autograd.grad((given * weight).square().sum(), (given, weight))
    assert given.grad is not None and torch.equal(given.grad, expected[0])
    assert weight.grad is not None and torch.allclose(weight.grad, expected[1])
