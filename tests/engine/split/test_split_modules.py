"""Which weights a backward pass in two parts defers, of all that a model may do with its modules; no bit differs."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.utils.checkpoint import checkpoint

from ds_dynmo.engine.split.weight_gradients import WeightGradients
from ds_dynmo.errors import ConfigError
from tests.support.split_passes import WIDTH, check_same, finish, in_one, in_two, inputs, mlp, same_bits


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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lag", [0, 1])
def test_gradients_equal_those_of_one_pass(name: str, lag: int) -> None:
    make, deferred = MODELS[name]
    model, other = (seeded(make) for _ in range(2))
    assert check_same(model, inputs(2, 5, WIDTH), lag, other) == deferred


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def test_a_conv1d_of_hugging_face_is_split() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(2 * WIDTH, WIDTH), nn.GELU(), conv1d(WIDTH, 2 * WIDTH))
    assert check_same(model, inputs(2, 5, WIDTH)) == BOTH
    assert not check_same(Apart(lambda x, one: one(x.transpose(0, 1)).transpose(0, 1), conv1d(WIDTH, WIDTH)), [])


def test_a_head_that_has_the_weights_of_the_embedding() -> None:
    embedding, head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False)
    head.weight = embedding.weight
    tokens = torch.randint(0, 7, (2, 5))
    model = Apart(lambda x, embedding, one, head: head(one(embedding(tokens) + x)), embedding, linear(), head)
    passes = [(entering, torch.randn(2, 5, 7)) for entering, _ in inputs(2, 5, WIDTH)]
    assert check_same(model, passes) == {"parts.1.weight", "parts.1.bias"}


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, mlp())
    assert {name.split(".")[1] for name in check_same(model, inputs(2, 5, WIDTH))} == {"lora_A", "lora_B"}


def compiled(how: str) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(linear(), Apart(lambda x, half, weights: half(weights(x)), Half(WIDTH, WIDTH), linear()))
    inner = model[1].parts
    if how == "module":
        inner[0].compile(backend="eager")
        inner[1].compile(backend="eager")
    else:
        inner[0], inner[1] = torch.compile(inner[0], backend="eager"), torch.compile(inner[1], backend="eager")
    return model


@pytest.mark.parametrize("how", ["module", "wrapper"])
def test_what_is_compiled_runs_in_one(how: str) -> None:
    assert check_same(compiled(how), inputs(2, 5, WIDTH), other=compiled(how)) == {"0.weight", "0.bias"}


def under_autocast(input: torch.Tensor, one: nn.Module, weights: nn.Module, other: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        inner = weights(one(input))
    return other(inner.float())


def test_under_autocast_a_pass_runs_in_one() -> None:
    weights = Weights(F.linear, (WIDTH, WIDTH))
    deferred = check_same(Apart(under_autocast, linear(), weights, linear()), inputs(2, 5, WIDTH))
    assert deferred == {"parts.2.weight", "parts.2.bias"}


def test_what_trains_changes_between_batches() -> None:
    model, other = mlp(), mlp()
    for trained in (["0.weight", "2.weight"], ["2.bias"], ["0.weight", "0.bias"]):
        trains(model, *trained)
        trains(other, *trained)
        assert check_same(model, inputs(2, 5, WIDTH), other=other) == set(trained)


@pytest.mark.parametrize("preset", [False, True])
def test_gradients_are_added_to_those_that_are_there(preset: bool) -> None:
    model, other = mlp(), mlp()
    for parameter, also in zip(model.parameters(), other.parameters(), strict=True):
        parameter.grad, also.grad = (torch.full_like(parameter, 0.1) if preset else None for _ in range(2))
    for set_to_none in (False, True):
        assert check_same(model, inputs(2, 5, WIDTH), other=other) == BOTH
        model.zero_grad(set_to_none)
        other.zero_grad(set_to_none)


def seen_by_hooks(model: nn.Module) -> list[Any]:
    seen: list[Any] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.tolist())))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.tolist())))
    return seen


def test_hooks_on_gradients_see_them_in_the_order_of_micro_batches() -> None:
    model, other = mlp(), mlp()
    seen, also = seen_by_hooks(model), seen_by_hooks(other)
    in_one(model, inputs(2, 5, WIDTH))
    in_two(other, inputs(2, 5, WIDTH))
    assert len(seen) == 2 * 4 * 3
    for name, _ in model.named_parameters():
        assert [one for one in seen if one[0] == name] == [one for one in also if one[0] == name]


def backward_of(model: nn.Module, **options: Any) -> None:
    gradients = WeightGradients()
    with gradients.splitting(model.modules()):
        entering = torch.randn(2, WIDTH, requires_grad=True)
        with gradients.forward_pass(split=True):
            output = model(entering).sum()
        with gradients.first_part():
            output.backward(inputs=[entering], **options)
        finish(gradients)


def test_a_backward_pass_to_inputs_alone_gives_weights_nothing() -> None:
    model = nn.Sequential(mlp(), Half(WIDTH, WIDTH), Weights(rows_of(1), STACKED))
    backward_of(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_of_a_deferred_weight_within_forward_is_refused() -> None:
    def own_slope(input: torch.Tensor, one: nn.Module) -> torch.Tensor:
        output: torch.Tensor = one(input)
        return output * torch.autograd.grad(output.sum(), one.weight, retain_graph=True)[0].sum()  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        check_same(Apart(own_slope, linear()), inputs(2, 5, WIDTH))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_of_a_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'create_graph=True, in a backward pass that is in two parts.*"1f1b"'):
        backward_of(mlp(), create_graph=True)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("make", [linear, lambda: Half(WIDTH, WIDTH)])
def test_a_copy_made_while_a_batch_runs_is_an_ordinary_module(
    make: Callable[[], nn.Module], duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    model, gradients = make(), WeightGradients()
    with gradients.splitting([model]):
        other = duplicate(model)
        with gradients.forward_pass(split=True):
            output, also = (module(torch.ones(2, WIDTH)) for module in (model, other))
            assert inspect.signature(model.forward) == inspect.signature(other.forward)
        assert same_bits(output, also) and not gradients.hidden & set(other.parameters())
    assert check_same(model, inputs(2, 5, WIDTH), other=other) == WHOLE


def originals() -> dict[str, Any]:
    return {
        "forward": nn.Linear.forward,
        "linear": F.linear,
        "module": nn.Module.__call__,
        "apply": torch.autograd.Function.apply,
        "modes": torch._C._len_torch_function_stack(),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_everything_is_as_it_was(fails: bool) -> None:
    def fail(_: Any, given: Any, output: Any) -> None:
        if fails:
            raise ArithmeticError

    model = nn.Sequential(mlp(), Half(WIDTH, WIDTH), with_own_forward(), Weights(rows_of(1), STACKED), nn.Identity())
    model[-1].register_forward_hook(fail)
    gradients, watched = WeightGradients(), []
    model[1].register_forward_pre_hook(lambda *_: watched.append(originals()))
    before = originals(), [dict(vars(module)) for module in model.modules()]
    try:
        with gradients.splitting(model.modules()):
            assert "forward" in vars(model[0][0]) and "forward" in vars(model[1])
            with gradients.forward_pass(split=True):
                output = model(torch.randn(2, WIDTH))
            with gradients.first_part():
                output.sum().backward()
    except ArithmeticError:
        assert fails
    assert (originals(), [dict(vars(module)) for module in model.modules()]) == before and watched == [before[0]]
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    model[-1] = nn.Identity()
    model.zero_grad()
    model(torch.randn(2, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
