"""A user's own instructions are called as often as DeepSpeed calls them, and moves change nothing."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_dynmo.engine.measure.trace import INSTRUCTIONS
from tests.distributed.harness import run
from tests.distributed.support.configs import Case
from tests.distributed.support.instructions import MOVES, STEPS, Counts, error_of, initialize, outcomes
from tests.distributed.support.models import Block, Embedding, Head, layers
from tests.distributed.support.training import batches, build, drop_decision, freeze, state, train_and_move, whole

UNCLIPPED = Case(clip=0.0)  # because DeepSpeed clips by another norm
OURS = Case(clip=0.0, dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}})
MESSAGES = (schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad)


def counted(counts: Counts, kind: type, instruction: Callable[..., None]) -> Callable[..., None]:
    def own(self: Any, *args: Any, **kwargs: Any) -> None:
        counts[kind.__name__] += 1
        instruction(self, *args, **kwargs)

    return own


def reduce_nothing(counts: Counts) -> Callable[[Any], None]:
    """Replace the reduction as diffusion-pipe does with gradient release: one replica, gradients stay as they are."""

    def reduce(self: Any) -> None:
        assert self.mpu.get_data_parallel_world_size() == 1
        counts["ReduceGrads"] += 1

    return reduce


def own_map(counts: Counts, present: Any, messages: bool = True) -> dict[type, Any]:
    """Return a map whose instructions count their calls, with a user's own reduction of gradients.

    Args:
        messages: those that send and receive do so too.
    """
    kinds = [kind for kind in present if messages or kind not in MESSAGES]
    own = {kind: counted(counts, kind, present[kind]) for kind in kinds}
    return {**present, **own, schedule.ReduceGrads: reduce_nothing(counts)}


def patch(how: str, engine: Any, counts: Counts, messages: bool = True) -> None:
    if how == "entries":
        PipelineEngine._INSTRUCTION_MAP.update(own_map(counts, PipelineEngine._INSTRUCTION_MAP, messages))
    elif how == "map":
        PipelineEngine._INSTRUCTION_MAP = own_map(counts, PipelineEngine._INSTRUCTION_MAP, messages)
    elif how == "engine":
        engine._INSTRUCTION_MAP = own_map(counts, engine._INSTRUCTION_MAP, messages)


def train_patched(
    which: str,
    case: Case,
    how: str,
    early: bool,
    moves: Sequence[Sequence[int]] = (),
    save_to: str | None = None,
    resume_from: str | None = None,
    messages: bool = True,
) -> dict[str, Any]:
    """Train, and count instructions.

    Args:
        messages: count those that send and receive, too.
        early: patch them before the engine is built, otherwise after two batches.
        save_to: a folder to save to after the second batch.
        resume_from: a folder to load; only the last three batches are trained then.
    """
    counts: Counts = Counter()
    engine_class = None
    if early:
        patch(how, None, counts, messages)
    if how == "subclass":
        present = PipelineEngine._INSTRUCTION_MAP
        engine_class = type("TheirEngine", (PipelineEngine,), {"_INSTRUCTION_MAP": own_map(counts, present, messages)})
    engine = initialize(which, case, layers, engine_class)
    if resume_from is not None:
        engine.load_checkpoint(resume_from)
    data = itertools.islice(batches(engine), engine.global_steps * case.micro_batches, None)
    losses, waiting = [], list(moves)
    for step in range(engine.global_steps, STEPS):
        if step == 2 and not early:
            patch(how, engine, counts, messages)
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
        if step == 1 and save_to is not None:
            engine.save_checkpoint(save_to)
    losses.append(engine.eval_batch(batches(engine, seed=7)).item())
    found = {"losses": losses, "counts": counts, "replica": 0}
    return found if which == "deepspeed" else {**found, "state": state(engine)}


def train_patched_but_messages(case: Case, how: str, early: bool) -> dict[str, Any]:
    """Train with own instructions in place of those that neither send nor receive: these a schedule of ours refuses."""
    return train_patched("ds_dynmo", case, how, early, messages=False)


@pytest.mark.parametrize(
    ("how", "early"),
    [
        *(("entries", True), ("map", False), ("engine", False), ("subclass", True)),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("entries", False), ("map", True))),
    ],
)
def test_patched_instructions_are_called_as_often_as_by_deepspeed(how: str, early: bool) -> None:
    stock = run(2, train_patched, "deepspeed", UNCLIPPED, how, early)
    still = run(2, train_patched, "ds_dynmo", UNCLIPPED, how, early)
    moved = run(2, train_patched, "ds_dynmo", UNCLIPPED, how, early, MOVES)
    assert stock[0]["counts"]["ReduceGrads"] == (5 if early else 3)
    assert outcomes(stock, "counts", "losses") == outcomes(still, "counts", "losses")
    assert outcomes(stock, "counts", "losses") == outcomes(moved, "counts", "losses")
    assert whole(still) == whole(moved)


def test_a_patched_run_resumes_at_another_number_of_stages(tmp_path: Path) -> None:
    saved = run(2, train_patched, "ds_dynmo", UNCLIPPED, "entries", False, MOVES, str(tmp_path))
    moves = ([0, 1, 2, 8], [0, 5, 7, 8])
    three = Case(stages=3, clip=0.0)
    loaded = run(3, train_patched, "ds_dynmo", three, "entries", False, moves, None, str(tmp_path))
    assert whole(loaded) == whole(saved)
    assert loaded[0]["losses"] == saved[0]["losses"][2:]
    assert all(result["counts"]["ReduceGrads"] == 3 for result in [*saved, *loaded])


OWN_BACKWARD = {
    "one output": (Case(stages=3), False, 0),
    "several outputs": (Case(stages=3), True, 0),
    "several outputs, checkpointed": (Case(stages=3, checkpoint_interval=1, reentrant=False), True, 0),
    "tied layers": (Case(stages=3, tied=True), False, 0),
    "tied layers under bf16": (Case(stages=3, tied=True, precision="bf16"), False, 0),
    "a frozen prefix": (Case(stages=3), False, 4),
    "a frozen prefix under bf16": (Case(stages=3, precision="bf16"), False, 4),
}


def trained(results: list[dict[str, Any]], prefix: int) -> dict[str, Any]:
    """Return weights, and optimizer state of layers that train: that of frozen ones becomes zeros in a bf16 move."""
    state = whole(results)
    return {key: value for key, value in state.items() if "/" not in key or int(key.split(".")[0]) >= prefix}


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


def twofold_layers(case: Case) -> list[Any]:
    middle = [LayerSpec(Twofold, index) for index in range(case.blocks)]
    return [LayerSpec(Embedding, 1), in_two, *middle, add_up, LayerSpec(Head, 2)]


def backward_from_each(engine: Any, buffer_id: int) -> None:
    """Run a user's own backward pass, with the effect of DeepSpeed's."""
    if engine.is_last_stage():
        super(PipelineEngine, engine).backward(engine.loss)
        return
    outputs, gradients = engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer
    if isinstance(outputs, torch.Tensor):
        outputs, gradients = (outputs,), (gradients,)
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True
    for number, (output, gradient) in enumerate(zip(outputs, gradients, strict=True), start=1):
        output.backward(gradient=gradient, retain_graph=number < len(outputs))
    engine._running_engine_backward = False
    if engine.using_bf16_optimizer:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)
    engine.pipe_buffers["outputs"][buffer_id] = None


def train_with_own_backward(
    case: Case, moves: Sequence[Sequence[int]], twofold: bool = False, prefix: int = 0
) -> dict[str, Any]:
    """Train with a user's own backward pass and ``prefix`` frozen layers."""
    counts: Counts = Counter()
    changed = (schedule.BackwardPass, schedule.ReduceTiedGrads, schedule.OptimizerStep)
    engine = build(case, twofold_layers if twofold else layers)
    for kind in changed:
        own = backward_from_each if kind is schedule.BackwardPass else PipelineEngine._INSTRUCTION_MAP[kind]
        PipelineEngine._INSTRUCTION_MAP[kind] = counted(counts, kind, own)
    if prefix:
        freeze(engine, prefix)
        engine.model_changed("a prefix is frozen")
        drop_decision(engine)
    losses = train_and_move(engine, batches(engine), moves, STEPS)
    return {"losses": losses, "counts": counts, "state": state(engine), "replica": 0}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.nightly)
        if what in ("several outputs", "tied layers", "a frozen prefix")
        else what
        for what in OWN_BACKWARD
    ],
)
def test_moves_change_nothing_with_an_own_backward_pass(what: str) -> None:
    """It is called also on a stage that trains nothing, with an empty tensor."""
    case, twofold, prefix = OWN_BACKWARD[what]
    layers = case.blocks + 4 if twofold else case.num_layers
    moves = ([0, 2, 4, layers], [0, 1, layers - 1, layers], [0, 1, 2, layers], [0, 5, layers - 1, layers])
    still = run(3, train_with_own_backward, case, (), twofold, prefix)
    moved = run(3, train_with_own_backward, case, moves, twofold, prefix)
    assert outcomes(still, "losses", "counts") == outcomes(moved, "losses", "counts")
    assert trained(still, prefix) == trained(moved, prefix)
    assert still[0]["counts"] == {"BackwardPass": 15, "ReduceTiedGrads": 5, "OptimizerStep": 5}


