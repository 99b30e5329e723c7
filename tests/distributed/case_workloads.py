"""Runs for test_cases.py: small models of every dynamic case, trained in pipelines; every function runs on a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.config import parse_block
from ds_dynmo.models import ModelConfig, dynamic_cases, language_model_loss, model_layers
from tests.distributed import workloads

SIZES = {"layers": 4, "hidden_size": 16, "heads": 2, "sequence_length": 12, "mlp_ratio": 2, "tied_embedding": False}

# The "model" block of each dynamic case, as small as it can be.
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "freezing": {"freezing": {"schedule": [[0.3, 1], [0.6, 2]]}},
    "automatic freezing": {"freezing": {"automatic": {"interval": 0.2, "start": 0.2}}},
}


@dataclass(frozen=True)
class CaseRun:
    """One training run of a case.

    Attributes:
        model: the "model" block but for :data:`SIZES`, which a Hugging Face model does not take.
        moves: by step, where to go before it.
        precision: see ``workloads.PRECISIONS``.
    """

    model: Mapping[str, Any]
    stages: int = 2
    replicas: int = 1
    precision: str = "fp32"
    checkpoint_interval: int = 0
    steps: int = 6
    moves: Mapping[int, list[int]] = field(default_factory=dict)
    enabled: bool = True

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas


def build(run: CaseRun) -> tuple[Any, ModelConfig]:
    sizes = {} if "huggingface" in run.model else SIZES
    model = parse_block(ModelConfig, {**sizes, **run.model}, "model")
    torch.manual_seed(0)
    module = PipelineModule(
        layers=model_layers(model),
        num_stages=run.stages,
        loss_fn=language_model_loss,
        partition_method="uniform",
        activation_checkpoint_interval=run.checkpoint_interval,
    )
    settings = {
        **workloads.config(workloads.Case(precision=run.precision, dynmo=None)),
        "dynmo": {"interval": 0, "enabled": run.enabled},
    }
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    return engine, model


def batches(engine: Any, model: ModelConfig, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    number = 0
    while True:
        replica = engine.grid.get_data_parallel_id()
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * number + replica)
        tokens = torch.randint(0, 256, (2, model.sequence_length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]
        number += 1


def train(run: CaseRun) -> dict[str, Any]:
    """Losses, the loss of an evaluation, and the state of this rank's layers afterwards."""
    engine, model = build(run)
    data, losses = batches(engine, model), []
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    for step in range(run.steps):
        for case in cases:
            case.before_batch(step)
        if step in run.moves:
            engine.rebalance(run.moves[step])
        if run.enabled:
            engine._controller.decided(moved=False)  # moves are the test's own
        losses.append(engine.train_batch(data).item())
        for case in cases:
            case.after_batch(step + 1)
    signals = {
        index: module.load_signal()
        for index, module in engine._layers.modules().items()
        if hasattr(module, "load_signal")
    }
    return {
        "losses": losses,
        "evaluated": engine.eval_batch(batches(engine, model, seed=1)).item(),
        "state": workloads.state(engine),
        "replica": engine.grid.get_data_parallel_id(),
        "signals": signals,
        "partition": engine.partition,
    }
