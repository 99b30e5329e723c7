"""What stages hold in a batch between passes, and where segments are recomputed, beside what is predicted."""

from __future__ import annotations

import argparse
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.arms import engines_end_here, say
from benchmarks.emulation import pipeline_engine
from ds_dynmo.cli.command_line import check_at_least_1, print_table
from ds_dynmo.engine.comm.links import AHEAD
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.engine.run.executor import Executor
from ds_dynmo.models.gpt import gpt_layers, language_model_loss
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.layer_numbers import local_layers
from ds_dynmo.placement import Shape, owners_of
from ds_dynmo.schedules import Action, one_f_one_b, peak_bytes, schedule_for_equal_costs

OPTIONS = {"micro_batches": 8, "hidden_size": 64, "sequence_length": 64}
BLOCKS_PER_STAGE = 2
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
CHECKPOINTING = ("none", "reentrant", "non-reentrant")
SCHEDULES = {
    "1f1b": "1F1B",
    "zero_bubble": "zero bubble",
    "v": "V",
    "loop": "loop",
}
SHAPES: dict[str, Shape] = {"v": "v", "loop": "loop"}  # where layers are; of others a chain


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the device's storages that an operator made while this was on, and that still exist.

    Attributes:
        live_bytes: of them, now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor) for tensor in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            key = _key(tensor)
            if key not in given and key not in self._sizes:  # else a view, or changed in place
                storage = tensor.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, key)
        return made

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def bytes_of(self, tensors: Sequence[torch.Tensor | None]) -> int:
        """Sum up what is counted of ``tensors``."""
        return sum(self._sizes.get(key, 0) for key in {_key(tensor) for tensor in _tensors(tensors)})


def _tensors(value: Any) -> list[torch.Tensor]:
    device = get_accelerator().device_name()
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
    return [leaf for leaf in leaves if leaf.device.type == device]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def measured_peak(engine: Any, data: Iterator[Any]) -> int:
    """Train a batch. Return the most bytes that this rank held of what was allocated in it. Collective.

    Looked at is what lives before each step of the schedule, and after each layer that runs with gradients: forward
    passes, and what is recomputed. What a layer needs while it runs does not count, nor do gradients of parameters.
    """
    live, peak = LiveStorages(), 0
    parameters = list(engine.module.parameters())

    def look(*_: Any) -> None:
        nonlocal peak
        if torch.is_grad_enabled():
            peak = max(peak, live.live_bytes - live.bytes_of([parameter.grad for parameter in parameters]))

    with ExitStack() as stack:
        for _, layer in local_layers(engine.module):
            # "always": DeepSpeed stops recomputing a segment by an exception, once it has what it needs
            stack.callback(layer.register_forward_hook(look, always_call=True).remove)
        stack.enter_context(_before_each_action(look))
        stack.enter_context(live)
        engine.train_batch(data)
    return peak


@contextmanager
def _before_each_action(call: Callable[[], None]) -> Iterator[None]:
    """Call before each action of a batch."""
    bare = Executor._carry_out

    def carry_out(self: Executor, action: Action) -> None:
        call()
        bare(self, action)

    with mock.patch.object(Executor, "_carry_out", carry_out):
        yield


def predicted_peaks(engine: Any) -> tuple[int, ...]:
    """Predict the most that each stage holds, from the latest profile and the order in force."""
    stages, micro_batches = engine.num_stages, engine.micro_batches
    order = engine.stage.schedule.schedule_for(engine.stage.placement, micro_batches)
    given = DecisionInput.of(
        engine.profile,
        config=engine.stage.config,
        checkpoint_interval=engine.module.activation_checkpoint_interval,
        searches=True,
    )
    passes = given.pipeline.passes
    assert passes is not None
    return peak_bytes(
        order or one_f_one_b(stages, micro_batches), passes.layers.sizes_with_messages(engine.stage.placement, AHEAD)
    )


