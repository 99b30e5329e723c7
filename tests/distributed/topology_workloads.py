"""Tensor-parallel pipelines and features of DeepSpeed's across a rebalance; every function here runs on a rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups
from torch import nn

import ds_dynmo
from tests.distributed.workloads import (
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    Block,
    Case,
    Embedding,
    Head,
    batches,
    build,
    config,
    layers,
    loss,
    project,
    seeded,
    state,
)


class _Copy(torch.autograd.Function):
    """The identity; gradients are summed over the slices."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    """The sum over the slices; gradients pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        hidden = hidden.clone()
        dist.all_reduce(hidden, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


SLICES: dict[str, Any] = {}  # this rank's group and index; a layer that moves finds its slice's here


class SlicedBlock(nn.Module):
    """A residual layer whose inner width is split over the slices, unevenly; norm and outer bias are not."""

    def __init__(self, index: int) -> None:
        super().__init__()
        mine = SLICES["index"]
        inner = 4 + 2 * (index % 3) + mine
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(seeded((inner, WIDTH), 100 * index + 10 * mine))
        self.down = nn.Parameter(seeded((WIDTH, inner), 100 * index + 10 * mine + 1))
        self.bias = nn.Parameter(seeded((WIDTH,), 100 * index + 2))
        self.up.model_parallel = self.down.model_parallel = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(_Copy.apply(self.norm(hidden), SLICES["group"]) @ self.up.t())
        return hidden + _Reduce.apply(inner @ self.down.t(), SLICES["group"]) + self.bias


def sliced_layers(case: Case) -> list[Any]:
    """An embedding and a head around sliced blocks. Collective: it makes the slices' groups."""
    for ranks in case.topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            SLICES.update(group=group, index=ranks.index(dist.get_rank()))
    ends: list[Any] = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    if case.tied:
        ends = [
            TiedLayerSpec("embedding", Embedding, 1, tied_weight_attr="weight"),
            TiedLayerSpec("embedding", Embedding, 1, forward_fn=project, tied_weight_attr="weight"),
        ]
    return [ends[0], *(LayerSpec(SlicedBlock, index) for index in range(case.blocks)), ends[1]]


def train_sliced(case: Case, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    engine = build(case, sliced_layers)
    data, losses, waiting = batches(engine), [], list(moves)
    for _ in range(6):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return {
        "losses": losses,
        "state": state(engine),
        "replica": engine.grid.get_data_parallel_id(),
        "norm": float(engine.get_global_grad_norm() or 0.0),
        "moved": sum(report.layers_moved for report in engine.reports),
    }


# -- features -----------------------------------------------------------------------------------------


def feature_engine(settings: dict[str, Any], case: Case, **module_options: Any) -> Any:
    torch.manual_seed(0)
    module = PipelineModule(
        layers=layers(case), num_stages=case.stages, loss_fn=loss, partition_method="uniform", **module_options
    )
    return ds_dynmo.initialize(
        model=module, model_parameters=list(module.parameters()), config={**config(case), **settings}
    )[0]


def changing_lengths(engine: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in itertools.count():
        generator = torch.Generator().manual_seed(number)
        length = (3, 6, 4)[(number // engine.micro_batches) % 3]
        tokens = torch.randint(0, VOCABULARY, (2, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def train_feature(
    settings: dict[str, Any], module_options: dict[str, Any], moves: Sequence[Sequence[int]], lengths: bool = False
) -> dict[str, Any]:
    case = Case(stages=2, dynmo={"interval": 0, "profile": {"batches": 1, "warmup_batches": 0}})
    engine = feature_engine(settings, case, **module_options)
    data, losses, waiting = changing_lengths(engine) if lengths else batches(engine), [], list(moves)
    for _ in range(5):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return {"losses": losses, "state": state(engine), "replica": 0, "partition": engine.partition}


class Places(nn.Embedding):
    """Adds a vector to every place of the sequence, with sparse gradients; a layer that can be in the middle."""

    def __init__(self) -> None:
        super().__init__(SEQUENCE, WIDTH, sparse=True)
        self.weight.data.copy_(seeded((SEQUENCE, WIDTH), 5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + super().forward(torch.arange(hidden.size(1)))


def sparse_layers(case: Case) -> list[Any]:
    specs = layers(case)
    specs[2:4] = [LayerSpec(Places), LayerSpec(Places)]
    return specs


def mask_layers(case: Case) -> list[Any]:
    return [
        LayerSpec(MaskingEmbedding, 1),
        *(LayerSpec(MaskedBlock, index) for index in range(case.num_layers - 2)),
        LayerSpec(UnmaskingHead, 2),
    ]


class MaskingEmbedding(Embedding):
    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(tokens), tokens > VOCABULARY // 3


class MaskedBlock(Block):
    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden, mask = inputs
        assert mask.dtype == torch.bool
        return torch.where(mask.unsqueeze(-1), super().forward(hidden), hidden), mask


class UnmaskingHead(Head):
    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(inputs[0])


def train_both(
    case: Case, make_layers: Callable[[Case], list[Any]], bool_tensors: bool, moves: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """The run that stays and the run that moves; each is profiled once."""
    found = []
    for waiting in ([], list(moves)):
        engine = build(case, make_layers)
        engine.has_bool_tensors = bool_tensors
        data, losses = batches(engine), []
        for _ in range(5):
            losses.append(engine.train_batch(data).item())
            if waiting:
                engine.rebalance(waiting.pop(0))
        held = [engine._state.state_of(parameter) for parameter in engine.module.parameters()]
        found.append(
            {
                "losses": losses,
                "norm": engine.get_global_grad_norm(),
                "state": state(engine),
                "replica": engine.grid.get_data_parallel_id(),
                "moved": sum(report.layers_moved for report in engine.reports),
                "sparse": sum(value.is_sparse for each in held for value in each.values() if torch.is_tensor(value)),
            }
        )
    return found


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.experts(hidden)[0]  # type: ignore[no-any-return]


def add_places(places: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + places.weight[: hidden.size(1)]


def refused_layers() -> tuple[list[str], list[str], float]:
    """What initialize says of layers that only the second stage holds; then expert groups, and a loss without them."""
    experts, places = layers(Case()), layers(Case())
    experts[6], places[6] = LayerSpec(WithExperts), LayerSpec(Places)
    tied = layers(Case())
    tied[1] = TiedLayerSpec("places", Places, forward_fn=add_places, tied_weight_attr="weight")
    tied[6] = TiedLayerSpec("places", Places, tied_weight_attr="weight")
    said = []
    for specs, precision in ((experts, "fp32"), (places, "bf16"), (places, "fp32 zero1"), (tied, "fp32")):
        try:
            build(Case(optimizer="SGD", precision=precision), lambda _, specs=specs: specs)
        except ds_dynmo.ConfigError as error:
            said.append(str(error))
    engine = build(Case())
    return said, list(groups._get_expert_parallel_group_dict()), engine.train_batch(batches(engine)).item()


def train_other_sizes(moves: Sequence[Sequence[int]]) -> tuple[list[float], list[int]]:
    """Losses, where the number of micro-batches changes in between, and the last partition."""
    engine = build(Case(stages=2))
    data, losses, waiting = batches(engine), [], list(moves)
    for micro_batches in (3, 5, 2, 4):
        engine.set_train_batch_size(2 * micro_batches)
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return losses, engine.partition


def evaluate_logits(moves: Sequence[Sequence[int]]) -> list[Any]:
    engine = build(Case(stages=2))
    engine.train_batch(batches(engine))
    found = []
    for move in [None, *moves]:
        if move is not None:
            engine.rebalance(move)
        value, logits = engine.eval_batch(batches(engine, seed=3), return_logits=True)
        outputs = engine.eval_batch(batches(engine, seed=3), compute_loss=False, reduce_output=None)
        shapes = None if outputs is None else [list(part.shape) for part in outputs]
        found.append((value.item(), None if logits is None else [part.tolist() for part in logits], shapes))
    return found


def given_data(moves: Sequence[Sequence[int]]) -> tuple[list[float], list[float], list[int]]:
    """Data and a callable scheduler given to initialize; batches without an iterator."""
    case = Case(stages=2)
    torch.manual_seed(0)
    module = PipelineModule(layers=layers(case), num_stages=2, loss_fn=loss, partition_method="uniform")
    tokens = torch.randint(0, VOCABULARY, (60, 5), generator=torch.Generator().manual_seed(1))
    engine, optimizer, _, _ = ds_dynmo.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        training_data=[(row[:-1], row[1:]) for row in tokens],
        config=config(case),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    losses, waiting = [], list(moves)
    for _ in range(6):
        losses.append(engine.train_batch().item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return losses, [group["lr"] for group in optimizer.param_groups], engine.partition


def one_stage() -> tuple[list[int], int]:
    engine = build(Case(stages=1, dynmo={"interval": 2}))
    data = batches(engine)
    for _ in range(4):
        engine.train_batch(data)
    return engine.partition, len(engine.reports)


def no_optimizer() -> tuple[float, float, list[int]]:
    case = replace(Case(stages=2), optimizer="none")
    module = PipelineModule(layers=layers(case), num_stages=2, loss_fn=loss, partition_method="uniform")
    engine = ds_dynmo.initialize(model=module, config=config(case))[0]
    before = engine.eval_batch(batches(engine)).item()
    engine.rebalance([0, 2, 8])
    return before, engine.eval_batch(batches(engine)).item(), engine.partition


def compile_stage() -> None:
    build(Case(stages=2)).compile()
