"""Under a schedule of ours no stage waits for the others when a batch ends: the loss is waited for where it is read."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

import ds_dynmo
from ds_dynmo import ConfigError
from ds_dynmo.engine.comm.posted import PostedTensor
from ds_dynmo.schedules import Kind
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import Head, layers, loss
from tests.support.training import batches, build, gather, outcome_of, state, whole

pytestmark = pytest.mark.ranks

OURS = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
FREE = Case(stages=3, micro_batches=4, clip=0.0, dynmo=OURS)  # nothing of a step needs all stages
NO_NORM = {"zero_optimization": {"stage": 1, "compute_grad_norm": False}}


# -- a stage goes on to the next batch while another ends the one before --------------------------------


class Hidden(torch.autograd.Function):
    """Scales by a weight whose gradient can be deferred."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layers: tuple[Scale], anchor: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.weight = layers[0], layers[0].weight
        ctx.save_for_backward(hidden)
        return hidden * ctx.weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        layer = ctx.layer

        def weight_gradient() -> torch.Tensor:
            layer.before_weight_gradient()
            return (hidden * gradient).sum((0, 1))

        ds_dynmo.defer_weight_gradient(ctx.weight, weight_gradient, held_bytes=hidden.nbytes)
        return gradient * ctx.weight, None, None


