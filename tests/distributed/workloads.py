"""Small models and runs for the distributed tests; every function here runs on a rank."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import ds_dynmo
from ds_dynmo.engine.migration.packing import dense_parts
from ds_dynmo.errors import ConfigError

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


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 buffers": {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
    "bf16 immediate": {"bf16": {"enabled": True, "immediate_grad_update": True}},
    "bf16 zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16 zero1 fp32sums": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp32 zero1": {"zero_optimization": {"stage": 1}},
}


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
    slices: int | None = None  # tensor-parallel; None: a topology without that axis
    scheduler: bool = False
    groups: str = "one"  # one, two, or sparse: a rank without members leaves a group out
    precision: str = "fp32"  # see PRECISIONS
    dropout: bool = False
    start: tuple[int, ...] | None = None
    dynmo: dict[str, Any] | None = field(default_factory=lambda: {"interval": 0})

    @property
    def num_layers(self) -> int:
        return self.blocks + 3

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas * (self.slices or 1)

    @property
    def topology(self) -> Any:
        """None: DeepSpeed's own for so many stages."""
        if self.slices is None:
            return None
        return PipeModelDataParallelTopology(num_pp=self.stages, num_mp=self.slices, num_dp=self.replicas)


def layers(case: Case) -> list[Any]:
    ends: list[Any]
    if case.tied:
        ends = [
            TiedLayerSpec("embedding", Embedding, 1, tied_weight_attr="weight"),
            TiedLayerSpec("embedding", Embedding, 1, forward_fn=project, tied_weight_attr="weight"),
        ]
    else:
        ends = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    middle = LayerSpec(nn.Dropout, 0.2) if case.dropout else scale
    return [ends[0], *[LayerSpec(Block, index) for index in range(case.blocks)], middle, ends[1]]


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
        **PRECISIONS[case.precision],
    }
    if "zero1" in case.precision and case.optimizer not in ("AdamW", "Adam"):
        settings["zero_allow_untested_optimizer"] = True
    if case.optimizer in ("AdamW", "Adam"):
        settings["optimizer"] = {"type": case.optimizer, "params": {"lr": 0.03, "torch_adam": True}}
    elif case.optimizer == "FusedAdam":
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.03}}
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


def client_optimizer(case: Case, parameters: list[Any]) -> Any:
    """An optimizer, or a way to make one where this stage has nothing to train; None: the JSON's."""
    if case.optimizer == "Adafactor" and not parameters:
        return lambda groups: torch.optim.Adafactor(groups, lr=0.05)
    if case.optimizer == "Adafactor":
        return torch.optim.Adafactor(parameters, lr=0.05)
    if case.optimizer == "CPUAdam":
        return DeepSpeedCPUAdam(parameters or [{"params": []}], lr=0.03)
    if case.optimizer == "client AdamW":
        return torch.optim.AdamW(parameters, lr=0.03)
    return None


def build(
    case: Case,
    make_layers: Callable[[Case], list[Any]] = layers,
    training_data: Any = None,
    more: dict[str, Any] | None = None,
    partition_method: str = "uniform",
) -> Any:
    """An engine for ``case``, started at ``case.start`` (default: as DeepSpeed's ``partition_method`` says).

    Args:
        more: blocks of DeepSpeed's configuration.
    """
    torch.manual_seed(0)
    module = PipelineModule(
        layers=make_layers(case),
        num_stages=case.stages,
        topology=case.topology,
        loss_fn=loss,
        partition_method=partition_method,
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
        training_data=training_data,
        config={**config(replace(case, dynmo=dynmo)), **(more or {})},
    )[0]


