"""What a round trains, drawn from its seed: a case, and the launches that train it to its end."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.support.case_runs import CASES, CaseRun
from tests.support.case_runs import num_layers as layers_of_run
from tests.support.configs import PRECISIONS, Case

MOST_RANKS = 6
TWO_CHUNKS = ("v", "loop", "auto")  # kinds of schedules under which a rank may hold two chunks


@dataclass(frozen=True)
class Death:
    """The SIGKILL that a rank sends itself, at its ``calls``-th call of a function after it has trained ``step``."""

    rank: int
    step: int
    calls: int


@dataclass(frozen=True)
class Launch:
    """One start of the job, which goes on from the last whole checkpoint.

    Attributes:
        stages: with which it starts.
        section: the "dynmo" section.
        disturbed: how often something is done to the engine after a batch, from 0 to 1.
        death: None: it trains to the end.
    """

    stages: int
    section: Mapping[str, Any]
    disturbed: float
    death: Death | None = None

    @property
    def has_two_chunks(self) -> bool:
        """Whether a rank may hold two chunks of layers."""
        return self.section.get("schedule") in TWO_CHUNKS


@dataclass(frozen=True)
class Round:
    """A case, trained once without disturbance, and once by ``launches``."""

    seed: int
    steps: int
    case: Case | CaseRun
    launches: tuple[Launch, ...]

    @property
    def undisturbed(self) -> Launch:
        """The launch that trains the case as it is."""
        return Launch(self.case.stages, {"interval": 0}, 0.0)


def random_round(seed: int) -> Round:
    """Draw a round."""
    chooser = random.Random(seed)
    case = chooser.choice([_plain, _plain, _sliced, _dynamic, _dynamic])(chooser)
    steps = case.steps if isinstance(case, CaseRun) else chooser.randint(6, 12)
    stages = [case.stages] + [_stages(chooser, case) for _ in range(chooser.choice([0, 0, 1, 1, 2, 3]))]
    launches = [_launch(chooser, case, number) for number in stages]
    killed = [replace(launch, death=_death(chooser, case, launch, steps)) for launch in launches[:-1]]
    return Round(seed, steps, case, (*killed, launches[-1]))


def num_layers(case: Case | CaseRun) -> int:
    """Count the layers of a case's model."""
    if isinstance(case, CaseRun):
        return layers_of_run(case)
    return case.blocks + 2 if case.slices else case.num_layers


def random_partition(chooser: random.Random, layers: int, stages: int, *, has_two_chunks: bool) -> list[int]:
    """Draw boundaries of a chain, or of two chunks per stage where there may be, each with a layer at least."""
    is_chain = not has_two_chunks or layers < 2 * stages or stages == 1 or chooser.random() < 1 / 3
    return _boundaries(chooser, layers, stages if is_chain else 2 * stages)


def _boundaries(chooser: random.Random, layers: int, chunks: int) -> list[int]:
    return [0, *sorted(chooser.sample(range(1, layers), chunks - 1)), layers]


def _plain(chooser: random.Random) -> Case:
    precision = chooser.choice(sorted(PRECISIONS))
    stages, replicas = _sizes(chooser, 1)
    return Case(
        stages=stages,
        replicas=replicas,
        blocks=chooser.choice([2, 5, 8]),
        tied=chooser.random() < 0.5,
        clip=chooser.choice([0.0, 0.05, 1.0]),
        optimizer=chooser.choice(["AdamW", "SGD", "Adafactor"] if precision == "fp32" else ["AdamW", "SGD"]),
        checkpoint_interval=chooser.choice([0, 0, 1, 2]),
        reentrant=chooser.random() < 0.5,
        micro_batches=chooser.choice([1, 2, 5]),
        groups=chooser.choice(["one", "two", "sparse"]),
        scheduler=chooser.random() < 0.5,
        precision=precision,
        dropout=chooser.random() < 0.5,
    )


def _sliced(chooser: random.Random) -> Case:
    """Draw a case of tensor parallelism, whose layers have no dropout."""
    stages, replicas = _sizes(chooser, 2)
    return replace(_plain(chooser), stages=stages, replicas=replicas, slices=2, dropout=False)


def _dynamic(chooser: random.Random) -> CaseRun:
    stages, replicas = _sizes(chooser, 1)
    return CaseRun(
        CASES[chooser.choice(sorted(CASES))],
        stages=stages,
        replicas=replicas,
        precision=chooser.choice(["fp32", "bf16", "bf16 zero1"]),
        checkpoint_interval=chooser.choice([0, 1]),
        steps=chooser.choice([6, 10]),
        clip=chooser.choice([0.0, 1.0]),
    )


def _sizes(chooser: random.Random, slices: int) -> tuple[int, int]:
    """Draw numbers of stages and replicas."""
    sizes = [(stages, replicas) for stages in (2, 3, 4) for replicas in (1, 2)]
    return chooser.choice([size for size in sizes if size[0] * size[1] * slices <= MOST_RANKS])


def _stages(chooser: random.Random, case: Case | CaseRun) -> int:
    """Draw a number of stages to resume on."""
    most = MOST_RANKS // (case.ranks // case.stages)
    return chooser.choice([case.stages, *range(1, min(most, 4) + 1)])


def _launch(chooser: random.Random, case: Case | CaseRun, stages: int) -> Launch:
    layers = num_layers(case)
    schedules: Sequence[str] = ("1f1b", "zero_bubble", *TWO_CHUNKS) if layers >= 2 * stages else ("1f1b", "zero_bubble")
    section = {
        "interval": chooser.choice([0, 0, 1, 3]),
        "min_improvement": 0.0,
        "profile": {"batches": 1, "warmup_batches": 0},
        "balance_by": chooser.choice(["time", "time", "parameters"]),
        "migration": chooser.choice(["blocking", "background"]),
        "checkpoint": chooser.choice(["blocking", "background"]),
        "schedule": chooser.choice(schedules),
        "timeout_seconds": 60,
    }
    if chooser.random() < 0.3:
        chunks = 2 * stages if section["schedule"] in ("v", "loop") and stages > 1 else stages
        section["initial_partition"] = _boundaries(chooser, layers, chunks)
    return Launch(stages, section, disturbed=chooser.choice([0.3, 0.6, 0.9]))


def _death(chooser: random.Random, case: Case | CaseRun, launch: Launch, steps: int) -> Death:
    ranks = launch.stages * case.ranks // case.stages
    return Death(chooser.randrange(ranks), chooser.randrange(steps // 3, steps), int(10 ** chooser.uniform(0, 5)))
