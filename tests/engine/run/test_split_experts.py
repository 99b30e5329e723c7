"""Weights of experts, and others that a model multiplies by in functions, are deferred; no bit differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynmo.config import parse_section
from ds_dynmo.models import MixtureOfExperts, ModelConfig, model_layers
from ds_dynmo.models.gpt import OutputHead
from ds_dynmo.models.moe.grouped_linear import grouped_linear
from ds_dynmo.models.pruning.sparse_linear import PrunableConv1D, PrunableLinear
from ds_dynmo.models.seeding import generator_for
from tests.support.split_models import mixtral
from tests.support.split_passes import WIDTH, Passes, check_same, inputs

SIZES = {"layers": 2, "hidden_size": WIDTH, "heads": 2, "sequence_length": 10, "mlp_ratio": 2, "tied_embedding": False}
STACKED = {"experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.parametrize(("dtype", "top_k"), [(torch.float32, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_mixtral(experts: str, dtype: torch.dtype, top_k: int) -> None:
    """Some micro-batches have few tokens: experts without any, and one expert alone."""
    passes = [*inputs(2, 9, WIDTH, dtype=dtype), *inputs(1, 1, WIDTH, dtype=dtype)]
    deferred = check_same(mixtral(experts, top_k).to(dtype), passes, lag=2)
    assert deferred == ({"gate.weight"} if experts == "batched_mm" else {"gate.weight", *STACKED})


class FirstOutput(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> Any:
        made = self.inner(hidden)
        return made[0] + made[1] if isinstance(made, tuple) else made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", ["aux_loss", "sbase", "bias"])
def test_our_mixture_of_experts(routing: str, dtype: torch.dtype) -> None:
    config = parse_section(ModelConfig, {**SIZES, "case": {"kind": "moe", "experts": 6, "routing": routing}}, "model")
    (moe,) = config.case
    layer = FirstOutput(MixtureOfExperts(config, generator_for("layer"), moe=moe).to(dtype))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(20)
    deferred = check_same(layer, [*inputs(2, 10, WIDTH, dtype=dtype), *inputs(1, 1, WIDTH, dtype=dtype)], lag=2)
    assert deferred == {"inner.expand", "inner.contract"}


@pytest.mark.parametrize("trained", ["rows", "weight"])
def test_grouped_linear_with_one_thing_to_train(trained: str) -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, WIDTH, WIDTH), requires_grad=trained == "weight")

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return grouped_linear(rows if trained == "rows" else rows.detach(), self.weight, [3, 0, 4]) + 0 * rows

    assert check_same(Grouped(), inputs(7, WIDTH)) == ({"weight"} if trained == "weight" else set())


def test_under_autocast_grouped_weights_of_its_type_are_not_deferred() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, WIDTH, WIDTH, dtype=torch.bfloat16))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return grouped_linear(rows, self.weight, [3, 0, 4])

    assert check_same(Grouped(), inputs(7, WIDTH, dtype=torch.bfloat16)) == set()


def pruned(
    share: float,
    csr_from: float = 0.5,
    compressed: bool = False,
    biased: type[PrunableLinear] | None = None,
) -> nn.Module:
    """Make a prunable linear layer; ``biased``: of that class, with a bias."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = (nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((WIDTH, WIDTH), (WIDTH,)))
    layer = PrunableLinear(weight, csr_from) if biased is None else biased(weight, csr_from, bias)
    if share:
        layer.prune(torch.rand(WIDTH, WIDTH, generator=generator) >= share)
    if compressed:
        layer.compress()
    return layer


OTHERS: dict[str, tuple[Callable[[], nn.Module], Passes, set[str]]] = {
    "dense": (lambda: pruned(0.0), inputs(2, 5, WIDTH), {"weight"}),
    "pruned, dense": (lambda: pruned(0.3), inputs(2, 5, WIDTH), {"weight"}),
    "pruned, sparse": (lambda: pruned(0.9), inputs(2, 5, WIDTH), set()),
    "pruned, a vector, dense": (lambda: pruned(0.9, 1.0, True), inputs(2, 5, WIDTH), {"weight"}),
    "pruned, a vector, sparse": (lambda: pruned(0.9, 0.5, True), inputs(2, 5, WIDTH), {"weight"}),
    "dense, bias": (lambda: pruned(0.3, biased=PrunableLinear), inputs(2, 5, WIDTH), {"weight", "bias"}),
    "dense, Conv1D": (lambda: pruned(0.3, biased=PrunableConv1D), inputs(2, 5, WIDTH), set()),
    "a vector, bias": (lambda: pruned(0.9, 1.0, True, PrunableLinear), inputs(2, 5, WIDTH), {"weight"}),
    "a vector, Conv1D": (lambda: pruned(0.9, 1.0, True, PrunableConv1D), inputs(2, 5, WIDTH), {"weight"}),
    "head": (lambda: head(), [(a, torch.cat([b] * 16, -1)) for a, b in inputs(2, 10, WIDTH)], {"weight"}),
}


def head() -> nn.Module:
    config = parse_section(ModelConfig, SIZES, "model")
    (layer,) = [spec.build() for spec in model_layers(config) if spec.typename is OutputHead]
    assert isinstance(layer, OutputHead)
    return layer


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    make, passes, deferred = OTHERS[name]
    assert check_same(make(), passes) == deferred
