"""A run whose layers use random numbers is the same to the bit wherever its layers are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
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
from tests.support.harness import run, run_each
from tests.support.models import WIDTH, Block, Embedding, Head, loss, module_of, project
from tests.support.training import batches, build, micro_batch, reports_of, state, whole

pytestmark = pytest.mark.ranks

STEPS = 4


@dataclass(frozen=True)
class Plan:
    """What a run does beside training."""

    moves: tuple[tuple[int, ...], ...] = ()  # one after each batch
    evaluate_after: tuple[int, ...] = ()
    seed_layers: bool = False
    in_two_parts: bool = False  # backward passes, from the first batch on, under checkpointing too
    save_to: str | None = None  # saved after the second batch
    resume_from: str | None = None


MOVES = (0, 1, 8), (0, 7, 8), (0, 5, 8)
CHECKED_AFTER = (1, 3)


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
    """Train. All replicas have the same data."""
    if plan.in_two_parts:
        with mock.patch("ds_dynmo.engine.run.schedule_in_force.one_f_one_b", schedule_for_equal_costs):
            return train(case, replace(plan, in_two_parts=False))
    engine = build(case, drawing_layers)
    engine.module.loss_fn = drawing_loss
    engine.module.seed_layers = plan.seed_layers
    if plan.resume_from is not None:
        engine.load_checkpoint(plan.resume_from)
    data = (micro_batch(number, replica=0) for number in count(engine.global_steps * case.micro_batches))
    set_generators(engine.global_rank + 10 * len(plan.moves))  # the rank's own states must not matter
    before = generators()
    losses, evaluations, moves = [], [], list(plan.moves)
    for step in range(engine.global_steps, STEPS):
        losses.append(engine.train_batch(data).item())
        if moves:
            engine.rebalance(moves.pop(0))
        if step in plan.evaluate_after:
            evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())
        if step == 1 and plan.save_to is not None:
            engine.save_checkpoint(plan.save_to)
    return {
        "losses": losses,
        "of this replica": float(engine.loss) if engine.is_last_stage() else None,
        "evaluations": evaluations,
        "state": state(engine),
        "moved": sum(report.layers_moved for report in reports_of(engine)),
        "profiled": engine.profiler.batches,
        "replica": engine.grid.get_data_parallel_id(),
        "generators kept": generators() == before,
    }


def of_two_stages(checkpoint_interval: int = 0, reentrant: bool = True, **dynmo: Any) -> Case:
    section = {"interval": 0, **dynmo}
    return Case(tied=True, checkpoint_interval=checkpoint_interval, reentrant=reentrant, dynmo=section)


def test_nothing_but_the_seed_and_the_data_changes_the_random_numbers(tmp_path: Path) -> None:
    """Neither moves, recomputation, passes in two parts, profiles, evaluations, resuming, nor DeepSpeed's own seeds."""
    folder, profile = str(tmp_path), {"batches": 99, "warmup_batches": 0}
    arms = {
        "stays": (of_two_stages(enabled=False), Plan()),
        "profiled": (of_two_stages(2, profile=profile), Plan(MOVES, evaluate_after=CHECKED_AFTER)),
        "saved": (of_two_stages(1, reentrant=False), Plan(MOVES, save_to=folder)),
        "resumed": (of_two_stages(), Plan(MOVES[:1], resume_from=folder)),
        "in two parts": (
            of_two_stages(1, schedule={"kind": "zero_bubble"}),
            Plan(evaluate_after=CHECKED_AFTER, in_two_parts=True),
        ),
        "seeds of layers": (of_two_stages(1), Plan(MOVES, seed_layers=True)),
    }
    found = dict(zip(arms, run_each(2, train, *arms.values()), strict=True))
    found["three stages"] = run(3, train, Case(stages=3, tied=True), Plan(((0, 1, 2, 8), (0, 6, 7, 8), (0, 2, 5, 8))))
    stays = found["stays"]
    for name, results in found.items():
        losses = stays[0]["losses"]
        assert all(each["losses"] == (losses[2:] if name == "resumed" else losses) for each in results), name
        assert whole(results) == whole(stays), name
        assert all(each["generators kept"] or name == "seeds of layers" for each in results), name
        assert (results[0]["moved"] > 0) == (name not in ("stays", "in two parts")), name
    evaluations = found["profiled"][0]["evaluations"]
    assert len(evaluations) == 2
    assert all(each["evaluations"] == evaluations for each in [*found["profiled"], *found["in two parts"]])
    assert [each["profiled"] for each in [*found["profiled"], *stays]] == [1, 1, 0, 0]  # batches since the last move


def test_replicas_use_different_random_numbers_wherever_layers_are() -> None:
    stays = run(2, train, Case(stages=1, replicas=2))
    moved = run(4, train, Case(replicas=2, checkpoint_interval=1), Plan(MOVES))
    assert moved[0]["losses"] == stays[0]["losses"] and whole(moved) == whole(stays)
    assert all(each["generators kept"] for each in moved)
    one, other = (each["of this replica"] for each in stays)
    assert one != other and [each["of this replica"] for each in moved] == [None, None, one, other]


def test_without_streams_a_move_changes_the_random_numbers() -> None:
    case = of_two_stages(randomness={"per_layer": False})
    with_streams, stays, moves = run_each(2, train, (of_two_stages(),), (case,), (case, Plan(MOVES[:1])))
    assert stays[0]["losses"][0] != with_streams[0]["losses"][0]
    assert stays[0]["losses"] != moves[0]["losses"]
    assert not stays[0]["generators kept"]


def train_with_seeds(case: Case, folder: str) -> dict[str, float]:
    """Return the first loss of runs of other seeds, and the second of resumed ones."""
    rank, stages = torch.distributed.get_rank(), case.stages

    def built(of_torch: int, *, of_module: int = 1234, of_section: int | None = None) -> Any:
        case = Case(stages=stages, dynmo={"interval": 0, "randomness": {"seed": of_section}})
        module = module_of(case, drawing_layers, base_seed=of_module)
        torch.manual_seed(of_torch + 100 * rank)  # rank 0's counts
        parameters = list(module.parameters())
        return ds_dynmo.initialize(model=module, model_parameters=parameters, config=config(case))[0]

    def loss_of(engine: Any) -> float:
        data = islice(batches(engine), engine.global_steps * case.micro_batches, None)
        return float(engine.train_batch(data).item())

    def resumed(engine: Any) -> float:
        engine.load_checkpoint(folder)
        return loss_of(engine)

    first = built(5)
    found = {"torch": loss_of(first)}
    if stages == 2:
        return found
    first.save_checkpoint(folder)
    return found | {
        "goes on": loss_of(first),
        "other": loss_of(built(6)),
        "module": loss_of(built(6, of_module=5)),
        "section": loss_of(built(6, of_module=7, of_section=5)),
        "resumed": resumed(built(6)),
        "resumed by the section": resumed(built(5, of_section=5)),
        "resumed by another section": resumed(built(5, of_section=6)),
    }


def test_the_seed_is_torchs_unless_the_user_gave_one(tmp_path: Path) -> None:
    """On two stages that of rank 0 counts."""
    (found,) = run(1, train_with_seeds, Case(stages=1), str(tmp_path))
    on_two = run(2, train_with_seeds, Case(), str(tmp_path))
    assert [found["torch"]] * 2 == [each["torch"] for each in on_two]
    assert found["torch"] == found["module"] == found["section"] != found["other"]
    assert found["goes on"] == found["resumed"] == found["resumed by the section"]
    assert found["goes on"] != found["resumed by another section"]
