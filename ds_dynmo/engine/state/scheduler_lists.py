"""Lists of an LR scheduler that have an entry for each parameter group.

A list with as many entries as there are groups may be something else: the phases of a ``OneCycleLR``, the milestones of
a ``SequentialLR``. So lists are recognised by name, and lists with other names are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["GroupList", "fill_state", "group_lists", "unclear_lists"]

RUNS = "_schedulers"  # the inner schedulers of torch's ChainedScheduler and SequentialLR

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
    """A list of ``holder``, which is a scheduler or an inner one.

    Attributes:
        path: of the list, from the outermost scheduler.
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
    """Find the lists of a scheduler and its inner ones with an entry for each of ``num_groups`` groups."""
    return [candidate for candidate in _lists(scheduler, num_groups) if candidate.name in OF_GROUPS]


def unclear_lists(scheduler: Any | None, num_groups: int) -> list[str]:
    """Return the paths of lists of unknown name whose length is ``num_groups``."""
    known = OF_GROUPS | OF_OTHERS
    return [candidate.path for candidate in _lists(scheduler, num_groups) if candidate.name not in known]


def fill_state(scheduler: Any, saved: dict[str, Any], numbers: Sequence[int], num_groups: int) -> dict[str, Any]:
    """Return a saved state of ``scheduler`` whose lists of groups have present entries for groups that it lacks.

    A list of an unknown name counts too if its length has changed with the number of groups.

    Args:
        numbers: of the groups that ``saved`` has entries for.
    """
    filled = dict(saved)
    if len(numbers) < num_groups:
        present = scheduler.state_dict()
        for _, _, name in _lists(scheduler, num_groups, inner=False):
            entries = saved.get(name)
            if name not in OF_OTHERS and isinstance(entries, list) and len(entries) == len(numbers):
                filled[name] = list(present[name])
                for number, entry in zip(numbers, entries):
                    filled[name][number] = entry
    if RUNS in saved:
        pairs = zip(getattr(scheduler, RUNS, ()), saved[RUNS])
        filled[RUNS] = [fill_state(inner, state, numbers, num_groups) for inner, state in pairs]
    return filled


def _lists(scheduler: Any | None, length: int, path: str = "", *, inner: bool = True) -> Iterator[GroupList]:
    """Yield all lists with ``length`` entries; with ``inner``, of inner schedulers too."""
    for name, value in list(vars(scheduler).items()) if scheduler is not None else []:
        if isinstance(value, list) and len(value) == length:
            yield GroupList(path + name, scheduler, name)
    for number, inner_scheduler in enumerate(getattr(scheduler, RUNS, ()) if inner else ()):
        yield from _lists(inner_scheduler, length, f"{path}{RUNS}[{number}].")