def own_sends_with_a_frozen_prefix() -> tuple[str, float, str]:
    """Return the error of freezing, the loss after thawing, and the error of a patch during training."""
    engine = build(Case())
    data, kind = batches(engine), schedule.SendGrad
    original = PipelineEngine._INSTRUCTION_MAP[kind]
    PipelineEngine._INSTRUCTION_MAP[kind] = counted(Counter(), kind, original)
    freeze(engine, 2)
    messages = [error_of(lambda: engine.model_changed("frozen"))]
    freeze(engine, 0)
    engine.model_changed("thawed")
    trained = engine.train_batch(data).item()
    PipelineEngine._INSTRUCTION_MAP[kind] = original
    freeze(engine, 2)
    engine.model_changed("frozen")
    engine.train_batch(data)
    PipelineEngine._INSTRUCTION_MAP[kind] = counted(Counter(), kind, original)
    messages.append(error_of(lambda: engine.train_batch(data)))
    return messages[0], trained, messages[1]


def test_own_sends_are_refused_with_a_frozen_prefix() -> None:
    for at_once, trained, later in run(2, own_sends_with_a_frozen_prefix):
        assert "_INSTRUCTION_MAP[SendGrad] = tests.distributed.test_instructions.counted" in at_once
        assert "the first 2 layers have nothing to train" in at_once
        assert trained > 0 and later == at_once