class Scale(nn.Module):
    """Counts its passes. The last stage's ends its first batch once the first stage's has begun the second."""

    def __init__(self, role: str, folder: str, micro_batches: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.anchor = torch.empty(0, requires_grad=True)
        self.role, self.file, self.micro_batches = role, f"{folder}/store", micro_batches
        self.passes = self.gradients = 0

    @property
    def store(self) -> dist.Store:
        return dist.FileStore(self.file, -1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.role == "first" and self.passes == self.micro_batches + 1:
            self.store.set("the second batch has begun", "")
        return Hidden.apply(hidden, (self,), self.anchor)  # type: ignore[no-any-return]

    def before_weight_gradient(self) -> None:
        self.gradients += 1
        if self.role == "last" and self.gradients == self.micro_batches:
            self.store.wait(["the second batch has begun"], timedelta(seconds=20))


def overlapping(case: Case, folder: str, more: dict[str, Any]) -> list[float]:
    """Train two batches, the first of which ends on the last stage after the second has begun on the first."""

    def make_layers(case: Case) -> list[Any]:
        roles = ["first", *["inner"] * (case.stages - 2), "last"]
        scales = [LayerSpec(Scale, role, folder, case.micro_batches) for role in roles]
        return [layers(case)[0], *scales, LayerSpec(Head, 2)]

    engine = build(replace(case, start=(0, 2, *range(3, case.stages + 1), case.stages + 2)), make_layers, more=more)
    data = batches(engine)
    losses = [engine.train_batch(data) for _ in range(2)]
    return [float(loss) for loss in losses]


@pytest.mark.parametrize(
    ("precision", "replicas", "more"),
    [
        ("fp32", 1, {}),
        pytest.param("fp32", 2, {}, marks=pytest.mark.nightly),
        pytest.param("fp32 zero1", 2, NO_NORM, marks=pytest.mark.nightly),
        ("bf16 zero1", 1, {**NO_NORM, "bf16": {"enabled": True, "check_grad_overflow": False}}),
    ],
)
def test_a_stage_begins_while_another_ends(precision: str, replicas: int, more: dict[str, Any], tmp_path: Path) -> None:
    case = replace(FREE, precision=precision, replicas=replicas)
    results = run(case.ranks, overlapping, case, str(tmp_path), more)
    assert all(result == results[0] for result in results[:: case.replicas])


def begins_early(cases: list[tuple[Case, dict[str, Any]]]) -> list[bool]:
    return [build(case, more=more).stage.schedule.back_to_back for case, more in cases]


def test_orders_count_on_it_where_no_step_needs_all_stages() -> None:
    def asked(precision: str, more: dict[str, Any], clip: float = 0.0, memory: float = 2.0) -> Any:
        block = {"interval": 0, "schedule": {"kind": "zero_bubble", "memory": memory}}
        return Case(stages=1, precision=precision, clip=clip, dynmo=block), more

    unchecked = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    free = [asked("fp32", {}), asked("fp32 zero1", NO_NORM), asked("bf16 zero1", {**NO_NORM, **unchecked})]
    waiting = [
        asked("fp32", {}, memory=1.0),
        asked("fp32", {}, clip=1.0),
        asked("bf16", {}),
        asked("bf16", unchecked),
        asked("fp32 zero1", {}),
        asked("bf16 zero1", NO_NORM),
        asked("bf16 zero1", unchecked),
        asked("bf16 zero1 fp32sums", unchecked),
    ]
    assert run(1, begins_early, free + waiting) == [[True] * len(free) + [False] * len(waiting)]


# -- reading the loss ------------------------------------------------------------------------------------


def read_late(case: Case, readers: list[int]) -> dict[str, Any]:
    """Train under the order for equal costs, and after a move. Only some ranks read a loss, and only at the end."""
    engine = build(case)
    data, losses, ahead = batches(engine), [], []
    for step in range(3):
        losses.append(engine.train_batch(data))
        assert isinstance(losses[-1], torch.Tensor) and engine.agg_train_loss is losses[-1]
        kinds = [action.kind for action in engine.stage.schedule.running.orders[0]]
        ahead.append(next(place for place, kind in enumerate(kinds) if kind != Kind.FORWARD))
        if step == 1:
            engine.rebalance([0, 1, 4, 8])
    lazy = [isinstance(loss, PostedTensor) for loss in losses]
    found = outcome_of(engine, [])
    found["losses"] = [loss.item() for loss in losses] if engine.global_rank in readers else []
    return {**found, "lazy": lazy, "ahead": ahead}


@pytest.mark.parametrize(
    ("precision", "replicas", "clip"), [("fp32", 1, 0.0), pytest.param("bf16", 2, 1.0, marks=pytest.mark.nightly)]
)
def test_any_rank_or_none_may_read_the_loss_also_with_more_memory(precision: str, replicas: int, clip: float) -> None:
    case = replace(FREE, precision=precision, replicas=replicas, clip=clip, micro_batches=5)
    more = replace(case, dynmo={"interval": 0, "schedule": {"kind": "zero_bubble", "memory": 2.0}})
    everyone, stock = list(range(case.ranks)), replace(case, dynmo={"interval": 0})
    still, one, none = run_each(case.ranks, read_late, (stock, everyone), (more, [0]), (case, []))
    assert whole(one) == whole(none) == whole(still)
    assert one[0]["losses"] == still[0]["losses"] == still[-1]["losses"]
    assert none[0]["ahead"] == still[0]["ahead"] == [case.stages] * 3  # forward passes before the first backward one
    assert one[0]["ahead"][0] > case.stages
    last_stage = case.ranks - replicas
    for rank, (before, lazy) in enumerate(zip(still, one)):
        assert before["lazy"] == [False] * 3
        assert lazy["lazy"] == [rank < last_stage] * 3


class TwoLosses(PipelineModule):  # type: ignore[misc]
    """A module with additional losses, which do not train."""

    passes = 0

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        self.passes += 1
        device = next(self.parameters()).device
        return {"first": torch.tensor(float(self.passes), device=device), "second": torch.tensor(0.5, device=device)}


class Watching(PipelineEngine):  # type: ignore[misc]
    """Reads the loss where DeepSpeed shares it."""

    def _aggregate_total_loss(self) -> Any:
        self.watched = super()._aggregate_total_loss()
        self.watched.item()
        return self.watched


def shared_losses(case: Case, engine_class: type | None = None) -> list[Any]:
    """Train two batches, and gather what each rank sees of their losses."""
    torch.manual_seed(0)
    engine = ds_dynmo.initialize(
        model=TwoLosses(layers=layers(case), num_stages=case.stages, loss_fn=loss, partition_method="uniform"),
        config={**config(case), "steps_per_print": 1},
        **({"engine_class": engine_class} if engine_class else {}),
    )[0]
    data, seen = batches(engine), []
    for _ in range(2):
        found = engine.train_batch(data)
        named = {name: float(value) for name, value in engine.get_additional_losses().items()}
        losses = [found, getattr(engine, "watched", found), engine.agg_train_loss, engine.dp_group_loss]
        seen.append(([float(loss) for loss in losses], named))
    return gather(seen)


def test_all_losses_that_the_last_stage_shares() -> None:
    """Also with an engine of the user's that shares the loss."""
    case = replace(FREE, stages=2)
    stock, ours, theirs = run_each(2, shared_losses, (replace(case, dynmo={"interval": 0}),), (case,), (case, Watching))
    assert ours[0] == theirs[0] == stock[0] and ours[0][0] == ours[0][1]
    for losses, named in ours[0][0]:
        assert len({*losses}) == 1 and losses[0] > 0
        assert list(named) == ["first", "second"]


# -- what comes between batches --------------------------------------------------------------------------


def with_much_between(case: Case, folder: str, reads: bool) -> dict[str, Any]:
    """Evaluate, save, move and re-pack directly after batches whose loss nobody has read."""
    engine = build(case)
    data, losses, evaluations = batches(engine), [], []

    def batch() -> None:
        losses.append(engine.train_batch(data))
        if reads:
            losses[-1].item()

    batch()
    evaluations.append(engine.eval_batch(batches(engine, seed=7)))
    batch()
    engine.save_checkpoint(f"{folder}/{reads}", tag="two")
    batch()
    engine.rebalance([0, 2, 4, 8])
    batch()
    engine.load_checkpoint(f"{folder}/{reads}", tag="two")
    batch()
    engine.repack(2)
    if not engine.released:
        batch()
    file = io.BytesIO()
    torch.save(losses, file)
    found = {"losses": [float(loss) for loss in losses], "replica": 0}
    found["state"] = {"shards": {}} if engine.released else state(engine)
    return {**found, "evaluations": [float(value) for value in evaluations]}


def test_calls_between_batches_change_nothing(tmp_path: Path) -> None:
    read, unread = (run(3, with_much_between, FREE, str(tmp_path), reads) for reads in (True, False))
    assert [result["losses"] for result in unread] == [result["losses"] for result in read]
    assert [result["evaluations"] for result in unread] == [result["evaluations"] for result in read]
    assert whole(unread) == whole(read)
    assert sorted(len(result["losses"]) for result in unread) == [5, 6, 6]


class Failing(Scale):
    """Fails on the last stage when the others have ended the batch."""

    def before_weight_gradient(self) -> None:
        self.gradients += 1
        if self.gradients == self.micro_batches:
            self.store.wait(["0 has ended", "1 has ended"], timedelta(seconds=60))
            raise ValueError("fails in its last pass")


def one_fails(case: Case, folder: str) -> str:
    def make_layers(case: Case) -> list[Any]:
        kinds = [LayerSpec(kind, "", folder, case.micro_batches) for kind in (Scale, Scale, Failing)]
        return [layers(case)[0], *kinds, LayerSpec(Head, 2)]

    engine = build(replace(case, start=(0, 2, 3, 5)), make_layers)
    try:
        shared = engine.train_batch(batches(engine))
    except ValueError as error:
        deepspeed.comm.destroy_process_group()  # as its process does when it ends
        return str(error)
    dist.FileStore(f"{folder}/store", -1).set(f"{engine.stage_id} has ended", "")
    try:
        return f"{shared.item()}"
    except RuntimeError:
        return "gone"


def test_a_loss_that_never_comes_is_an_error_where_it_is_read(tmp_path: Path) -> None:
    """Over gloo, which notices at once that a rank is gone."""
    found = run(3, one_fails, FREE, str(tmp_path), backend="gloo", complete=False)
    assert found == ["gone", "gone", "fails in its last pass"]


# -- what raises at the end of a batch, and is caught ------------------------------------------------------


def fail_once(owner: Any, name: str) -> None:
    """Let a method of an object raise once."""
    method = getattr(owner, name)

    def failing(*_: Any, **__: Any) -> None:
        setattr(owner, name, method)
        raise OSError(f"{name} fails once")

    setattr(owner, name, failing)


def step_fails(case: Case, moves: bool, folder: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Let the optimizer's step fail; return how further batches end, the state, and that which is saved and loaded."""
    engine = build(case)
    data, refused = batches(engine), []
    engine.train_batch(data)
    fail_once(engine.optimizer, "step")
    if moves:
        engine.rebalance([0, 2, 8], background=True)
    with pytest.raises(OSError, match="step fails once"):
        engine.train_batch(data)
    for another in (engine.eval_batch, engine.train_batch):
        with pytest.raises(ConfigError) as error:
            another(data)
        refused.append(str(error.value))
    engine.save_checkpoint(f"{folder}/{moves}")
    loaded = build(case)
    loaded.load_checkpoint(f"{folder}/{moves}")
    assert loaded.partition == engine.partition == ([0, 2, 8] if moves else [0, 4, 8])
    return refused, outcome_of(engine, []), outcome_of(loaded, [])


@pytest.mark.parametrize("precision", ["bf16 zero1", pytest.param("fp32", marks=pytest.mark.nightly)])
def test_no_batch_follows_a_step_that_failed_while_layers_moved(precision: str, tmp_path: Path) -> None:
    """Nor one without a move. What is saved then is the state before the step, on both ways."""
    case = Case(precision=precision, start=(0, 4, 8))
    still, moved = run_each(2, step_fails, (case, False, str(tmp_path)), (case, True, str(tmp_path)))
    states = [whole([result[place] for result in ranks]) for ranks in (still, moved) for place in (1, 2)]
    assert all(state == states[0] for state in states)
    for refused, *_ in still + moved:
        assert all(said.startswith("a batch ended in an error on this rank") for said in refused)
