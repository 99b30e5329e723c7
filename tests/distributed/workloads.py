"""Small models and runs for the distributed tests; every function here runs on a rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_dynmo

WIDTH = 8
VOCABULARY = 11
SEQUENCE = 4


class Embedding(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((VOCABULARY, WIDTH), seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


def project(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.t()


class Block(nn.Module):
    """A residual layer of a width of its own, so that layers differ in size."""

    def __init__(self, index: int) -> None:
        super().__init__()
        inner = 4 + 3 * (index % 4)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        for offset, parameter in enumerate((self.up.weight, self.up.bias, self.down.weight, self.down.bias)):
            parameter.data.copy_(seeded(parameter.shape, 100 * index + offset))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Head(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((VOCABULARY, WIDTH), seed))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.t()


def seeded(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * 0.3


def scale(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 1.25


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


@dataclass(frozen=True)
class Case:
    """One training run."""

    stages: int = 2
    blocks: int = 5
    tied: bool = False
    clip: float = 1.0
    optimizer: str = "AdamW"
    checkpoint_interval: int = 0
    reentrant: bool = True
    micro_batches: int = 3
    replicas: int = 1
    scheduler: bool = False
    groups: str = "one"  # one, two, or sparse: a rank without members leaves a group out
    start: tuple[int, ...] | None = None
    dynmo: dict[str, Any] | None = field(default_factory=lambda: {"interval": 0})

    @property
    def num_layers(self) -> int:
        return self.blocks + 3

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas


def layers(case: Case) -> list[Any]:
    ends: list[Any]
    if case.tied:
        ends = [
            TiedLayerSpec("embedding", Embedding, 1, tied_weight_attr="weight"),
            TiedLayerSpec("embedding", Embedding, 1, forward_fn=project, tied_weight_attr="weight"),
        ]
    else:
        ends = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    return [ends[0], *[LayerSpec(Block, index) for index in range(case.blocks)], scale, ends[1]]


def parameter_groups(module: nn.Module, how: str) -> list[Any]:
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    if how == "one":
        return list(module.parameters())
    return groups if how == "two" else [group for group in groups if group["params"]]


def config(case: Case) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**6,
        "pipeline": {"use_reentrant": case.reentrant},
    }
    if case.optimizer in ("AdamW", "Adam"):
        settings["optimizer"] = {"type": case.optimizer, "params": {"lr": 0.03, "torch_adam": True}}
    elif case.optimizer == "SGD":
        settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    if case.scheduler:
        settings["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.05, "warmup_num_steps": 8},
        }
    if case.dynmo is not None:
        settings["dynmo"] = case.dynmo
    return settings


def client_optimizer(case: Case, parameters: list[Any]) -> torch.optim.Optimizer | None:
    if case.optimizer == "Adafactor":
        return torch.optim.Adafactor(parameters, lr=0.05)
    if case.optimizer == "client AdamW":
        return torch.optim.AdamW(parameters, lr=0.03)
    return None


def build(case: Case, make_layers: Callable[[Case], list[Any]] = layers) -> Any:
    """An engine for ``case``, started at ``case.start`` (default: DeepSpeed's uniform partition)."""
    torch.manual_seed(0)
    module = PipelineModule(
        layers=make_layers(case),
        num_stages=case.stages,
        loss_fn=loss,
        partition_method="uniform",
        activation_checkpoint_interval=case.checkpoint_interval,
    )
    dynmo = case.dynmo
    if dynmo is not None and case.start is not None:
        dynmo = {**dynmo, "initial_partition": list(case.start)}
    parameters = parameter_groups(module, case.groups)
    return ds_dynmo.initialize(
        model=module,
        model_parameters=parameters,
        optimizer=client_optimizer(case, parameters),
        config=config(replace(case, dynmo=dynmo)),
    )[0]


def batches(engine: Any, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches that depend on their number and the replica only."""
    number = 0
    while True:
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * number + engine.grid.get_data_parallel_id())
        tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]
        number += 1


def partitions(case: Case, seed: int, count: int) -> list[list[int]]:
    """A random sequence of partitions."""
    chooser = random.Random(seed)
    inner = range(1, case.num_layers)
    return [[0, *sorted(chooser.sample(inner, case.stages - 1)), case.num_layers] for _ in range(count)]


def state(engine: Any) -> dict[str, Any]:
    """Weights and optimizer state of this rank's layers, by layer and name."""
    found: dict[str, Any] = {}
    optimizer = engine.basic_optimizer
    for index, module in engine._layers.counted_modules().items():
        for name, parameter in module.named_parameters():
            key = f"{index}.{name}"
            found[key] = parameter.detach().numpy().tobytes()
            for what, value in optimizer.state.get(parameter, {}).items():
                found[f"{key}/{what}"] = value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
            for number, group in enumerate(optimizer.param_groups):
                if any(parameter is member for member in group["params"]):
                    found[f"{key}/group"] = (number, group["lr"], group["weight_decay"])
    return found


def train(case: Case, moves: Sequence[Sequence[int]], steps: int, every: int) -> dict[str, Any]:
    """Train ``steps`` batches, going to the next of ``moves`` after every ``every`` of them."""
    engine = build(case)
    data = batches(engine)
    losses, evaluations = [], []
    waiting = list(moves)
    for step in range(steps):
        losses.append(engine.train_batch(data).item())
        if step % every == every - 1 and waiting:
            engine.rebalance(waiting.pop(0))
        if step == steps // 2:
            evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())
    return {
        "losses": losses,
        "evaluations": evaluations,
        "state": state(engine),
        "partition": engine.partition,
        "moved": sum(report.layers_moved for report in engine.reports),
        "replica": engine.grid.get_data_parallel_id(),
    }