def batches(engine: Any, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches that depend on their number and the replica, as it is now, only."""
    replica = engine.grid.get_data_parallel_id()
    return (micro_batch(number, replica, seed) for number in itertools.count())


def micro_batch(number: int, replica: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * number + replica)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def partitions(case: Case, seed: int, count: int) -> list[list[int]]:
    """A random sequence of partitions."""
    chooser = random.Random(seed)
    inner = range(1, case.num_layers)
    return [[0, *sorted(chooser.sample(inner, case.stages - 1)), case.num_layers] for _ in range(count)]


def state(engine: Any) -> dict[str, Any]:
    """Weights and optimizer state of this rank's layers, by layer and name; shards as (first element, bytes)."""
    found: dict[str, Any] = {"shards": {}}
    place = f"slice {engine.grid.get_slice_parallel_rank()}: " if engine.grid.slice_parallel_size > 1 else ""
    optimizer = engine.basic_optimizer
    if engine._wrapper is None:
        engine._state.count_steps_per_parameter(engine._comm.gather_objects)
    members = engine._state.members if engine._wrapper else [group["params"] for group in optimizer.param_groups]
    numbers = {parameter: number for number, group in enumerate(members) for parameter in group}
    for index, module in engine._layers.counted_modules().items():
        for name, parameter in module.named_parameters():
            own = getattr(parameter, "replica_own", False)
            key = f"replica {engine.grid.get_data_parallel_id()}: " * own + f"{place}{index}.{name}"
            found[key] = raw(parameter)
            for what, value in engine._state.state_of(parameter).items():
                if isinstance(value, tuple):
                    found["shards"][f"{key}/{what}"] = (value[0], raw(value[1]))
                else:
                    found[f"{key}/{what}"] = raw(value) if isinstance(value, torch.Tensor) else value
            if parameter in numbers:
                group = optimizer.param_groups[numbers[parameter]]
                found[f"{key}/group"] = (numbers[parameter], group["lr"], group["weight_decay"])
    return found


def raw(tensor: torch.Tensor) -> bytes:
    parts = [part.contiguous().view(-1).view(torch.uint8) for part in dense_parts(tensor)]
    return b"".join(part.numpy().tobytes() for part in parts)


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


# -- tests/distributed/test_engine.py -----------------------------------------------------------------


def partition_of(case: Case) -> tuple[list[int], list[int]]:
    """As built, by DeepSpeed, and after a batch."""
    engine = build(case, partition_method="type:Embedding|Head")
    built = [report.old_partition for report in engine.reports]
    engine.train_batch(batches(engine))
    return [list(partition) for partition in built], engine.partition


def train_stock(case: Case, which: str, make_layers: Callable[[Case], list[Any]] = layers) -> tuple[Any, ...]:
    """Losses and weights under DeepSpeed's engine or ours; without the key where ``case.clip`` is NaN."""
    import deepspeed

    torch.manual_seed(0)
    module = PipelineModule(layers=make_layers(case), num_stages=case.stages, loss_fn=loss, partition_method="uniform")
    initialize = deepspeed.initialize if which == "deepspeed" else ds_dynmo.initialize
    settings = config(case)
    if math.isnan(case.clip):
        del settings["gradient_clipping"]
    engine = initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    data = batches(engine)
    losses = [engine.train_batch(data).item() for _ in range(5)]
    return losses, {name: raw(parameter) for name, parameter in module.named_parameters()}


def code_that_runs(case: Case) -> dict[str, Any]:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    engine = build(case)
    data = batches(engine)
    found: dict[str, Any] = {"changed instructions": set(), "bare layers": True, "profiled": []}
    train_batch, exec_schedule = PipelineEngine.train_batch, PipelineEngine._exec_schedule
    profiled = False

    def watch_profile(self: Any, data_iter: Any = None) -> Any:
        nonlocal profiled
        profiled = any(getattr(f, "__name__", "") == "marked" for f in self.module.forward_funcs)
        return train_batch(self, data_iter)

    def watch(self: Any, pipe_schedule: Any) -> None:
        layers_here = [*self.module._modules.values(), scale]
        bare = all(f in layers_here for f in self.module.forward_funcs)
        if profiled:
            found["profiled"].append(self.global_steps + 1)
        else:
            found["bare layers"] &= bare
            stock = PipelineEngine._INSTRUCTION_MAP
            changed = {kind.__name__ for kind, function in self._INSTRUCTION_MAP.items() if function is not stock[kind]}
            found["changed instructions"] |= changed
        exec_schedule(self, pipe_schedule)

    PipelineEngine.train_batch, PipelineEngine._exec_schedule = watch_profile, watch
    for _ in range(5):
        engine.train_batch(data)
    return found


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Module):
    """Stands in for work on an accelerator: sleeps forward, and twice as long backward if it has to."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(hidden * self.weight, self.seconds)  # type: ignore[no-any-return]

    def load_signal(self) -> float:
        return 0.5


def sleeping_engine(block: dict[str, Any], seconds: Sequence[float], stages: int) -> tuple[Any, Iterator[Any]]:
    module = PipelineModule(
        layers=[LayerSpec(SleepingLayer, s) for s in seconds],
        num_stages=stages,
        loss_fn=lambda output, label: (output - label).square().mean(),
        partition_method="uniform",
    )
    settings = {**config(Case(micro_batches=4)), "dynmo": block}
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]

    def data() -> Iterator[Any]:
        while True:
            yield torch.ones(2, 4), torch.zeros(2, 4)

    return engine, data()


def train_sleeping(block: dict[str, Any], milliseconds: Sequence[float], steps: int) -> dict[str, Any]:
    engine, data = sleeping_engine(block, [ms / 1000 for ms in milliseconds], torch.distributed.get_world_size())
    for _ in range(steps):
        engine.train_batch(data)
    reports = [(r.step, r.reason, r.old_partition, r.new_partition, r.bottleneck_seconds_after) for r in engine.reports]
    return {"partition": engine.partition, "reports": reports}


def diffusion_both_ways(stages: int, seed: int) -> tuple[Any, Any, list[int]]:
    """Partitions found between neighbours and in memory, and how many numbers each reduction over the world had."""
    from ds_dynmo import partitioners
    from ds_dynmo.engine.balancing.decentralized import decide_among_neighbours
    from ds_dynmo.engine.comm.communicator import Communicator

    chooser = random.Random(seed)
    case = Case(stages=stages)
    module = PipelineModule(layers=layers(case), num_stages=stages, loss_fn=loss, partition_method="uniform")
    comm = Communicator(module.mpu(), torch.device("cpu"), 30.0)
    decentralized, pure, reduced = [], [], []
    reduce = comm.max_over_world

    def watched(numbers: torch.Tensor) -> torch.Tensor:
        reduced.append(numbers.numel())
        return reduce(numbers)

    comm.max_over_world = watched  # type: ignore[method-assign]
    comm.gather_objects = comm._gather = None  # type: ignore[assignment]
    for _ in range(5):
        num_layers = chooser.randint(stages, 20)
        costs = [chooser.choice([0.0, 1.0, chooser.random()]) for _ in range(num_layers)]
        start = [0, *sorted(chooser.sample(range(1, num_layers), stages - 1)), num_layers]
        own = costs[start[module.stage_id] : start[module.stage_id + 1]]
        speeds = [chooser.choice([0.5, 1.0]) for _ in range(stages)]
        speed = speeds[module.stage_id]
        decentralized.append(list(decide_among_neighbours(own, start, None, module.stage_id, comm, speed=speed)))
        pure.append(partitioners.diffusion(costs, stages, start, speeds=speeds))
    return decentralized, pure, reduced


def profile_sleeping(milliseconds: Sequence[float]) -> tuple[list[float], Any]:
    seconds = [ms / 1000 for ms in milliseconds]
    engine, data = sleeping_engine({"interval": 0}, seconds, 2)
    for _ in range(2):
        engine.train_batch(data)
    return seconds, engine.profile


def rebalance_first() -> dict[str, Any]:
    engine, data = sleeping_engine({"interval": 0}, [0.001, 0.001, 0.001, 0.006], 2)
    try:
        engine.rebalance()
        early = ""
    except ds_dynmo.MigrationError as error:
        early = str(error)
    engine.set_dataiterator(data)
    engine.rebalance()
    return {"early": early, "steps": engine.global_steps, "partition": engine.partition}


def rebalance_with_little_memory() -> tuple[str, list[int]]:
    engine = build(Case(dynmo={"interval": 0, "memory_limit": 500}))
    data = batches(engine)
    engine.train_batch(data), engine.train_batch(data)
    try:
        engine.rebalance()
    except ds_dynmo.PartitionError as error:
        engine.train_batch(data)
        return str(error), engine.partition
    return "", engine.partition


def train_with_little_memory() -> tuple[list[int], int]:
    engine = build(Case(dynmo={"interval": 2, "memory_limit": 500}))
    data = batches(engine)
    for _ in range(5):
        engine.train_batch(data)
    return engine.partition, engine.global_steps


def refuse_partition(partition: Any) -> tuple[Any, Any, str]:
    engine = build(Case())
    engine.train_batch(batches(engine))
    before, message = state(engine), ""
    try:
        engine.rebalance(partition)
    except ds_dynmo.PartitionError as error:
        message = str(error)
    return before, state(engine), message


def disagree() -> tuple[str, list[int], list[float]]:
    engine = build(Case())
    data, message = batches(engine), ""
    losses = [engine.train_batch(data).item()]
    try:
        engine.rebalance([0, 2 + engine.stage_id, 8])
    except ds_dynmo.MigrationError as error:
        message = str(error)
    return message, engine.partition, [*losses, engine.train_batch(data).item()]


def rebalance_alone() -> str:
    engine = build(Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 2.0}))
    message = ""
    store = torch.distributed.distributed_c10d._get_default_store()
    if engine.global_rank == 0:
        try:
            engine.rebalance([0, 2, 4, 8])
        except ds_dynmo.MigrationError as error:
            message = str(error)
        store.set("told", "yes")
    store.wait(["told"])
    return message


def unpackable() -> tuple[str, list[float]]:
    engine = build(Case())
    data, message = batches(engine), ""
    losses = [engine.train_batch(data).item()]
    if engine.stage_id == 0:
        engine._layers.local_module(1).odd = torch.eye(2).to_sparse_csc()
    try:
        engine.rebalance([0, 1, 8])
    except ds_dynmo.MigrationError as error:
        message = str(error)
    return message, [*losses, engine.train_batch(data).item()]


def fail_while_moving() -> None:
    engine = build(Case())
    engine.train_batch(batches(engine))

    def broken(*args: Any) -> None:
        raise OSError("the cable is gone")

    engine._comm.exchange = broken
    engine.rebalance([0, 1, 8])


def departed_parameters(precision: str) -> int:
    engine = build(Case(stages=2, tied=True, precision=precision))
    data = batches(engine)
    for _ in range(3):
        engine.train_batch(data)
    alive = []
    for partition in ([0, 7, 8], [0, 1, 8]):
        watched = [weakref.ref(p) for p in engine.module.parameters()]
        gc.disable()
        engine.rebalance(partition)
        here = set(map(id, engine.module.parameters()))
        alive += [ref for ref in watched if ref() is not None and id(ref()) not in here and hooked(ref())]
        gc.enable()
        engine.train_batch(data)
        gc.collect()
        here = set(map(id, engine.module.parameters()))
        alive += [ref for ref in watched if ref() is not None and id(ref()) not in here]
    return len(alive)


def stream(precision: str) -> dict[str, Any]:
    """The middle stage gives three layers away and gets two: what is in flight, and what of the departed is alive."""
    engine = build(Case(stages=3, blocks=6, precision=precision, start=(0, 3, 6, 9)))
    engine.train_batch(batches(engine))
    watched = {
        index: [weakref.ref(parameter) for parameter in module.parameters()]
        for index, module in engine._layers.modules().items()
        if 3 <= index < 6
    }
    exchange, seen = engine._comm.exchange, []

    def watching(sends: Sequence[Any], receives: Sequence[Any]) -> None:
        alive = [index for index, refs in watched.items() if any(ref() is not None and ref().numel() for ref in refs)]
        seen.append((len({id(t) for _, t in sends}) > 0, len(receives) > 0, alive))
        exchange(sends, receives)

    engine._comm.exchange = watching
    gc.disable()
    engine.rebalance([0, 1, 3, 9])
    return {"rounds": seen, "stage": engine.stage_id}


def hooked(parameter: Any) -> bool:
    """Does a wrapper still hold on to a parameter that left?"""
    return bool(parameter._post_accumulate_grad_hooks) or hasattr(parameter, "_hp_mapping")


def full_state(case: Case, moves: dict[int, list[int]]) -> list[dict[str, Any]]:
    """What DeepSpeed's own functions give for every parameter, right after each move or batch; by layer and name."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = build(case)
    optimizer, groups = engine.optimizer, engine.optimizer.param_groups
    data, seen = batches(engine), []
    for step in range(4):
        if step in moves:
            engine.rebalance(moves[step])
        found: dict[str, Any] = {}
        for index, module in engine._layers.counted_modules().items():
            for name, parameter in module.named_parameters():
                found[f"{index}.{name}"] = raw(safe_get_full_fp32_param(parameter))
                if step:
                    for key in ("exp_avg", "exp_avg_sq"):
                        found[f"{index}.{name}/{key}"] = raw(safe_get_full_optimizer_state(parameter, key))
        seen.append(found)
        engine.train_batch(data)
    assert engine.optimizer is optimizer and engine.optimizer.param_groups is groups
    assert all(engine.param_names[parameter] for parameter in engine.module.parameters())
    return seen


