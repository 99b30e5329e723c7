"""Layers that must be on one stage are never cut apart, wherever a partition comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from ds_dynmo.partitioners import balanced
from tests.support.checkpoints import data_after
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import VOCABULARY, WIDTH, Embedding, loss, seeded
from tests.support.training import batches, outcome_of, reports_of, train_and_move, whole

pytestmark = pytest.mark.ranks

BLOCKS = 5
HEAD_WIDTH = 400  # makes the head heavier than all other layers
PAIR = {"keep_together": [[6, 7]]}
BY_HAND = {"interval": 0, **PAIR}
BY_PARAMETERS = {"interval": 2, "balance_by": "parameters", "min_improvement": 0.0, **PAIR}
WEIGHTS = [VOCABULARY * WIDTH, *[WIDTH * WIDTH] * BLOCKS, 2 * WIDTH, HEAD_WIDTH * (WIDTH + VOCABULARY)]


class GPT2ModelPipe(PipelineModule):
    """Named as in transpeeder: with this name DeepSpeed 0.19.8 treats the last tensor of a message as a mask."""


class MaskedEmbedding(Embedding):
    """Returns hidden states, and which position attends to which."""

    def forward(self, tokens: torch.Tensor) -> Any:
        length = tokens.shape[1]
        mask = torch.ones(len(tokens), length, length, dtype=torch.bool, device=tokens.device).tril()
        return super().forward(tokens), mask


class MaskedBlock(nn.Module):
    """Mixes each position with those that it attends to, and passes the mask on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(seeded((WIDTH, WIDTH), 10 * index))

    def forward(self, inputs: Any) -> Any:
        hidden, mask = inputs
        assert mask.dtype == torch.bool
        weights = mask.to(hidden.dtype)
        mixed = (weights / weights.sum(-1, keepdim=True)) @ hidden
        return hidden + torch.tanh(mixed @ self.mix), mask


class LastNorm(nn.LayerNorm):
    """Passes on one tensor without the mask."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, inputs: Any) -> torch.Tensor:
        return super().forward(inputs[0])


class WideHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(seeded((WIDTH, HEAD_WIDTH), 1))
        self.down = nn.Parameter(seeded((HEAD_WIDTH, VOCABULARY), 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ self.up) @ self.down


def masked_layers() -> list[Any]:
    blocks = [LayerSpec(MaskedBlock, index) for index in range(BLOCKS)]
    return [LayerSpec(MaskedEmbedding, 1), *blocks, LayerSpec(LastNorm), LayerSpec(WideHead)]


def masked_engine(case: Case) -> Any:
    torch.manual_seed(0)
    module = GPT2ModelPipe(
        layers=masked_layers(), num_stages=case.stages, loss_fn=loss, partition_method="type:maskedblock"
    )
    return ds_dynmo.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config=config(case),
    )[0]


def train_masked(case: Case, moves: Sequence[Sequence[int]], steps: int, folder: str = "") -> dict[str, Any]:
    """Train ``steps`` batches, go to the next of ``moves`` after each, and save after two of them."""
    engine = masked_engine(case)
    losses = train_and_move(
        engine, batches(engine), moves, steps, lambda step: step == 1 and folder and engine.save_checkpoint(folder)
    )
    return {
        **outcome_of(engine, losses),
        "evaluation": engine.eval_batch(batches(engine, seed=7)).item(),
        "partitions": [list(report.new_partition) for report in reports_of(engine)],
    }


def load_masked(case: Case, folder: str, steps: int) -> dict[str, Any]:
    engine = masked_engine(case)
    engine.load_checkpoint(folder)
    data = data_after(engine, engine.global_steps)
    return outcome_of(engine, [engine.train_batch(data).item() for _ in range(steps)])


# -- a miniature of transpeeder -----------------------------------------------------------------------


def check_same(still: list[dict[str, Any]], moved: list[dict[str, Any]]) -> None:
    for what in ("losses", "evaluation"):
        assert [result[what] for result in moved] == [result[what] for result in still]
    assert whole(moved) == whole(still)


def test_automatic_moves_make_only_allowed_cuts_and_change_nothing() -> None:
    """Without the key a balancer's cut changes nothing either.

    DeepSpeed would send the one tensor there as fp16, and give it to the head as bool.
    """
    assert balanced(WEIGHTS, 2) == [0, 7, 8]
    still, moved, cut = run_each(
        2,
        train_masked,
        (Case(dynmo=BY_HAND), [], 4),
        (Case(dynmo=BY_PARAMETERS), [], 4),
        (Case(), [[0, 7, 8]], 4),
    )
    assert [ranks[0]["partition"] for ranks in (still, moved, cut)] == [[0, 4, 8], [0, 6, 8], [0, 7, 8]]
    check_same(still, moved)
    check_same(still, cut)


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_moves_by_hand_change_nothing_nor_does_resuming_at_another_number_of_stages(
    tmp_path: Path, stages: int
) -> None:
    case = Case(stages=3, dynmo=BY_HAND, precision="bf16 zero1")
    moves = [[0, 1, 6, 8], [0, 5, 6, 8], [0, 2, 4, 8]]
    still, moved = run_each(3, train_masked, (case, [], 4), (case, moves, 4, str(tmp_path)))
    assert moved[0]["partitions"] == moves
    check_same(still, moved)
    loaded = run(stages, load_masked, replace(case, stages=stages), str(tmp_path), 2)
    assert loaded[0]["losses"] == still[0]["losses"][2:]
    assert whole(loaded) == whole(still)
