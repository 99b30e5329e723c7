"""Features that work under DeepSpeed's 1F1B work under our own schedules, to the bit.

Features with a file of their own are tested there, by the same check.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.configs import Case
from tests.support.harness import RankError, run, run_each
from tests.support.models import WIDTH, Block, Embedding, Head, scale, seeded, twofold
from tests.support.training import PROFILED, batches, build, outcome_of, raw, train, train_layers
from tests.support.under_schedules import check_as_under_1f1b, check_equal, under

pytestmark = pytest.mark.ranks

# -- workloads of its own ---------------------------------------------------------------------------------


def watched_by_the_user() -> dict[str, Any]:
    """Return what hooks on parameters, callbacks, ``engine.loss`` and evaluations between batches see."""
    engine = build(Case(micro_batches=5))
    data, seen = batches(engine), {}
    for name, parameter in engine.module.named_parameters():
        gradients: list[bytes] = []
        seen[name] = gradients
        parameter.register_hook(lambda gradient, gradients=gradients: gradients.append(raw(gradient)))
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, gradients=gradients: gradients.append(raw(parameter.grad))
        )
    before_step: list[Any] = []
    engine.before_step(
        lambda: before_step.append([raw(p.grad) for p in engine.module.parameters() if p.grad is not None])
    )
    losses = []
    for _ in range(2):
        losses.append(engine.train_batch(data).item())
        last = float(engine.loss.detach()) if engine.is_last_stage() else None
        losses += [last, engine.eval_batch(batches(engine, seed=7)).item()]
    assert all(len(gradients) == 2 * 2 * 5 for gradients in seen.values())
    return {"losses": losses, "seen": seen, "before step": before_step}


class Counting(Block):
    """Sends a tensor of numbers that it holds and changes for the next micro-batch."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("count", torch.zeros(300, dtype=torch.long))

    def forward(self, inputs: Any) -> Any:
        hidden, numbers = inputs if isinstance(inputs, tuple) else (inputs, torch.zeros_like(self.count))
        self.count += 1 + numbers.max()
        return super().forward(hidden) * (1 + 0.001 * self.count[0]), self.count


class Uncounted(Head):
    def forward(self, inputs: Any) -> torch.Tensor:
        return super().forward(inputs[0])


def counting_layers(case: Case) -> list[Any]:
    blocks = [LayerSpec(Counting, index) for index in range(case.num_layers - 2)]
    return [LayerSpec(Embedding, 1), *blocks, LayerSpec(Uncounted, 2)]


def used_twice(case: Case) -> list[Any]:
    """The middle stage has one block twice, and no other weights of two dimensions."""
    names = [f"{part}.{name}" for part in ("norm", "up", "down") for name in ("weight", "bias")]
    block = TiedLayerSpec("block", Block, 3, tied_weight_attr=names)
    first = [LayerSpec(Embedding, 1), LayerSpec(Block, 0), LayerSpec(Block, 1)]
    return [*first, block, block, scale, LayerSpec(Head, 2)]


class Unusual(Block):
    """What a layer may do with its modules, all of it at once; what trains changes between batches."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.stacked = nn.Parameter(seeded((3, WIDTH, WIDTH), index))
        self.up.register_full_backward_hook(lambda _, inner, outer: (inner[0] * 1.5,))
        self.up.register_forward_pre_hook(lambda _, given: (given[0].tanh(),))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.data.copy_(seeded((WIDTH, WIDTH), index + 1))
        self.inner.bias.data.zero_()
        self.passes = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.passes:  # one that initialize has not seen, and that does not move
            self.inner.compile(backend="eager")
        self.down.requires_grad_(self.passes // 5 % 2 == 0)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(leaf).square().sum(), leaf)
        for row in (self.passes % 3, 1):
            hidden = F.linear(hidden, self.stacked[row])
        self.passes += 1
        changed = torch.tanh(checkpoint(self.inner, hidden, use_reentrant=False))  # type: ignore[arg-type]
        return super().forward(hidden * slope.tanh() + changed)


def unusual_layers(case: Case) -> list[Any]:
    return [LayerSpec(Embedding, 1), *[LayerSpec(Unusual, index) for index in range(4)], LayerSpec(Head, 2)]


@dataclass(frozen=True)
class Feature:
    ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


FEATURES = {  # that no other test has under our schedules
    "hooks, callbacks, loss, evaluations": Feature(2, watched_by_the_user),
    "tuples": Feature(2, train_layers, (Case(dynmo=PROFILED), twofold, [[0, 2, 9], [0, 4, 9]], 4)),
    "tensors without gradient": Feature(2, train_layers, (Case(micro_batches=5), counting_layers, [], 3)),
}
UNUSUAL = Feature(2, train_layers, (Case(micro_batches=5, clip=0.0), unusual_layers, [], 3))
MORE_FEATURES = {
    "tuples on three stages": Feature(
        3, train_layers, (Case(stages=3, dynmo=PROFILED), twofold, [[0, 2, 5, 9], [0, 3, 4, 9]])
    ),
    "fewer micro-batches": Feature(4, train, (Case(stages=4, micro_batches=2), [[0, 1, 3, 5, 8]], 4, 1)),
    "switched off": Feature(2, train, (Case(dynmo={"enabled": False}), [], 3, 1)),
    "a layer used twice": Feature(
        3, train_layers, (Case(stages=3, micro_batches=5, precision="bf16"), used_twice, [[0, 4, 5, 7]])
    ),
}


def test_features_work_as_under_1f1b() -> None:
    calls = [(kind, one.function, *one.args) for one in FEATURES.values() for kind in ("1f1b", "zero_bubble")]
    results = iter(run_each(2, under, *calls))
    for stock, ours in zip(results, results, strict=True):
        check_equal(stock, ours)


def test_unusual_modules_work_as_under_1f1b() -> None:
    check_as_under_1f1b(UNUSUAL.ranks, UNUSUAL.function, *UNUSUAL.args)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MORE_FEATURES)
def test_more_features_work_as_under_1f1b(name: str) -> None:
    one = MORE_FEATURES[name]
    check_as_under_1f1b(one.ranks, one.function, *one.args)


def traced(path: str) -> None:
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}, "trace": {"path": path, "steps": [2, 2]}}
    engine = build(Case(stages=3, micro_batches=6, dynmo=block))
    data = batches(engine)
    for _ in range(2):
        engine.train_batch(data)


def test_a_trace_shows_both_parts_of_a_backward_pass(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run(3, traced, str(path))
    passes: dict[str, dict[tuple[int, int], Any]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") in ("forward", "backward", "weight gradient"):
            name, number = event["name"].rsplit(" ", 1)
            passes.setdefault(name, {})[event["args"]["stage"], int(number)] = event
    every = {(stage, number) for stage in range(3) for number in range(6)}
    in_two = passes["input gradient"].keys()
    assert passes["forward"].keys() == every == in_two | passes.get("backward", {}).keys()
    assert passes["weight gradient"].keys() == in_two and in_two.isdisjoint(passes.get("backward", {}))
    for place, event in passes["weight gradient"].items():
        assert event["cat"] == "weight gradient" and event["ts"] > passes["input gradient"][place]["ts"]


class Lines(logging.Handler):
    """Keeps what this rank logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []
        logging.getLogger("DynMo").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def names_layers(log: bool) -> list[str]:
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}, "log": log, "profile": {"batches": 1}}
    engine = build(Case(blocks=4, replicas=2 if log else 1, micro_batches=4, dynmo=block))
    lines = Lines()
    data = batches(engine)
    for partition in ([0, 3, 7], [0, 4, 7])[: 2 if log else 1]:
        engine.rebalance(partition)
        engine.train_batch(data)
    return [message for message in lines.messages if "always run in one" in message]


