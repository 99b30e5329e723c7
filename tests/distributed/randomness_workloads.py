"""Runs with layers that draw random numbers; every function here runs on a rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from tests.distributed.workloads import WIDTH, Block, Case, Embedding, Head, batches, build, loss, project, state


class DropoutBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(hidden), 0.2, self.training)


class Drawing(nn.Module):
    """Draws from every global generator on the CPU, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        factor = 1 + 0.2 * (random.random() + numpy.random.random_sample() + torch.rand(()).item())
        return hidden * self.weight * factor


def jitter(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + 0.1 * torch.rand_like(hidden)


def project_dropped(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return project(embedding, F.dropout(hidden, 0.1))


def drawing_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss(logits, labels) * (1 + 0.1 * random.random())


def drawing_layers(case: Case) -> list[Any]:
    ends: list[Any] = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    if case.tied:
        ends = [
            TiedLayerSpec("embedding", Embedding, 1, tied_weight_attr="weight"),
            TiedLayerSpec("embedding", Embedding, 1, forward_fn=project_dropped, tied_weight_attr="weight"),
        ]
    blocks = [LayerSpec(Drawing) if index % 3 == 1 else LayerSpec(DropoutBlock, index) for index in range(case.blocks)]
    return [ends[0], *blocks, jitter, ends[1]]


@dataclass(frozen=True)
class Plan:
    """What a run does besides training."""

    steps: int = 6
    moves: tuple[tuple[int, ...], ...] = ()  # one after each batch, from the first
    evaluate_after: tuple[int, ...] = ()
    seed_layers: bool = False
    save_to: str | None = None  # after the third batch
    resume_from: str | None = None


def train(case: Case, plan: Plan = Plan()) -> dict[str, Any]:
    engine = build(case, drawing_layers)
    engine.module.loss_fn = drawing_loss
    engine.module.seed_layers = plan.seed_layers
    if plan.resume_from is not None:
        engine.load_checkpoint(plan.resume_from)
    data = islice(batches(engine), engine.global_steps * case.micro_batches, None)
    set_generators(engine.global_rank + 10 * len(plan.moves))  # what a rank holds must not matter
    before = generators()
    losses, evaluations, moves = [], [], list(plan.moves)
    for step in range(engine.global_steps, plan.steps):
        losses.append(engine.train_batch(data).item())
        if moves:
            engine.rebalance(moves.pop(0))
        if step in plan.evaluate_after:
            evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())
        if step == 2 and plan.save_to is not None:
            engine.save_checkpoint(plan.save_to)
    return {
        "losses": losses,
        "evaluations": evaluations,
        "state": state(engine),
        "moved": sum(report.layers_moved for report in engine.reports),
        "profiled": engine._profiler.batches,
        "replica": engine.grid.get_data_parallel_id(),
        "generators kept": generators() == before,
    }


def set_generators(seed: int) -> None:
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)


def generators() -> Sequence[Any]:
    return torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in numpy.random.get_state()]
