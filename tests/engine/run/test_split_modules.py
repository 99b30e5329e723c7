"""Which weights a backward pass in two parts defers, of all that a model may do with its modules; no bit differs."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.engine.run.split_modules import watched
from ds_dynmo.engine.run.weight_gradients import WeightGradients
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import gpt, huggingface
from ds_dynmo.models.gpt_config import GPTConfig
from tests.support.split_models import (
    BOTH,
    MODELS,
    STACKED,
    WHOLE,
    Apart,
    Half,
    Weights,
    linear,
    rows_of,
    seeded,
    trains,
    with_own_forward,
)
from tests.support.split_passes import WIDTH, check_same, finish, in_one, in_two, inputs, mlp, same_bits


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_one_pass(name: str) -> None:
    make, deferred = MODELS[name]
    assert check_same(seeded(make), inputs(2, 5, WIDTH), other=seeded(make)) == deferred


USES: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, weight, bias: F.linear(x, weight),
    lambda x, weight, bias: F.linear(x, weight, bias) + bias,
    lambda x, weight, bias: x @ weight,
    lambda x, weight, bias: x @ weight.t() @ torch.cat([weight[:5], weight[5:]]),
    lambda x, weight, bias: x + (weight * weight).sum(),  # one function, which ends at the weight twice
    lambda x, weight, bias: x @ torch.stack([weight, weight.relu()]).sum(0) + bias,
]


class Mixed(nn.Module):
    """Uses a weight in some ways, of which products by ``F.linear`` defer their gradients."""

    def __init__(self, uses: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.uses = uses

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for use in self.uses:
            hidden = hidden + torch.tanh(USES[use](hidden, self.weight, self.bias))
        return hidden


def test_products_that_wait_and_other_uses_of_a_weight_are_added_in_autograds_order() -> None:
    chooser = random.Random(0)
    for _ in range(40):
        uses = [chooser.randrange(len(USES)) for _ in range(chooser.randint(2, 6))]
        deferred = check_same(seeded(partial(Mixed, uses)), inputs(2, 5, WIDTH), chooser.randint(0, 2))
        assert ("weight" in deferred) == (0 in uses or 1 in uses), uses


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


TIED = {"vocab_size": 50, "hidden_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 1}


def gpt_layers() -> list[Any]:
    return gpt.gpt_layers(GPTConfig(vocab_size=50, hidden_size=WIDTH, heads=2, layers=1))


def huggingface_layers() -> list[Any]:
    pytest.importorskip("transformers")
    return huggingface.layers({"model_type": "llama", **TIED, "tie_word_embeddings": True}, verified=False)


@pytest.mark.parametrize(("make", "name"), [(gpt_layers, "weight"), (huggingface_layers, "part.weight")])
def test_a_head_that_is_a_function_of_the_tied_embedding(make: Callable[[], list[Any]], name: str) -> None:
    first, *_, last = make()
    model = Apart(lambda x, tied: watched(partial(last.forward_fn, tied), tied)(x), first.build())
    passes = [(entering, torch.randn(2, 5, 50)) for entering, _ in inputs(2, 5, WIDTH)]
    assert check_same(model, passes) == {f"parts.0.{name}"}


def test_a_function_that_runs_compiled_modules_is_not_watched() -> None:
    function, module = nn.Identity(), linear()
    module.compile(backend="eager")
    assert watched(function, module) is function


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


def test_what_is_compiled_runs_in_one() -> None:
    for how in ("module", "wrapper"):
        assert check_same(compiled(how), inputs(2, 5, WIDTH), other=compiled(how)) == {"0.weight", "0.bias"}, how


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


def test_gradients_are_added_to_those_that_are_there() -> None:
    for preset in (False, True):
        model, other = mlp(), mlp()
        for parameter, also in zip(model.parameters(), other.parameters(), strict=True):
            parameter.grad, also.grad = (torch.full_like(parameter, 0.1) if preset else None for _ in range(2))
        for set_to_none in (False, True):
            assert check_same(model, inputs(2, 5, WIDTH), other=other) == BOTH, (preset, set_to_none)
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
        with gradients.first_part((0, 0)):
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
            with gradients.first_part((0, 0)):
                output.sum().backward()
    except ArithmeticError:
        assert fails
    assert (originals(), [dict(vars(module)) for module in model.modules()]) == before and watched == [before[0]]
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    model[-1] = nn.Identity()
    model.zero_grad()
    model(torch.randn(2, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
