"""Features that work under DeepSpeed's 1F1B work under our own schedules, to the bit: workloads of other tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe import p2p
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_dynmo.engine.split.steps import ScheduleInForce
from tests.engine.comm import test_masks
from tests.engine.deepspeed import test_engine_class, test_foreign_models, test_tied_layers, test_topologies
from tests.engine.run import test_instructions_on_ranks as test_instructions
from tests.models import test_expert_parallel
from tests.models import test_huggingface_on_ranks as test_huggingface
from tests.support import case_runs, elastic
from tests.support.case_runs import CaseRun
from tests.support.configs import SECTION, Case
from tests.support.harness import RankError, run, run_each
from tests.support.models import WIDTH, Block, Embedding, Head, scale, seeded
from tests.support.training import batches, build, outcome_of, raw, train, train_frozen

pytestmark = pytest.mark.ranks

MOVES = [[0, 2, 8], [0, 6, 8], [0, 1, 8]]


def under(kind: str, function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Run a workload under a schedule, unless it names one. Return also how many batches ran our own schedule."""
    ours, begin = [], ScheduleInForce.begin

    def watched(self: ScheduleInForce, steps: Any) -> None:
        begin(self, steps)
        ours.append(self.running is not None)

    SECTION["schedule"] = {"kind": kind}
    ScheduleInForce.begin = watched  # type: ignore[method-assign]
    try:
        return function(*args), sum(ours)
    finally:
        del SECTION["schedule"]
        ScheduleInForce.begin = begin  # type: ignore[method-assign]


DIFFER = {"attributes", "reports", "summaries"}  # they hold seconds, or buffers


def comparable(found: Any) -> Any:
    if isinstance(found, list):
        return [comparable(one) for one in found]
    if isinstance(found, dict):
        return {key: value for key, value in found.items() if key not in DIFFER}
    return found


def check_as_under_1f1b(ranks: int, function: Callable[..., Any], *args: Any, unsplit: bool = False) -> None:
    """Layers are at the same places under both, so each rank has the same.

    Args:
        unsplit: no batch runs our own schedule.
    """
    stock, ours = (run(ranks, under, kind, function, *args) for kind in ("1f1b", "zero_bubble"))
    assert [count for _, count in stock] == [0] * ranks
    assert all((count == 0) is unsplit for _, count in ours)
    for (expected, _), (found, _) in zip(stock, ours, strict=True):
        assert comparable(found) == comparable(expected)


# -- workloads of its own ---------------------------------------------------------------------------------


def watched_by_the_user() -> dict[str, Any]:
    """Return what hooks on parameters, callbacks, ``engine.loss`` and evaluations between batches see."""
    engine = build(Case(stages=3, micro_batches=5))
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
    for _ in range(3):
        losses.append(engine.train_batch(data).item())
        last = float(engine.loss.detach()) if engine.is_last_stage() else None
        losses += [last, engine.eval_batch(batches(engine, seed=7)).item()]
    assert all(len(gradients) == 2 * 3 * 5 for gradients in seen.values())
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


def train_layers(case: Case, make_layers: Callable[[Case], list[Any]], moves: list[list[int]]) -> dict[str, Any]:
    engine = build(case, make_layers)
    data, losses, waiting = batches(engine), [], list(moves)
    for _ in range(5):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return outcome_of(engine, losses)


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
        self.inner.compile(backend="eager")
        self.passes = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
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