def stay(precision: str) -> tuple[int, bool]:
    engine = build(Case(precision=precision))
    data = batches(engine)
    engine.train_batch(data)
    before, modules = state(engine), list(engine.module.forward_funcs)
    report = engine.rebalance([0, 4, 8])
    return report.bytes_moved, state(engine) == before and modules == list(engine.module.forward_funcs)


class Odd(nn.Module):
    """Cannot be pickled, and counts its batches in an attribute that decides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH,), 5))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.calls = 0
        self.activation: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.tanh(x)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return hidden + self.activation(hidden * self.weight) * (self.seen + self.calls) * 0.01


def odd_layers(case: Case) -> list[Any]:
    torch.manual_seed(3)
    return [LayerSpec(Embedding, 1), Block(0), LayerSpec(Odd), nn.LayerNorm(WIDTH), LayerSpec(Head, 2)]


def train_layers(
    make_layers: Callable[[Case], list[Any]], case: Case, moves: Sequence[Sequence[int]]
) -> dict[str, Any]:
    engine = build(case, make_layers)
    data, losses, waiting = batches(engine), [], list(moves)
    for _ in range(6):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return {"losses": losses, "state": state(engine), "partition": engine.partition}


class Widen(nn.Module):
    """Gives a tuple of tensors of its own width."""

    def __init__(self, width: int, wider: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((width, wider), seed))

    def forward(self, inputs: Any) -> Any:
        hidden, kept = inputs if isinstance(inputs, tuple) else (inputs, inputs.mean(-1))
        return hidden @ self.weight, kept * 2.0


class Close(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((width, VOCABULARY), 9))

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden, kept = inputs
        return hidden @ self.weight + kept[..., None]


def layers_of_many_widths(case: Case) -> list[Any]:
    widths = [WIDTH, 3, 12, 5, 7]
    wideners = [LayerSpec(Widen, a, b, a) for a, b in zip(widths, widths[1:])]
    return [LayerSpec(Embedding, 1), *wideners, LayerSpec(Close, widths[-1])]


def layers_tied_in_the_middle(case: Case) -> list[Any]:
    def shared() -> Any:
        return TiedLayerSpec(
            "shared",
            Block,
            7,
            tied_weight_attr=["up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias"],
        )

    return [LayerSpec(Embedding, 1), LayerSpec(Block, 1), shared(), LayerSpec(Block, 2), shared(), LayerSpec(Head, 2)]


def train_with_client_scheduler(moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Two groups on every rank, one of them empty where a stage has no such parameter, and a scheduler of lambdas."""
    case = Case(stages=4)
    torch.manual_seed(0)
    module = PipelineModule(layers=layers(case), num_stages=4, loss_fn=loss, partition_method="uniform")
    groups = [{"params": [], "name": "nobody's"}, *parameter_groups(module, "two")]
    optimizer = torch.optim.AdamW([{"name": "", **group} for group in groups], lr=0.03)
    factors = [lambda step: 0.1**step, lambda step: 0.9**step, lambda step: 0.5**step]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    engine = ds_dynmo.initialize(
        model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config(Case(optimizer="client"))
    )[0]
    data, losses, waiting = batches(engine), [], list(moves)
    for _ in range(6):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return {"losses": losses, "lr": [group["lr"] for group in optimizer.param_groups]}


