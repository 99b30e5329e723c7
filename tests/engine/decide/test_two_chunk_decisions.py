"""Decisions where stages own two chunks, interval after interval: training equals that of a chain, to the bit."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.decide.decision_input import memory_model
from ds_dynmo.schedules import peak_bytes
from tests.support.checkpoints import data_after
from tests.support.configs import Case
from tests.support.harness import run_each
from tests.support.models import WIDTH, Block, layers
from tests.support.told_clock import clock
from tests.support.training import Warnings, build, layers_of, outcome_of, reports_of, whole

pytestmark = pytest.mark.ranks

LASTS = 3  # batches for which layers cost the same


class Timed(torch.autograd.Function):
    """Scales by a weight whose gradient waits, and takes the layer's seconds."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gains: tuple[TimedBlock]) -> torch.Tensor:
        (ctx.layer,) = gains
        ctx.save_for_backward(hidden)
        clock.sleep(ctx.layer.seconds)
        return hidden * ctx.layer.gain

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        layer, gain = ctx.layer, ctx.layer.gain

        def of_weight() -> torch.Tensor:
            clock.sleep(layer.seconds)
            return (hidden * gradient).flatten(0, -2).sum(0)

        clock.sleep(layer.seconds)
        ds_dynmo.defer_weight_gradient(gain, of_weight, held_bytes=hidden.nbytes)
        return gradient * gain, None