class Twofold(nn.Module):
    """Returns two tensors, which depend on each other's layers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.one, self.other = Block(index), Block(index + 50)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.one(both[0] + 0.1 * both[1])
        return hidden, self.other(both[1] + 0.1 * hidden)


def in_two(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden, 0.5 * hidden


def add_up(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return both[0] + both[1]


def twofold(case: Case) -> list[Any]:
    middle = [LayerSpec(Twofold, index) for index in range(case.blocks)]
    return [LayerSpec(Embedding, 1), in_two, *middle, add_up, LayerSpec(Head, 2)]


PROFILED = {"interval": 0, "profile": {"batches": 1, "warmup_batches": 0}}


@dataclass(frozen=True)
class Feature:
    ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    unsplit: bool = False


def decided() -> dict[str, Any]:
    """Train, decide an order and a partition from a profile, and train on."""
    engine = build(Case(stages=2, replicas=2, micro_batches=6))
    data, losses = batches(engine), []
    for step in range(4):
        losses.append(engine.train_batch(data).item())
        if step == 1:
            engine.rebalance()
        steps = engine.stage.schedule.running
        assert steps is None or (steps.costs is not None) == (step > 1)
    return {"losses": losses}


def features(**settings: Any) -> tuple[Any, ...]:
    return settings, {}, MOVES


FEATURES = {
    "hooks, callbacks, loss, evaluations": Feature(3, watched_by_the_user),
    "tuples": Feature(3, train_layers, (Case(stages=3, dynmo=PROFILED), twofold, [[0, 2, 5, 9], [0, 3, 4, 9]])),
    "tensors without gradient": Feature(2, train_layers, (Case(micro_batches=5), counting_layers, [])),
    "bool masks": Feature(
        2, test_topologies.train_both, (Case(dynmo=PROFILED), test_topologies.mask_layers, True, MOVES)
    ),
    "masks and tables": Feature(
        3,
        test_masks.train,
        (replace(test_masks.STAGES, micro_batches=6), "everything", test_masks.MOVES, (5,), False, test_masks.THAWED),
    ),
    "a frozen prefix": Feature(
        3, train_frozen, (Case(stages=3, micro_batches=5), {1: 3, 3: 5, 5: 0}, {2: [0, 1, 5, 8]})
    ),
    "a decision": Feature(4, decided),
    "dynamic shapes": Feature(2, test_topologies.train_feature, ({}, {"dynamic_shape": True}, MOVES, True)),
    "patched instructions": Feature(2, test_instructions.train_patched, ("ds_dynmo", Case(clip=0.0), "entries", True)),
    "instructions patched later": Feature(
        2, test_instructions.train_patched, ("ds_dynmo", Case(clip=0.0), "engine", False)
    ),
    "own class": Feature(
        2,
        test_engine_class.train_own,
        ("ds_dynmo", Case(blocks=6, clip=0.0), (), None, None, twofold),
        unsplit=True,
    ),
    "sizes": Feature(2, test_topologies.train_other_sizes, (MOVES,)),
    "fewer micro-batches": Feature(4, train, (Case(stages=4, micro_batches=2), [[0, 1, 3, 5, 8]], 4, 1)),
    "1 micro-batch": Feature(3, train, (Case(stages=3, micro_batches=1), [], 4, 1)),
    "1 stage": Feature(1, train, (Case(stages=1), [], 2, 1), unsplit=True),
    "switched off": Feature(2, train, (Case(dynmo={"enabled": False}, replicas=1), [], 3, 1)),
    "tensor parallel": Feature(
        4,
        test_topologies.train_sliced,
        (Case(slices=2, blocks=4, tied=True, clip=0.05, precision="bf16"), [[0, 2, 6], [0, 5, 6]]),
    ),
    "tensor parallel, zero1": Feature(
        4,
        test_topologies.train_sliced,
        (Case(slices=2, blocks=4, clip=0.05, precision="bf16 zero1"), [[0, 2, 6], [0, 5, 6]]),
    ),
    "experts on replicas": Feature(
        4, case_runs.train_moved, (CaseRun(test_expert_parallel.MODELS["auxiliary loss"], replicas=2),)
    ),
    "a layer used twice": Feature(
        3, train_layers, (Case(stages=3, micro_batches=5, precision="bf16"), used_twice, [[0, 4, 5, 7]])
    ),
    "unusual modules": Feature(3, train_layers, (Case(stages=3, micro_batches=5, clip=0.0), unusual_layers, [])),
    "gpt2": Feature(2, case_runs.train_moved, (test_huggingface.case("gpt2", precision="bf16"),)),
    "mixtral": Feature(2, case_runs.train_moved, (test_huggingface.case("mixtral", precision="bf16 zero1"),)),
    "mixtral recomputed": Feature(2, case_runs.train_moved, (test_huggingface.case("mixtral", interval=1),)),
    "qwen3": Feature(2, case_runs.train_moved, (test_huggingface.case("qwen3"),)),
    "peft": Feature(2, test_foreign_models.train, ("lora", True)),
    "torchvision": Feature(2, test_foreign_models.train, ("alexnet", True)),
    "tied layers": Feature(
        3,
        test_tied_layers.train,
        (Case(stages=3, clip=0.5, groups="two"), "first whole", [[0, 2, 3, 8], [0, 5, 7, 8], [0, 1, 2, 8]], 5),
    ),
    "a tied head": Feature(
        2, test_tied_layers.train, (Case(clip=0.5, precision="bf16"), "megatron", [[0, 6, 8], [0, 1, 8]], 3)
    ),
    "fewer stages": Feature(
        4,
        elastic.train_and_repack,
        (Case(stages=4, tied=True, dynmo={"interval": 0}, dropout=True), {2: [0, 2, 3, 8], 3: [0, 3, 8]}, 5),
    ),
    "timers": Feature(2, test_topologies.train_feature, features(wall_clock_breakdown=True, steps_per_print=1)),
    "autocast": Feature(
        2,
        test_topologies.train_feature,
        features(torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    ),
}


# Always tested: what no other test has under our schedules. The others are in the nightly form.
FIRST = (
    "hooks, callbacks, loss, evaluations",
    "tuples",
    "tensors without gradient",
    "patched instructions",
    "unusual modules",
)


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.nightly) for name in FEATURES]
)
@pytest.mark.every_variant
def test_features_work_as_under_1f1b(name: str) -> None:
    if name == "peft":
        pytest.importorskip("peft")
    one = FEATURES[name]
    check_as_under_1f1b(one.ranks, one.function, *one.args, unsplit=one.unsplit)


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
    engine = build(Case(blocks=4, replicas=2, tied=True, micro_batches=6, dynmo=block))
    lines = Lines()
    data = batches(engine)
    for partition in ([0, 3, 7], [0, 4, 7], [0, 2, 7]):
        engine.rebalance(partition)
        engine.train_batch(data)
    return [message for message in lines.messages if "always run in one" in message]


def test_layers_that_cannot_be_split_are_named_once() -> None:
    silent, of_ranks = run_each(4, names_layers, (False,), (True,))
    (message,) = [message for lines in of_ranks for message in lines]
    assert message.startswith("schedule: backward passes of layer 6 (Embedding) always run in one: see docs/schedules")
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
    return p2p.send, p2p.recv, nn.Linear.forward, nn.Module.__call__, F.linear, torch.autograd.Function.apply, modes


def after_a_failure() -> bool:
    """Tell whether, on the rank whose layer failed, everything is as before the batch."""
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
    engine = build(Case(stages=3, micro_batches=5, dynmo=block), failing_layers)
    data, sends = batches(engine), originals()
    before = engine._INSTRUCTION_MAP, list(engine.module.forward_funcs)
    engine.train_batch(data)
    assert originals() == sends
    try:
        engine.train_batch(data)
    except ArithmeticError:
        modules = list(engine.module.modules())
        assert not any("forward" in vars(module) for module in modules)
        assert not any(parameter._backward_hooks for parameter in engine.module.parameters())
        assert originals() == sends
        assert (engine._INSTRUCTION_MAP, list(engine.module.forward_funcs)) == before
        raise
    return True


def test_an_error_in_the_middle_of_a_batch_ends_the_run_and_leaves_nothing_behind() -> None:
    with pytest.raises(RankError, match="in the middle of a batch"):
        run(3, after_a_failure)


def save_under(kind: str, case: Case, folder: str) -> None:
    engine = build(replace(case, dynmo={"interval": 0, "schedule": {"kind": kind}}))
    data = batches(engine)
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(folder)


def go_on_under(kind: str, case: Case, folder: str) -> dict[str, Any]:
    engine = build(replace(case, dynmo={"interval": 0, "schedule": {"kind": kind}}))
    engine.load_checkpoint(folder)
    data = batches(engine, seed=1)
    return outcome_of(engine, [engine.train_batch(data).item() for _ in range(2)])


def test_a_checkpoint_of_one_kind_is_loaded_under_the_other(tmp_path: Path) -> None:
    case, found = Case(precision="bf16 zero1"), []
    for saved, loaded in (("1f1b", "1f1b"), ("1f1b", "zero_bubble"), ("zero_bubble", "1f1b")):
        folder = str(tmp_path / f"{saved} {loaded}")
        found.append(run(2, save_then_go_on, saved, loaded, case, folder))
    assert found[0] == found[1] == found[2]


def save_then_go_on(saved: str, loaded: str, case: Case, folder: str) -> dict[str, Any]:
    save_under(saved, case, folder)
    return go_on_under(loaded, case, folder)