def test_layers_that_cannot_be_split_are_named_once() -> None:
    of_ranks, silent = run(4, names_layers, True), run(2, names_layers, False)
    (message,) = [message for lines in of_ranks for message in lines]
    assert message.startswith("schedule: backward passes of layer 6 (Head) always run in one: see docs/schedules")
    assert of_ranks[2] == [message]  # the last stage's first replica
    assert not any(silent)


class Failing(Block):
    good_passes = 7

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.good_passes == 0:
            raise ArithmeticError("in the middle of a batch")
        self.good_passes -= 1
        return super().forward(hidden)


def failing_layers(case: Case) -> list[Any]:
    middle = [LayerSpec(Failing if index == 2 else Block, index) for index in range(case.num_layers - 2)]
    return [LayerSpec(Embedding, 1), *middle, LayerSpec(Head, 2)]


def originals() -> tuple[Any, ...]:
    """What a batch may replace, or leave behind, in torch and DeepSpeed."""
    modes = torch._C._len_torch_function_stack()
    return nn.Linear.forward, nn.Module.__call__, F.linear, torch.autograd.Function.apply, modes


def after_a_failure() -> bool:
    """Tell whether, on the rank whose layer failed, everything is as before the batch."""
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
    engine = build(Case(stages=3, micro_batches=5, dynmo=block), failing_layers)
    data, sends = batches(engine), originals()
    before = list(engine.module.forward_funcs)
    engine.train_batch(data)
    assert originals() == sends
    try:
        engine.train_batch(data)
    except ArithmeticError:
        modules = list(engine.module.modules())
        assert not any("forward" in vars(module) for module in modules)
        assert not any(parameter._backward_hooks for parameter in engine.module.parameters())
        assert originals() == sends
        assert list(engine.module.forward_funcs) == before and engine.stage.chunks.active is None
        raise
    return True


def test_an_error_in_the_middle_of_a_batch_ends_the_run_and_leaves_nothing_behind() -> None:
    with pytest.raises(RankError, match="in the middle of a batch"):
        run(3, after_a_failure)


def loaded_under_both(folder: str) -> list[dict[str, Any]]:
    """Return the outcomes of two batches after a checkpoint: without a load, and of loads under the other schedule."""
    engines = {
        kind: build(Case(precision="bf16 zero1", dynmo={"interval": 0, "schedule": {"kind": kind}}))
        for kind in ("1f1b", "zero_bubble")
    }

    def trained(kind: str, seed: int) -> dict[str, Any]:
        data = batches(engines[kind], seed)
        return outcome_of(engines[kind], [engines[kind].train_batch(data).item() for _ in range(2)])

    for kind, engine in engines.items():
        trained(kind, seed=0)
        engine.save_checkpoint(f"{folder}/{kind}")
    found = [trained("1f1b", seed=1)]
    for kind, other in (("zero_bubble", "1f1b"), ("1f1b", "zero_bubble")):
        engines[kind].load_checkpoint(f"{folder}/{other}")
        found.append(trained(kind, seed=1))
    return found


def test_a_checkpoint_of_one_kind_is_loaded_under_the_other(tmp_path: Path) -> None:
    for went_on, *loaded in run(2, loaded_under_both, str(tmp_path)):
        assert loaded == [went_on] * 2
