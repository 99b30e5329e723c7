"""A pipeline schedule as data: the order of passes of each stage."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules.actions import Action, Kind
from ds_dynmo.schedules.costs import PassCosts
from ds_dynmo.schedules.order import run

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """An order of actions per stage that takes every micro-batch of a batch forward and backward through every chunk.

    Per chunk, passes of one kind run in the order of the micro-batches. So under every schedule gradients are added,
    and messages arrive, in that order.

    Attributes:
        owners: per chunk, the stage that holds it (``Placement.owners``).
        micro_batches: number of micro-batches per batch.
        orders: per stage, its actions.

    Raises:
        ScheduleError: a pass is missing, occurs twice, is on a stage that does not hold its chunk, or comes too early;
            or the order is cyclic. The message names the passes.

    >>> F, B = Kind.FORWARD, Kind.BACKWARD
    >>> print(Schedule((0, 1), 1, ((Action(F, 0, 0), Action(B, 0, 0)), (Action(F, 1, 0), Action(B, 1, 0)))))
    stage 0: F0 B0
    stage 1: F0 B0
    """

    owners: tuple[int, ...]
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        free = PassCosts.equal(self.owners, 0.0)  # refuses invalid owners
        if self.micro_batches < 1:
            raise ScheduleError(f"a schedule has at least 1 micro-batch, got {self.micro_batches}")
        if len(self.orders) != free.num_stages:
            raise ScheduleError(f"{free.num_stages} stages need {free.num_stages} orders, got {len(self.orders)}")
        _check_passes(self.owners, self.micro_batches, self.orders)
        run(self.orders, self.micro_batches, free)  # refuses a cyclic order

    def __str__(self) -> str:
        """Return one line per stage, as in :attr:`lines`."""
        return "\n".join(f"stage {stage}: {line}" for stage, line in enumerate(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """The order of each stage; with several chunks per stage, an action is ``F5@2``: micro-batch 5, chunk 2."""
        chain = len(self.owners) == len(self.orders)
        return tuple(
            " ".join(f"{a.kind.letter}{a.micro_batch}{'' if chain else f'@{a.chunk}'}" for a in order)
            for order in self.orders
        )

    @classmethod
    def of_lines(cls, lines: Sequence[str]) -> Schedule:
        """Read the :attr:`lines` of a schedule.

        Raises:
            ScheduleError, ValueError: they are not those of a schedule.

        >>> Schedule.of_lines(["F0 I0 W0", "F0 B0"]).lines
        ('F0 I0 W0', 'F0 B0')
        >>> Schedule.of_lines(["F0@0 F0@3 B0@3 B0@0", "F0@1 F0@2 B0@2 B0@1"]).owners
        (0, 1, 1, 0)
        """
        orders = tuple(tuple(Action.of_text(word, stage) for word in line.split()) for stage, line in enumerate(lines))
        micro_batches = 1 + max((action.micro_batch for order in orders for action in order), default=0)
        owners = {action.chunk: stage for stage, order in enumerate(orders) for action in order}
        return cls(tuple(owner for _, owner in sorted(owners.items())), micro_batches, orders)

    @property
    def num_chunks(self) -> int:
        return len(self.owners)

    @property
    def num_stages(self) -> int:
        return len(self.orders)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of owners, micro-batches and orders, in hexadecimal: the same on every rank and in every Python."""
        content = json.dumps([self.owners, self.micro_batches, self.orders], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def split_chunks(self) -> set[int]:
        """The chunks whose backward passes run in two parts."""
        return {action.chunk for order in self.orders for action in order if action.kind == Kind.INPUT_GRADIENT}

    @property
    def splits(self) -> int:
        """The number of backward passes that run in two parts."""
        return sum(action.kind == Kind.INPUT_GRADIENT for order in self.orders for action in order)


_FORWARD = (Kind.FORWARD,)
_INPUT = (Kind.INPUT_GRADIENT, Kind.BACKWARD)
_WEIGHT = (Kind.WEIGHT_GRADIENT, Kind.BACKWARD)


def _check_passes(owners: Sequence[int], micro_batches: int, orders: Sequence[Sequence[Action]]) -> None:
    seen: dict[int, list[Action]] = {chunk: [] for chunk in range(len(owners))}
    for stage, order in enumerate(orders):
        for action in order:
            if not (0 <= action.chunk < len(owners) and 0 <= action.micro_batch < micro_batches):
                raise ScheduleError(
                    f"stage {stage} runs {action}, but there are {len(owners)} chunks and {micro_batches} micro-batches"
                )
            if owners[action.chunk] != stage:
                raise ScheduleError(f"stage {stage} runs {action}, which stage {owners[action.chunk]} owns")
            seen[action.chunk].append(action)
    for chunk, actions in seen.items():
        for kinds, name in ((_FORWARD, "forward"), (_INPUT, "input gradient"), (_WEIGHT, "weight gradient")):
            passes = [action.micro_batch for action in actions if action.kind in kinds]
            _check_sequence(passes, micro_batches, f"the {name} of chunk {chunk}")
        _check_weights_follow(actions)


def _check_sequence(passes: Sequence[int], micro_batches: int, name: str) -> None:
    """Refuse a sequence that is not every micro-batch once, in order."""
    if passes == list(range(micro_batches)):
        return
    missing = sorted({*range(micro_batches)} - {*passes})
    twice = sorted(number for number, count in Counter(passes).items() if count > 1)
    if missing:
        raise ScheduleError(f"{name} is missing for micro-batch {_listed(missing)}")
    if twice:
        raise ScheduleError(f"{name} is there more than once for micro-batch {_listed(twice)}")
    late = next(place for place, passed in enumerate(passes) if passed != place)
    raise ScheduleError(f"{name} is for micro-batch {passes[late]} where micro-batch {late} is next")


def _check_weights_follow(actions: Iterable[Action]) -> None:
    done = 0  # input gradients so far, in the order of the micro-batches
    for action in actions:
        if action.kind == Kind.INPUT_GRADIENT:
            done = action.micro_batch + 1
        elif action.kind == Kind.WEIGHT_GRADIENT and action.micro_batch >= done:
            raise ScheduleError(f"{action} comes before its input gradient")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
