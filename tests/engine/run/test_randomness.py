"""A run whose layers use random numbers is the same to the bit wherever its layers are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.schedules import schedule_for_equal_costs
from tests.support.configs import Case, config
from tests.support.harness import run
from tests.support.models import WIDTH, Block, Embedding, Head, loss, module_of, project
from tests.support.training import batches, build, micro_batch, reports_of, state, whole

pytestmark = pytest.mark.ranks

NEVER_PROFILED: dict[str, Any] = {"enabled": False}


@dataclass(frozen=True)
class Plan:
    """What a run does beside training."""

    steps: int = 6
    moves: tuple[tuple[int, ...], ...] = ()  # one after each batch
    evaluate_after: tuple[int, ...] = ()
    seed_layers: bool = False
    save_to: str | None = None  # saved after the third batch
    resume_from: str | None = None


MOVES = Plan(moves=((0, 1, 8), (0, 7, 8), (0, 2, 8), (0, 5, 8)))


def drawing_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss(logits, labels) * (1 + 0.1 * random.random())


class DropoutBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(hidden), 0.2, self.training)


OF_TORCH = torch.Generator()
OF_NUMPY = {"generator": numpy.random.default_rng()}


class Drawing(nn.Module):
    """Uses every global generator on the CPU, and generators that layers share, also in evaluation.

    Args:
        given: to all layers.
    """

    of_class = random.Random()

    def __init__(self, given: numpy.random.RandomState) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.given = given

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        factor = random.random() + numpy.random.random_sample() + torch.rand(()).item()
        factor += self.given.random_sample() + self.of_class.random() + OF_NUMPY["generator"].random()
        return hidden * self.weight * (1 + 0.1 * (factor + torch.rand((), generator=OF_TORCH).item()))


GIVEN = numpy.random.RandomState()


def jitter(generator: torch.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function for the layer list that holds a generator."""

    def jittered(hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0.1 * (torch.rand_like(hidden) + torch.rand((), generator=generator).item())

    return jittered


def project_dropped(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return project(embedding, F.dropout(hidden, 0.1))


def drawing_layers(case: Case) -> list[Any]:
    ends: list[Any] = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    if case.tied:
        ends = [
            TiedLayerSpec("embedding", Embedding, 1, tied_weight_attr="weight"),
            TiedLayerSpec("embedding", Embedding, 1, forward_fn=project_dropped, tied_weight_attr="weight"),
        ]
    blocks = [
        LayerSpec(Drawing, GIVEN) if index % 3 == 1 else LayerSpec(DropoutBlock, index) for index in range(case.blocks)
    ]
    return [ends[0], *blocks, jitter(torch.Generator().manual_seed(torch.distributed.get_rank())), ends[1]]


def set_generators(seed: int) -> None:
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
    OF_TORCH.manual_seed(seed), Drawing.of_class.seed(seed), GIVEN.seed(seed)
    OF_NUMPY["generator"] = numpy.random.default_rng(seed)  # another object, in the same place


def generators() -> Sequence[Any]:
    shared = OF_TORCH.get_state().tolist(), Drawing.of_class.getstate(), str(OF_NUMPY["generator"].bit_generator.state)
    of_numpy = [str(part) for part in (*numpy.random.get_state(), *GIVEN.get_state())]
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy, *shared


def train(case: Case, plan: Plan = Plan()) -> dict[str, Any]:
    engine = build(case, drawing_layers)
    engine.module.loss_fn = drawing_loss
    engine.module.seed_layers = plan.seed_layers
    if plan.resume_from is not None:
        engine.load_checkpoint(plan.resume_from)
    data = islice(batches(engine), engine.global_steps * case.micro_batches, None)
    set_generators(engine.global_rank + 10 * len(plan.moves))  # the rank's own states must not matter
    before = generators()
    losses, evaluations, moves = [], [], list(plan.moves)
    for step in range(engine.global_steps, plan.steps):
        losses.append(engine.train_batch(data).item())
        if moves:
            engine.rebalance(moves.pop(0))
        if step in plan.evaluate_after:
            evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())
        if step == 2 and plan.save_to is not None:
            engine.save_checkpoint(plan.save_to)
    return {
        "losses": losses,
        "evaluations": evaluations,
        "state": state(engine),
        "moved": sum(report.layers_moved for report in reports_of(engine)),
        "profiled": engine.profiler.batches,
        "replica": engine.grid.get_data_parallel_id(),
        "generators kept": generators() == before,
    }


@cache
def still(stages: int = 2, tied: bool = False, replicas: int = 1) -> list[dict[str, Any]]:
    """Run without checkpointing, profile or moves."""
    case = Case(stages=stages, tied=tied, replicas=replicas, dynmo=NEVER_PROFILED)
    return run(case.ranks, train, case)


def check_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [result["losses"] for result in found] == [result["losses"] for result in expected]
    assert whole(found) == whole(expected)
    assert all(result["generators kept"] for result in found)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("interval", [1, 2])
def test_moves_and_recomputation_change_nothing(interval: int, reentrant: bool) -> None:
    moved = run(2, train, Case(checkpoint_interval=interval, reentrant=reentrant), MOVES)
    assert moved[0]["moved"] > 0
    check_same(moved, still())


def train_in_two_parts(case: Case) -> dict[str, Any]:
    """Train, with backward passes in two parts from the first batch on, under checkpointing too."""
    with mock.patch("ds_dynmo.engine.run.schedule_in_force.one_f_one_b", schedule_for_equal_costs):
        return train(case)


def test_recomputation_in_a_pass_in_two_parts_changes_nothing() -> None:
    block = {"interval": 0, "schedule": {"kind": "zero_bubble"}}
    check_same(run(2, train_in_two_parts, Case(checkpoint_interval=1, dynmo=block)), still())


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_moves_change_nothing(tied: bool) -> None:
    moves = Plan(moves=((0, 1, 2, 8), (0, 6, 7, 8), (0, 2, 5, 8)))
    moved = run(3, train, Case(stages=3, tied=tied), moves)
    assert moved[0]["moved"] > 0
    check_same(moved, still(stages=3, tied=tied))


def test_the_number_of_stages_changes_nothing() -> None:
    assert still(stages=3)[0]["losses"] == still()[0]["losses"]
    assert whole(still(stages=3)) == whole(still())


def first_loss(case: Case) -> float:
    """Train a batch in which all replicas have the same data, and return the mean of their losses."""
    engine = build(case, drawing_layers)
    return float(engine.train_batch(micro_batch(number, replica=0) for number in range(case.micro_batches)).item())


def test_replicas_use_different_random_numbers() -> None:
    assert run(4, first_loss, Case(replicas=2))[0] != run(2, first_loss, Case())[0]
    moved = run(4, train, Case(replicas=2, checkpoint_interval=1), MOVES)
    assert moved[0]["moved"] > 0
    check_same(moved, still(replicas=2))


@pytest.mark.parametrize("interval", [0, 2])
def test_profiled_batches_use_the_same_random_numbers(interval: int) -> None:
    block = {"interval": 0, "profile": {"batches": 99, "warmup_batches": 0}}
    profiled = run(2, train, Case(dynmo=block, checkpoint_interval=interval), MOVES)
    check_same(profiled, still())
    assert [result["profiled"] for result in [*profiled, *still()]] == [2, 2, 0, 0]  # batches since the last move


def test_evaluations_do_not_change_training_and_do_not_depend_on_moves() -> None:
    evaluate = Plan(evaluate_after=(1, 4))
    stays = run(2, train, Case(dynmo=NEVER_PROFILED), evaluate)
    moves = run(2, train, Case(), replace(MOVES, evaluate_after=(1, 4)))
    check_same(stays, still())
    check_same(moves, still())
    assert len(stays[0]["evaluations"]) == 2
    assert [result["evaluations"] for result in stays] == [result["evaluations"] for result in moves]


def test_a_resumed_run_continues_its_random_numbers(tmp_path: Path) -> None:
    saved = run(2, train, Case(), Plan(save_to=str(tmp_path)))
    resumed = run(2, train, Case(), Plan(resume_from=str(tmp_path), moves=((0, 2, 8), (0, 5, 8))))
    assert [result["losses"][3:] for result in saved] == [result["losses"] for result in resumed]
    assert whole(saved) == whole(resumed) == whole(still())


def test_streams_take_precedence_over_deepspeeds_seed_layers() -> None:
    seeded = run(2, train, Case(checkpoint_interval=1), replace(MOVES, seed_layers=True))
    assert [result["losses"] for result in seeded] == [result["losses"] for result in still()]
    assert whole(seeded) == whole(still())


def train_with_seeds(folder: str) -> dict[str, list[float]]:
    """Train two batches of runs of other seeds, and one more of resumed ones."""
    rank = torch.distributed.get_rank()

    def built(of_torch: int, *, of_module: int = 1234, of_section: int | None = None) -> Any:
        case = Case(dynmo={"interval": 0, "randomness": {"seed": of_section}})
        module = module_of(case, drawing_layers, base_seed=of_module)
        torch.manual_seed(of_torch + 100 * rank)  # rank 0's counts
        parameters = list(module.parameters())
        return ds_dynmo.initialize(model=module, model_parameters=parameters, config=config(case))[0]

    def losses(engine: Any, count: int) -> list[float]:
        data = islice(batches(engine), engine.global_steps * Case().micro_batches, None)
        return [engine.train_batch(data).item() for _ in range(count)]

    def resumed(engine: Any) -> list[float]:
        engine.load_checkpoint(folder)
        return losses(engine, 1)

    first = built(5)
    found = {"torch": losses(first, 2)}
    first.save_checkpoint(folder)
    return found | {
        "goes on": losses(first, 1),
        "torch again": losses(built(5), 2),
        "other": losses(built(6), 2),
        "module": losses(built(6, of_module=5), 2),
        "section": losses(built(6, of_module=7, of_section=5), 2),
        "resumed": resumed(built(6)),
        "resumed by the section": resumed(built(5, of_section=5)),
        "resumed by another section": resumed(built(5, of_section=6)),
    }


def test_the_seed_is_torchs_unless_the_user_gave_one(tmp_path: Path) -> None:
    found = run(2, train_with_seeds, str(tmp_path))[0]
    assert found["torch"] == found["torch again"] == found["module"] == found["section"]
    assert not set(found["torch"]) & set(found["other"])
    assert found["goes on"] == found["resumed"] == found["resumed by the section"]
    assert found["goes on"] != found["resumed by another section"]


def test_without_streams_a_move_changes_the_random_numbers() -> None:
    case = Case(dynmo={"interval": 0, "randomness": {"per_layer": False}})
    stays, moves = (run(2, train, case, plan) for plan in (Plan(), replace(MOVES, moves=MOVES.moves[:1])))
    assert stays[0]["losses"][0] != still()[0]["losses"][0]
    assert stays[0]["losses"] != moves[0]["losses"]
    assert not stays[0]["generators kept"]
