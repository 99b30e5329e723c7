"""Activations and gradients that are not contiguous cross stages with their strides: no kernel rounds otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from tests.support.configs import Case, config
from tests.support.harness import run_each
from tests.support.models import module_of
from tests.support.training import Warnings, outcome_of, train_and_move, whole

pytestmark = pytest.mark.ranks

WIDTH, SEQUENCE, CLASSES = 64, 16, 8


class Mix(nn.Module):
    """A block as Megatron has it: a bias that is added by itself gets a gradient that is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.bias = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden)))) + self.bias


def turned(hidden: torch.Tensor) -> torch.Tensor:
    """As GPT-NeoX does behind its last block: the gradient comes back transposed."""
    return hidden.transpose(0, 1).contiguous()


def seen_turned(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.transpose(0, 1)


def halves(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return hidden.chunk(2, -1)


def joined(halves: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Join slices of a tensor: so are their gradients."""
    return torch.cat([torch.tanh(half) for half in halves], -1)


def with_means(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden, hidden.mean(1, keepdim=True).expand_as(hidden)


def added(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return inputs[0] + torch.tanh(inputs[1])


def pooled(hidden: torch.Tensor) -> torch.Tensor:
    """Each gradient of it is repeated along the sequence."""
    return hidden.mean(1)


def layers(case: Case) -> list[Any]:
    mix = LayerSpec(Mix)
    ways = [turned, mix, seen_turned, mix, halves, joined, mix, with_means, added, mix, pooled]
    return [LayerSpec(nn.Embedding, 64, WIDTH), mix, *ways, LayerSpec(nn.Linear, WIDTH, CLASSES)]


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, 64, (4, SEQUENCE), generator=generator)
        yield tokens, tokens[:, 0] % CLASSES


def train(case: Case, moves: Sequence[Sequence[int]], steps: int, background: bool, dynamic: bool) -> dict[str, Any]:
    module = module_of(case, layers, loss_fn=F.cross_entropy, dynamic_shape=dynamic)
    settings = config(case)
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    warnings = Warnings()
    losses = train_and_move(engine, data(), moves, steps, background=background)
    assert not [message for message in warnings.messages if "strides" in message]
    return {**outcome_of(engine, losses), "evaluation": engine.eval_batch(data()).item()}


CASE = Case(blocks=11, clip=0.5, micro_batches=2, dynmo={"interval": 0, "initial_partition": [0, 1, 14]})
CUTS = [[0, cut, 14] for cut in range(2, 14)]
ZERO_BUBBLE, V = ({"interval": 0, "schedule": {"kind": kind}} for kind in ("zero_bubble", "v"))
WAYS: dict[str, tuple[Case, list[list[int]], bool, bool]] = {
    "zero bubble, in the background, shapes that change": (replace(CASE, dynmo=ZERO_BUBBLE), CUTS, True, True),
    "V": (
        replace(CASE, dynmo=V),
        [[0, 2, 3, 4, 14], [0, 4, 6, 9, 14], [0, 5, 10, 12, 14], [0, 1, 7, 8, 14]],
        False,
        False,
    ),
    "1F1B": (CASE, CUTS, False, False),
    "zero bubble, in the background": (replace(CASE, dynmo=ZERO_BUBBLE), CUTS, True, False),
    "shapes that change": (CASE, CUTS, False, True),
}
QUICK = [*WAYS][:2]


@pytest.mark.parametrize(
    ("precision", "ways"),
    [
        ("fp32", QUICK),  # in bf16 kernels round alike whatever the strides
        *(pytest.param(precision, [*WAYS], marks=pytest.mark.nightly) for precision in ("fp32", "bf16")),
    ],
)
def test_a_cut_at_any_tensor_changes_no_bit(precision: str, ways: list[str]) -> None:
    """The run that stays has all of these layers on its last stage."""
    steps = len(CUTS) + 1
    chosen = {name: (replace(case, precision=precision), *more) for name, (case, *more) in WAYS.items() if name in ways}
    calls = [(case, moves, steps, *more) for case, moves, *more in chosen.values()]
    still = replace(CASE, precision=precision), [], steps, False, False
    *found, expected = run_each(2, train, *calls, still)
    for (name, (_, moves, *_)), result in zip(chosen.items(), found, strict=True):
        assert result[0]["partition"] == moves[-1], name
        for what in ("losses", "evaluation"):
            assert [each[what] for each in result] == [each[what] for each in expected], (name, what)
        assert whole(result) == whole(expected), name