def monitored(monitors: dict[str, Any], block: dict[str, Any]) -> list[tuple[int, Any]]:
    """What the engine recorded, in order, each with the number of samples it had seen."""
    case = Case(dynmo={"interval": 0, **block})
    torch.manual_seed(0)
    module = PipelineModule(layers=layers(case), num_stages=2, loss_fn=loss, partition_method="uniform")
    engine = ds_dynmo.initialize(
        model=module, model_parameters=list(module.parameters()), config={**config(case), **monitors}
    )[0]
    data, samples = batches(engine), [0]
    engine.rebalance([0, 3, 8])
    for step in range(4):
        engine.train_batch(data)
        samples.append(engine.global_samples)
        if step == 1:
            engine.rebalance([0, 2, 8])
    return [(samples[record.step], record) for record in [*engine.reports, *engine.measurements]]


def norms(case: Case) -> list[float]:
    engine = build(case)
    data, found = batches(engine), []
    for _ in range(3):
        engine.train_batch(data)
        found.append(engine.get_global_grad_norm())
    return found


# -- tests/distributed/test_frozen.py -----------------------------------------------------------------


def freeze(engine: Any, prefix: int) -> None:
    """Freeze the leading layers, unfreeze the others."""
    for index, module in engine._layers.modules().items():
        for parameter in module.parameters():
            parameter.requires_grad_(index >= prefix)
            if index < prefix:
                parameter.grad = None