def make_engine(arguments: argparse.Namespace, kind: str, precision: str, checkpointing: str) -> Any:
    """Make an engine over a GPT, with as many blocks on each stage."""
    stages = torch.distributed.get_world_size()
    config = GPTConfig(
        layers=BLOCKS_PER_STAGE * stages,
        hidden_size=arguments.hidden_size,
        heads=4,
        sequence_length=arguments.sequence_length,
        tied_embedding=False,
    )
    chunks = len(owners_of(SHAPES.get(kind, "chain"), stages))
    partition = [0, *(1 + config.layers * chunk // chunks for chunk in range(1, chunks)), config.layers + 3]
    return pipeline_engine(
        gpt_layers(config),
        micro_batches=arguments.micro_batches,
        dynmo={
            "interval": 0,
            "min_improvement": 0.99,
            "log": False,
            "monitor": False,
            "initial_partition": partition,
            "schedule": {"kind": kind},
        },
        checkpoint_interval=0 if checkpointing == "none" else 1,
        loss_fn=language_model_loss,
        pipeline={"use_reentrant": checkpointing == "reentrant"},
        **PRECISIONS[precision],
    )


def tokens(arguments: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same micro-batch again and again."""
    drawn = torch.randint(256, (1, arguments.sequence_length + 1), generator=torch.Generator().manual_seed(0))
    return itertools.repeat((drawn[:, :-1], drawn[:, 1:]))


def measure_one(arguments: argparse.Namespace, kind: str, precision: str, checkpointing: str) -> dict[str, Any]:
    """Measure a batch after a profile. Collective."""
    engine, data = profiled_engine(arguments, kind, precision, checkpointing), tokens(arguments)
    return {
        "schedule": kind,
        "precision": precision,
        "checkpointing": checkpointing,
        "measured_bytes": of_all_ranks(measured_peak(engine, data)),
        "predicted_bytes": list(predicted_peaks(engine)),
    }


def profiled_engine(arguments: argparse.Namespace, kind: str, precision: str, checkpointing: str) -> Any:
    """Make an engine with the order for equal costs, trained until profile and messages are known. Collective."""
    engine, data = make_engine(arguments, kind, precision, checkpointing), tokens(arguments)
    engine.train_batch(data)
    engine.rebalance()
    sizes = engine.num_stages, engine.micro_batches
    if kind != "1f1b":
        engine.stage.schedule.decide(schedule_for_equal_costs(*sizes, shape=SHAPES.get(kind, "chain")))
    engine.train_batch(data)  # what messages look like is known from here on
    return engine


def of_all_ranks(mine: int) -> list[int]:
    """Gather a number of every rank. Collective."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return every


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare what stages hold of a GPT's passes, at their peak, with what is predicted.

    Two blocks a stage. Orders are those for equal costs, which take no account of checkpointing.
    """
    check_at_least_1(arguments, "micro_batches", "hidden_size", "sequence_length")
    rows = []
    for case in itertools.product(SCHEDULES, PRECISIONS, CHECKPOINTING):
        with engines_end_here():
            rows.append(measure_one(arguments, *case))
        say(", ".join(case))
    return {"rows": rows}


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    show_peaks(found["rows"], "measured_bytes", arguments)


def show_peaks(rows: Sequence[dict[str, Any]], key: str, arguments: argparse.Namespace) -> None:
    """Print these bytes of all stages, and over those predicted."""
    stages = len(rows[0][key])
    print(
        f"\n{stages} stages of {BLOCKS_PER_STAGE} blocks, {arguments.micro_batches} micro-batches: KiB, over predicted"
    )
    cells = []
    for row in rows:
        pairs = zip(row[key], row["predicted_bytes"])
        figures = [f"{measured / 1024:,.0f} ({measured / predicted:.3f})" for measured, predicted in pairs]
        cells.append((SCHEDULES[row["schedule"]], row["precision"], row["checkpointing"], *figures))
    print_table(("schedule", "precision", "checkpointing", *(f"stage {stage}" for stage in range(stages))), cells)