class TimedBlock(Block):
    """A block that tells the clock how long each of its passes takes."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.gain, self.seconds = nn.Parameter(torch.ones(WIDTH)), 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Timed.apply(super().forward(hidden), (self,))  # type: ignore[no-any-return]


def timed_layers(case: Case) -> list[Any]:
    first, *_, scale, last = layers(case)
    return [first, *[LayerSpec(TimedBlock, index) for index in range(case.blocks)], scale, last]


@dataclass(frozen=True)
class Deciding:
    """A run, and what happens in it by step.

    Attributes:
        limits: of memory from then on, as shares of what the neediest stage needs then.
        saves: to save after, into ``folder``.
        loads: of the checkpoint to begin with; 0: none.
    """

    case: Case
    steps: int = 11
    limits: tuple[tuple[int, float], ...] = ()
    saves: tuple[int, ...] = ()
    loads: int = 0
    folder: str = ""


def counted_bytes(engine: Any) -> list[int]:
    """Return what each stage needs, whatever the order."""
    memory = memory_model(engine.profile, sys.maxsize, 0)
    assert memory is not None
    return memory.bytes_per_stage(engine.stage.placement)


def held_bytes(engine: Any) -> list[int]:
    """Return what each stage holds under the order that is in force."""
    here, profile = engine.stage.placement, engine.profile
    passes = engine.rebalancer.decider.input(profile, None).pipeline_at(here).passes
    peaks = peak_bytes(engine.stage.schedule.schedule_for(here, profile.micro_batches), passes.layers.sizes(here))
    return [own + peak for own, peak in zip(passes.layers.static_of_stages(here), peaks)]


def train_deciding(given: Deciding) -> dict[str, Any]:
    """Train layers whose costs change every few batches, with whatever decisions find."""
    engine, warnings, losses = build(given.case, timed_layers), Warnings(), []
    engine.profiler.clock = clock
    held: list[tuple[int, list[int]]] = []
    shares, memory = dict(given.limits), engine.rebalancer.decider.memory
    if given.loads:
        engine.load_checkpoint(given.folder, tag=f"global_step{given.loads}")
    data = data_after(engine, engine.global_steps)
    while engine.global_steps < given.steps:
        for index, layer in layers_of(engine).items():
            if isinstance(layer, TimedBlock):
                layer.seconds = random.Random(f"{engine.global_steps // LASTS} {index}").choice([0.05, 0.1, 0.2, 0.45])
        losses.append(engine.train_batch(data).item())
        if engine.global_steps in given.saves:
            engine.save_checkpoint(given.folder)
        if memory.limit is not None and engine.global_steps <= max(shares):
            held.append((memory.limit, held_bytes(engine)))
        if engine.global_steps in shares:
            memory.limit = int(shares[engine.global_steps] * max(counted_bytes(engine)))
    engine.wait_for_save()
    reports = [report for report in reports_of(engine) if report.reason == "interval"]
    moves = [report for report in reports if report.moved]
    return {
        **outcome_of(engine, losses),
        "moves": len(moves),
        "stays": [str(report.verdict) for report in reports if not report.moved],
        "shapes": [engine.stage.placement.shape, *(report.new_placement.shape for report in moves)],
        "held": held,
        "warnings": [*warnings.messages],  # of this run: later ones add to them
    }


def under(kind: str, case: Case, **section: Any) -> Case:
    return replace(case, dynmo={"schedule": kind, "profile": {"batches": 1, "warmup_batches": 0}, **section})


BALANCERS, KINDS = ("partition", "diffusion", "makespan"), ("v", "loop", "auto")


@pytest.mark.parametrize(
    ("stages", "precision"),
    [
        (2, "bf16 zero1"),
        *(pytest.param(*both, marks=pytest.mark.nightly) for both in ((2, "fp32"), (3, "bf16"), (4, "fp32"))),
    ],
)
def test_decisions_change_nothing_keep_a_memory_limit_and_say_that_one_is_out_of_reach(
    stages: int, precision: str, tmp_path: Path
) -> None:
    """Each balancer with a schedule, an interval and a kind of move of its own; with more stages each with all.

    The first begins, saves in the background, and is resumed by the others, and once under 1F1B.
    """
    case = Case(stages=stages, blocks=9, precision=precision, tied=stages < 4, micro_batches=4, groups="two")
    every = list(itertools.product(range(3), range(3))) if stages > 2 else [(0, 0), (1, 1), (2, 2)]
    calls = [
        Deciding(
            under(
                *(KINDS[kind], case),
                balancer=BALANCERS[balancer],
                interval=1 + (kind + balancer) % 3,
                migration=("background", "blocking")[(kind + balancer) % 2],
                checkpoint="background",
            ),
            limits=((5, 1.2), (8, 0.3)),
            saves=(2, 5) if number == 0 else (),
            loads=2 * (number > 0),
            folder=str(tmp_path),
        )
        for number, (kind, balancer) in enumerate(every)
    ]
    plainly = Deciding(under("1f1b", case, interval=1), loads=5, folder=str(tmp_path))
    still, *moved = run_each(stages, train_deciding, *((each,) for each in (Deciding(case), *calls, plainly)))
    for given, results in zip((*calls, plainly), moved, strict=True):
        assert [r["losses"] for r in results] == [r["losses"][given.loads :] for r in still]
        assert whole(results) == whole(still)
    still_ones = [(*each, ranks[0]["stays"]) for each, ranks in zip(every, moved) if not ranks[0]["moves"]]
    # Costs change untold, which a history of few profiles takes for noise: some runs stay, and say so.
    assert len(still_ones) <= len(every) // 3, still_ones
    assert all(any("than noise may" in said for said in stays) for _, _, stays in still_ones), still_ones
    for (kind, _), ranks in zip(every, moved):
        first = ranks[0]
        assert len({*first["shapes"]}) == 1  # at these intervals the first decision alone weighs others
        assert KINDS[kind] == "auto" or {*first["shapes"]} == {KINDS[kind]}
        held = first["held"]  # until the next decision an order from before the limit runs
        assert len(held) == 3 and all(max(of_stages) <= limit for limit, of_stages in held[-1:])
        *others, last = first["warnings"]  # one may be of a move that was decided before the limit
        words = ("no layer was moved: ", "its limit is ")
        assert all(word in text for text in (*others, last) for word in words), first["warnings"]
        assert " does not fit: stage " in last
