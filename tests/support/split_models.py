"""Models whose backward passes run in one part and in two: all that a model may do with its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.support.split_passes import WIDTH, mlp


class Apart(nn.Module):
    """A model whose parts are joined by a function."""

    def __init__(self, join: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.join, self.parts = join, nn.ModuleList(parts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.join(input, *self.parts)


class Half(nn.Linear):
    """Computes as nn.Linear, but otherwise."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 0.5


class Same(nn.Linear):
    """Computes as nn.Linear."""


class Weights(nn.Module):
    """Uses weights of its own in a function."""

    def __init__(self, use: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.use = use
        self.weights = len(shapes)
        for number, shape in enumerate(shapes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(shape) / 4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.use(input, *(getattr(self, f"w{number}") for number in range(self.weights)))


class Lora(nn.Module):
    """What peft makes of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.base_layer(input, *args, **kwargs) + self.lora_B(self.lora_A(input)) * 0.25


class Doubled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def trains(model: nn.Module, *names: str) -> nn.Module:
    """Train the parameters ``names`` alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return model


def shared(kind: type[nn.Module]) -> nn.Module:
    one, other = linear(), kind(WIDTH, WIDTH)
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


def hooked(register: str, hook: Callable[..., Any]) -> nn.Module:
    model = mlp()
    getattr(model[0], register)(hook)
    return model


def in_place(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(inplace=True))


def with_own_forward() -> nn.Module:
    """As accelerate wraps a module."""
    layer = linear()
    plain = layer.forward
    layer.forward = lambda input: plain(input).tanh()  # type: ignore[method-assign]
    return layer


def saliency(input: torch.Tensor, one: nn.Module, other: nn.Module) -> torch.Tensor:
    """Differentiate within a forward pass, with respect to an input: no weight gets a gradient of that."""
    with torch.enable_grad():
        leaf = input.detach().requires_grad_()
        (slope,) = torch.autograd.grad(one(leaf).square().sum(), leaf)
    return other(one(input) * slope)


def local_loss(input: torch.Tensor, one: nn.Module, other: nn.Module) -> torch.Tensor:
    """Go back within a forward pass: all weights get gradients at once."""
    with torch.enable_grad():
        other(input.detach()).square().sum().backward()
    return one(input)


def with_other_weights(input: torch.Tensor, one: nn.Module, other: nn.Module) -> torch.Tensor:
    weights = {"weight": other.weight * 2, "bias": other.bias}
    return one(torch.func.functional_call(one, weights, (input,)))


def per_sample(input: torch.Tensor, one: nn.Module) -> torch.Tensor:
    return torch.func.vmap(one)(input)


def slopes(input: torch.Tensor, one: nn.Module) -> torch.Tensor:
    return one(input) + torch.func.grad(lambda x: one(x).square().sum())(input.detach())


def without_gradient(input: torch.Tensor, one: nn.Module, other: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        target = one(other(input))
    return one(input) * target


class NoGradient(torch.autograd.Function):
    """Gives no gradient at all, unlike zeros."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return None


def recomputed(segments: int, *, reentrant: bool) -> Callable[..., torch.Tensor]:
    """Run one module ``segments`` times, each of them checkpointed."""

    def run(input: torch.Tensor, one: nn.Module) -> torch.Tensor:
        for _ in range(segments):
            input = torch.tanh(checkpoint(one, input, use_reentrant=reentrant))  # type: ignore[assignment]
        return input

    return run


def recomputed_in_between(input: torch.Tensor, one: nn.Module) -> torch.Tensor:
    inner = checkpoint(one, torch.tanh(one(input)), use_reentrant=True)
    return one(torch.tanh(inner))  # type: ignore[arg-type, no-any-return]


def checkpointed(*, reentrant: bool) -> Callable[..., torch.Tensor]:
    """Checkpoint a function of a module's own weights inside the module."""

    def run(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inner: Any = checkpoint(lambda x: torch.tanh(F.linear(x, weight)), input, use_reentrant=reentrant)
        return F.linear(inner, weight)

    return run


def rows_of(*numbers: Any) -> Callable[..., torch.Tensor]:
    """Multiply by some rows of a stacked weight, one after the other."""

    def run(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for number in numbers:
            input = torch.tanh(F.linear(input, weight[number]))
        return input

    return run


WHOLE = {"weight", "bias"}
BOTH = {"0.weight", "0.bias", "2.weight", "2.bias"}
ONE = {"parts.0.weight", "parts.0.bias"}
TWO = {*ONE, "parts.1.weight", "parts.1.bias"}
INNER = {f"parts.0.{name}" for name in BOTH}
STACKED = (3, WIDTH, WIDTH)
MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    # kinds of modules
    "a subclass": (lambda: Same(WIDTH, WIDTH), WHOLE),
    "a subclass with a forward of its own": (lambda: Half(WIDTH, WIDTH), WHOLE),
    "a forward on the module": (with_own_forward, WHOLE),
    "a parametrised weight": (lambda: parametrizations.weight_norm(linear()), set()),
    "a parametrisation of the user's": (
        lambda: parametrize.register_parametrization(linear(), "weight", Doubled()),
        set(),
    ),
    "weight norm by a hook": (lambda: weight_norm(linear()), set()),
    "spectral norm": (lambda: parametrizations.spectral_norm(linear()).eval(), set()),
    "attention": (
        lambda: Apart(
            lambda x, one: one(x, x, x, need_weights=False)[0], nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        ),
        set(),
    ),
    "an adapter": (Lora, {"lora_A.weight", "lora_B.weight"}),
    # what is trained
    "a frozen weight": (lambda: trains(mlp(), "0.bias", "2.weight"), {"0.bias", "2.weight"}),
    "biases alone": (lambda: trains(mlp(), "0.bias", "2.bias"), {"0.bias", "2.bias"}),
    "a frozen layer": (lambda: trains(mlp(), "2.weight", "2.bias"), {"2.weight", "2.bias"}),
    "in evaluation mode": (lambda: mlp().eval(), BOTH),
    # weights in several places
    "a module used twice": (lambda: Apart(lambda x, one: one(torch.tanh(one(x))), linear()), ONE),
    "a weight of two modules": (lambda: shared(nn.Linear), {"0.weight", "0.bias", "2.bias"}),
    "a weight of two kinds of modules": (lambda: shared(Half), set()),
    "a weight in a function too": (
        lambda: Apart(lambda x, one: F.linear(torch.tanh(one(x)), one.weight), linear()),
        ONE,
    ),
    "three branches": (
        lambda: Apart(lambda x, a, b, c: a(x) + b(x) * torch.sigmoid(c(x)), linear(), linear(), linear()),
        {*TWO, "parts.2.weight", "parts.2.bias"},
    ),
    # hooks of modules
    "a hook before forward": (lambda: hooked("register_forward_pre_hook", lambda _, given: (given[0] * 2,)), BOTH),
    "a hook after forward": (lambda: hooked("register_forward_hook", lambda _, given, output: output.tanh()), BOTH),
    "a hook before backward": (
        lambda: hooked("register_full_backward_pre_hook", lambda _, gradients: (gradients[0] * 2,)),
        BOTH,
    ),
    "a hook after backward": (
        lambda: hooked(
            "register_full_backward_hook", lambda _, to_input, gradients: (to_input[0] + gradients[0].sum(),)
        ),
        BOTH,
    ),
    # shapes
    "one dimension": (lambda: Apart(lambda x, one: x + one(x[0, 0]) * one(x[1, 2]), linear()), set()),
    "four dimensions": (lambda: Apart(lambda x, one: one(x[None])[0], linear()), ONE),
    "an input that is not contiguous": (
        lambda: Apart(lambda x, one: one(x.transpose(0, 1)).transpose(0, 1), linear()),
        ONE,
    ),
    "four dimensions that are not contiguous": (
        lambda: Apart(lambda x, one: one(x[None].transpose(1, 2)).transpose(1, 2)[0], linear()),
        ONE,
    ),
    "an input by columns": (lambda: Apart(lambda x, one: x + one(x[0].t().contiguous().t()), linear()), ONE),
    "a bias and an input that is not contiguous": (
        lambda: trains(Apart(lambda x, one: one(x.transpose(0, 1)).transpose(0, 1), linear()), "parts.0.bias"),
        set(),
    ),
    "what torch.func maps over": (lambda: Apart(per_sample, linear()), set()),
    # what happens to outputs
    "an output changed in place": (lambda: in_place(linear()), {"0.weight", "0.bias"}),
    "an output that nothing comes back to": (
        lambda: Apart(lambda x, one, other: one(x) + NoGradient.apply(other(x)), linear(), linear()),
        TWO,
    ),
    "inputs that need no gradient": (lambda: Apart(lambda x, one: one(x.detach()) + 0 * x, mlp()), INNER),
    # passes within passes
    "reentrant checkpointing": (lambda: Apart(recomputed(1, reentrant=True), mlp()), INNER),
    "checkpointing": (lambda: Apart(recomputed(1, reentrant=False), mlp()), INNER),
    "reentrant checkpointing, thrice": (lambda: Apart(recomputed(3, reentrant=True), mlp()), INNER),
    "checkpointing, thrice": (lambda: Apart(recomputed(3, reentrant=False), mlp()), INNER),
    "reentrant checkpointing in between": (lambda: Apart(recomputed_in_between, linear()), ONE),
    "without gradient": (lambda: Apart(without_gradient, linear(), linear()), ONE),
    "a gradient within forward": (lambda: Apart(saliency, linear(), linear()), TWO),
    "a backward pass within forward": (lambda: Apart(local_loss, linear(), linear()), TWO),
    "a gradient by torch.func": (lambda: Apart(slopes, linear()), ONE),
    "other weights": (lambda: Apart(with_other_weights, linear(), linear()), ONE),
    # weights that a module uses in a function
    "a product": (lambda: Weights(lambda x, w, b: F.linear(x, w, b), (WIDTH, WIDTH), (WIDTH,)), {"w0", "w1"}),
    "a product and a penalty": (
        lambda: Weights(lambda x, w: F.linear(x, w) + w.square().sum(), (WIDTH, WIDTH)),
        {"w0"},
    ),
    "a product by another operator": (lambda: Weights(lambda x, w: x @ w.t(), (WIDTH, WIDTH)), set()),
    "a product by a part": (lambda: Weights(lambda x, w: F.linear(x, w[:WIDTH]), (2 * WIDTH, WIDTH)), set()),
    "a product that is recomputed": (lambda: Weights(checkpointed(reentrant=False), (WIDTH, WIDTH)), {"w0"}),
    "a product that is recomputed, reentrant": (lambda: Weights(checkpointed(reentrant=True), (WIDTH, WIDTH)), {"w0"}),
    "rows": (lambda: Weights(rows_of(2, 0, torch.tensor(1)), STACKED), {"w0"}),
    "one row": (lambda: Weights(rows_of(1), STACKED), {"w0"}),
    "one row thrice": (lambda: Weights(rows_of(-1, 2, 2), STACKED), {"w0"}),
    "rows, and all": (
        lambda: Weights(lambda x, w: F.linear(x, w[1]) + F.linear(x, w[0]) * w.mean(0).sum(), STACKED),
        {"w0"},
    ),
    "a row used otherwise too": (lambda: Weights(lambda x, w: F.linear(x, (row := w[1])) + row.sum(), STACKED), {"w0"}),
    "a row with a bias": (lambda: Weights(lambda x, w, b: F.linear(x, w[1], b), STACKED, (WIDTH,)), {"w0", "w1"}),
    "a row with a row as bias": (lambda: Weights(lambda x, w, b: F.linear(x, w[1], b[1]), STACKED, (3, WIDTH)), set()),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


MIXTRAL = {"hidden_size": WIDTH, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2}


def mixtral(experts: str, top_k: int = 2) -> nn.Module:
    """Transformers' layer; ``experts``: its implementation."""
    library = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = library.MixtralConfig(**{**MIXTRAL, "num_experts_per_tok": top_k})
    config._experts_implementation = experts
    torch.manual_seed(0)
    block: nn.Module = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block
