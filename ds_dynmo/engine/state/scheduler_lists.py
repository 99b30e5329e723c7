"""Lists of an LR scheduler that have an entry for each parameter group.

A list that is only as long as there are groups may be anything: the phases of a ``OneCycleLR``, the milestones of a
``SequentialLR``. Names say what a list is. Of lists with other names nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["GroupList", "fill_state", "group_lists", "unclear_lists"]

RUNS = "_schedulers"  # schedulers that torch's ChainedScheduler and SequentialLR run

OF_GROUPS = frozenset(
    {
        *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"),  # torch
        *("min_lr", "min_moms", "max_moms", "delta_lrs", "org_lrs"),  # DeepSpeed
    }
)
"""Names of lists of torch's and DeepSpeed's schedulers with an entry for each parameter group."""

OF_OTHERS = frozenset({RUNS, "_milestones", "_schedule_phases"})
"""Names of their other lists."""


class GroupList(NamedTuple):
    """A list of ``holder``, a scheduler or one that it runs.

    Attributes:
        path: of the list, from the scheduler that was given.
    """

    path: str
    holder: Any
    name: str

    @property
    def entries(self) -> list[Any]:
        entries: list[Any] = getattr(self.holder, self.name)
        return entries

    def set(self, entries: list[Any]) -> None:
        setattr(self.holder, self.name, entries)


def group_lists(scheduler: Any | None, num_groups: int) -> list[GroupList]:
    """List the lists of a scheduler, and of those that it runs, that have an entry for each of ``num_groups``."""
    return [found for found in _lists(scheduler, num_groups) if found.name in OF_GROUPS]


def unclear_lists(scheduler: Any | None, num_groups: int) -> list[str]:
    """List the paths of lists of which only the length, ``num_groups``, suggests that they are of groups."""
    return [found.path for found in _lists(scheduler, num_groups) if found.name not in OF_GROUPS | OF_OTHERS]


def fill_state(scheduler: Any, saved: dict[str, Any], numbers: Sequence[int | None], num_groups: int) -> dict[str, Any]:
    """Return a saved state of ``scheduler`` whose lists of groups have present entries for groups that it lacks.

    A list of an unknown name counts too if its length has changed with the number of groups.

    Args:
        numbers: of the groups that ``saved`` has entries for; None: the group is no longer there.
    """
    filled = dict(saved)
    if len(numbers) < num_groups:
        present = scheduler.state_dict()
        for _, _, name in _lists(scheduler, num_groups, inner=False):
            entries = saved.get(name)
            if name not in OF_OTHERS and isinstance(entries, list) and len(entries) == len(numbers):
                filled[name] = list(present[name])
                for number, entry in zip(numbers, entries):
                    if number is not None:
                        filled[name][number] = entry
    if RUNS in saved:
        pairs = zip(getattr(scheduler, RUNS, ()), saved[RUNS])
        filled[RUNS] = [fill_state(inner, state, numbers, num_groups) for inner, state in pairs]
    return filled


def _lists(scheduler: Any | None, length: int, path: str = "", *, inner: bool = True) -> Iterator[GroupList]:
    """Iterate over all lists of so many entries; with ``inner`` also over those of the schedulers that it runs."""
    for name, value in list(vars(scheduler).items()) if scheduler is not None else []:
        if isinstance(value, list) and len(value) == length:
            yield GroupList(path + name, scheduler, name)
    for number, one in enumerate(getattr(scheduler, RUNS, ()) if inner else ()):
        yield from _lists(one, length, f"{path}{RUNS}[{number}].")