def a_schedule_of_its_own(kind: str) -> str:
    engine = build(Case(dynmo={"interval": 0, "schedule": {"kind": kind}}))
    engine._exec_schedule = partial(PipelineEngine._exec_schedule, engine)
    return error_of(lambda: engine.train_batch(batches(engine)))


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_a_batch_that_bypasses_the_engine_is_refused(kind: str) -> None:
    assert all("_exec_schedule was replaced" in message for message in run(2, a_schedule_of_its_own, kind))


def own_messages_under_a_schedule_of_ours(own: bool) -> tuple[list[str], float]:
    """Return the error for each kind of message, and the loss of the first batch that trains."""
    engine = build(OURS)
    data, stock, errors = batches(engine), PipelineEngine._INSTRUCTION_MAP, []
    for kind in MESSAGES if own else ():
        engine._INSTRUCTION_MAP = {**stock, kind: counted(Counter(), kind, stock[kind])}
        errors.append(error_of(lambda: engine.train_batch(data)))
    engine._INSTRUCTION_MAP = stock
    return errors, engine.train_batch(data).item()


def test_own_messages_are_refused_before_a_batch_of_a_schedule_of_ours() -> None:
    (_, expected), _ = run(2, own_messages_under_a_schedule_of_ours, False)
    for errors, loss in run(2, own_messages_under_a_schedule_of_ours, True):
        for kind, error in zip(MESSAGES, errors, strict=True):
            assert f"_INSTRUCTION_MAP[{kind.__name__}] = tests.distributed.test_instructions.counted" in error
        assert loss == expected


def a_map_set_in_a_batch() -> str:
    engine = build(Case())
    engine.before_step(lambda: setattr(engine, "_INSTRUCTION_MAP", dict(engine._INSTRUCTION_MAP)))
    message = error_of(lambda: engine.train_batch(batches(engine)))
    assert engine._INSTRUCTION_MAP is PipelineEngine._INSTRUCTION_MAP
    return message


def test_a_map_that_is_set_while_a_batch_runs_is_refused() -> None:
    assert all("set it between two batches" in message for message in run(2, a_map_set_in_a_batch))


def instructions_seen(path: str, own: bool) -> dict[str, Any]:
    """Profile and trace batches, with the user's own instructions or DeepSpeed's."""
    counts: Counts = Counter()
    block = {"interval": 0, "min_improvement": 0.99, "profile": {"batches": 1, "warmup_batches": 0}}
    engine = build(Case(dynmo={**block, "trace": {"path": path, "steps": [1, 2]}}))
    if own:
        PipelineEngine._INSTRUCTION_MAP.update(own_map(counts, PipelineEngine._INSTRUCTION_MAP))
    data = batches(engine)
    engine.model_changed("it is to be profiled")
    losses = [engine.train_batch(data).item() for _ in range(2)]
    profiled = engine.profile is not None and all(layer.forward_seconds > 0 for layer in engine.profile.layers)
    return {"losses": losses, "counts": counts, "profiled": profiled}


def test_profile_and_trace_include_own_instructions(tmp_path: Path) -> None:
    stock = run(2, instructions_seen, str(tmp_path / "stock.json"), False)
    own = run(2, instructions_seen, str(tmp_path / "own.json"), True)
    assert outcomes(stock, "losses", "profiled") == outcomes(own, "losses", "profiled")
    assert all(result["profiled"] and result["counts"]["ForwardPass"] == 6 for result in own)
    kinds = {category for category, _ in INSTRUCTIONS.values()}
    shown = [
        sorted((e["name"], e["tid"]) for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in kinds)
        for path in (tmp_path / "stock.json", tmp_path / "own.json")
    ]
    assert shown[0] == shown[1]