def train_frozen(case: Case, frozen: dict[int, int], moves: dict[int, list[int]]) -> dict[str, Any]:
    engine = build(case)
    data, losses, prefix = batches(engine), [], 0
    thawed = []
    for step in range(7):
        if step in frozen:
            prefix = frozen[step]
            freeze(engine, prefix)
            engine.model_changed(f"{prefix} layers are frozen")
        if step in moves:
            engine.rebalance(moves[step])
        engine._controller.decided(moved=False)  # moves are this test's own
        before = {index: raw_layer(module) for index, module in engine._layers.modules().items()}
        losses.append(engine.train_batch(data).item())
        thawed += [
            (step, index)
            for index, module in engine._layers.modules().items()
            if index < prefix and raw_layer(module) != before[index]
        ]
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id(), "thawed": thawed}


def raw_layer(module: nn.Module) -> list[bytes]:
    return [raw(parameter) for parameter in module.parameters()]


def freeze_biases(precision: str, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    engine = build(Case(precision=precision, optimizer="SGD"))
    data, losses, waiting = batches(engine), [], list(moves)

    def biases() -> dict[str, bytes]:
        mine = {f"{i}.{n}": raw(p) for i, m in engine._layers.modules().items() for n, p in m.named_parameters()}
        everywhere = {k: v for part in engine._comm.gather_objects(mine) for k, v in part.items()}
        return {name: value for name, value in everywhere.items() if "bias" in name}

    def batch() -> dict[str, bytes]:
        engine._controller.decided(moved=False)
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
        return biases()

    def let_train(trains: bool) -> None:
        for module in engine._layers.modules().values():
            for name, parameter in module.named_parameters():
                if "bias" in name:
                    parameter.requires_grad_(trains)
        engine.model_changed("biases")

    before = batch()
    let_train(False)
    batch()
    frozen = batch()
    let_train(True)
    after = batch()
    changed = {"while frozen": frozen != before, "afterwards": after != frozen}
    return {"losses": losses, "biases": after, "changed": changed}


def unfreeze_later(precision: str, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    def frozen_layers(case: Case) -> list[Any]:
        return [*layers(case)[:2], LayerSpec(FrozenBlock, 1), LayerSpec(FrozenBlock, 2), *layers(case)[4:]]

    engine = build(Case(precision=precision, groups="two"), frozen_layers)
    data, losses, waiting = batches(engine), [], list(moves)

    def everywhere() -> dict[int, list[bytes]]:
        mine = {index: raw_layer(module) for index, module in engine._layers.modules().items()}
        return {k: v for part in engine._comm.gather_objects(mine) for k, v in part.items() if k in (2, 3)}

    first = everywhere()
    for _ in range(2):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    frozen = everywhere()
    freeze(engine, 0)
    engine.model_changed("all train")
    engine._controller.decided(moved=False)
    for _ in range(2):
        losses.append(engine.train_batch(data).item())
    return {
        "losses": losses,
        "state": state(engine),
        "replica": 0,
        "moved while frozen": frozen != first,
        "trained": everywhere() != frozen,
    }


class FrozenBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(False)


def train_all_frozen() -> dict[str, Any]:
    engine = build(Case())
    data = batches(engine)
    engine.train_batch(data)
    freeze(engine, 8)
    engine.model_changed("all is frozen")
    engine._controller.decided(moved=False)
    before = state(engine)
    engine.train_batch(data), engine.train_batch(data)
    return {"steps": engine.global_steps, "state": state(engine), "state when frozen": before}


def count_backward_work(prefix: int) -> dict[str, int]:
    from deepspeed.runtime.pipe import p2p

    engine = build(Case(stages=3, micro_batches=2, dynmo={"interval": 0, "profile": {"warmup_batches": 99}}))
    data = batches(engine)
    engine.train_batch(data)
    freeze(engine, prefix)
    engine.model_changed("frozen")
    engine._controller.decided(moved=False)
    counts = {"backward": 0, "gradients sent": 0, "gradients": 0, "reduced": 0}
    send, sum_gradients = p2p.send, engine._get_gradients_for_reduction

    def counting_send(tensor: torch.Tensor, stage: int, **kwargs: Any) -> Any:
        counts["gradients sent"] |= int(stage < engine.stage_id)
        return send(tensor, stage, **kwargs)

    def counting_reduce() -> Any:
        found = sum_gradients()
        counts["reduced"] = len(found[0])
        return found

    p2p.send, engine._get_gradients_for_reduction = counting_send, counting_reduce
    original = torch.autograd.backward

    def counting_backward(*args: Any, **kwargs: Any) -> Any:
        counts["backward"] = 1
        return original(*args, **kwargs)

    torch.autograd.backward = counting_backward  # type: ignore[assignment]
    engine.before_step(lambda: counts.update(gradients=sum(p.grad is not None for p in engine.module.parameters())))
    engine.train_batch(data)
    p2p.send, torch.autograd.backward = send, original  # type: ignore[assignment]
    return counts


def freeze_silently() -> None:
    engine = build(Case())
    engine.train_batch(batches(engine))
    freeze(engine, 2)
    engine.train_batch(batches(engine))


def freeze_half_a_tie() -> None:
    engine = build(Case(tied=True))
    freeze(engine, 1)
    engine.model_changed("half")


def freeze_tie(precision: str, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Freeze all uses of a tied layer, and let them train again."""
    engine = build(Case(tied=True, precision=precision))
    data, losses, waiting = batches(engine), [], list(moves)

    def tie() -> list[bytes]:
        mine = [raw_layer(m) for i, m in sorted(engine._layers.modules().items()) if engine._layers.key(i) is not None]
        return next(filter(None, engine._comm.gather_objects(mine[0] if mine else [])))

    changed = []
    for tie_trains in (True, False, True):
        for index, module in engine._layers.modules().items():
            if engine._layers.key(index) is not None:
                module.requires_grad_(tie_trains)
        before = tie()
        engine.model_changed("the tie")
        for _ in range(2):
            engine._controller.decided(moved=False)
            losses.append(engine.train_batch(data).item())
            if waiting:
                engine.rebalance(waiting.pop(0))
        changed.append(tie() != before)
    return {"losses": losses, "state": state(engine), "replica": 0, "changed": changed}


def share_a_parameter() -> str:
    """Two layers of stage 0 share a weight; the error that every rank gets."""
    linear = nn.Linear(WIDTH, WIDTH)
    stages = [LayerSpec(Embedding, 1), linear, nn.Sequential(linear), LayerSpec(Block, 1), LayerSpec(Head, 2)]
    try:
        build(Case(), lambda case: stages)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def freeze_sleeping(count: int) -> dict[str, Any]:
    engine, data = sleeping_engine({"interval": 0}, [0.004] * count, 2)
    for _ in range(2):
        engine.train_batch(data)
    before = engine.partition
    freeze(engine, count // 2)
    engine.model_changed("half is frozen")
    for _ in range(2):
        engine.train_batch(data)
    return {"before": before, "partition": engine.partition, "reason": engine.reports[-1].reason}
