"""The optimizer's parameter groups, made the same list on every rank.

A parameter that moves has to arrive in its own group. Positions do not say which that is: DeepSpeed drops
groups that are empty on a rank, and users leave them out themselves. A group is known by its own options; one
that a rank lacks is added there, empty, so that every rank holds every group in one order, and so that LR
schedulers drive all of them everywhere. Groups with equal options are one group where ranks have different numbers of
them, as with a group for each parameter: nothing tells which is which, and as long as they stay equal nothing needs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.replicas import is_own
from ds_dynmo.engine.deepspeed.flat_wrapper import REPLICA_OWN
from ds_dynmo.engine.move.description import can_be_sent
from ds_dynmo.engine.state.scheduler_lists import group_lists, unclear_lists
from ds_dynmo.errors import ConfigError

Options = dict[str, Any]


def options_of(group: dict[str, Any]) -> Options:
    """Return a group's options without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def complete_groups(
    optimizer: torch.optim.Optimizer,
    scheduler: Any | None,
    gather: Callable[[Any], list[Any]],
    *,
    separate: bool = False,
) -> None:
    """Add every parameter group that any rank has to this rank, in an order common to all.

    Args:
        optimizer: whose ``param_groups`` are completed in place.
        scheduler: an LR scheduler that was built on it already, whose per-group lists are completed too, or None.
        gather: collective; one picklable value of every rank.
        separate: give parameters that are each replica's own groups of their own first.

    Raises:
        ConfigError: a scheduler treats groups with equal options that not every rank has as often differently (which
            one is which?), or it has a list whose entries cannot be sent to a rank that lacks them, or one that may
            have an entry for each group or not.
    """
    unclear = unclear_lists(scheduler, len(optimizer.param_groups))
    separated = separate and separate_own(optimizer, scheduler)
    mine = _named([options_of(group) for group in optimizer.param_groups])
    every: list[dict[str, Options]] = gather(dict(zip(mine, map(options_of, optimizer.param_groups))))
    later = _later_equals(every)
    differing = _merge(optimizer, scheduler, mine, later)
    mine = [name for name in mine if name not in later]
    every = [{name: options for name, options in rank.items() if name not in later} for rank in every]
    order = merged_order([list(names) for names in every])
    complete = mine == order and not separated and not later
    if mine != order:
        present = dict(zip(mine, optimizer.param_groups))
        options = {name: value for rank in reversed(every) for name, value in rank.items()}
        optimizer.param_groups[:] = [present.get(name) or {"params": [], **options[name]} for name in order]
    if scheduler is not None:
        _complete_scheduler(scheduler, mine, order, gather, complete, unclear, differing)


def _named(options: list[Options]) -> list[str]:
    """Name each group by its options, and by how many groups before it have the same."""
    names: list[str] = []
    for entry in options:
        text = repr(sorted((name, _plain(value)) for name, value in entry.items()))
        names.append(f"{text}#{sum(name.rpartition('#')[0] == text for name in names)}")
    return names


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _later_equals(every: list[dict[str, Options]]) -> set[str]:
    """Find names of groups with the options of one before them, where the ranks have different numbers of those."""
    names = {name for rank in every for name in rank}
    numbers = {text: [0] * len(every) for text in map(_options_text, names)}
    for place, rank in enumerate(every):
        for name in rank:
            numbers[_options_text(name)][place] += 1
    uneven = {text for text, counts in numbers.items() if len(set(counts)) > 1}
    return {name for name in names if not name.endswith("#0") and _options_text(name) in uneven}


def _options_text(name: str) -> str:
    return name.rpartition("#")[0]


def _merge(optimizer: torch.optim.Optimizer, scheduler: Any | None, mine: list[str], later: set[str]) -> list[str]:
    """Put the parameters of groups ``later`` into the first group with the same options, in place.

    Returns:
        The scheduler's lists whose entries for such groups differ.
    """
    first = {_options_text(name): number for number, name in reversed(list(enumerate(mine)))}
    into = {number: first[_options_text(name)] for number, name in enumerate(mine) if name in later}
    groups, differing = list(optimizer.param_groups), []
    for number, target in into.items():
        groups[target]["params"] = [*groups[target]["params"], *groups[number]["params"]]
        groups[target].pop("param_names", None)  # optional labels of torch's, by position
    if into:
        optimizer.param_groups[:] = [group for number, group in enumerate(groups) if number not in into]
    for found in group_lists(scheduler, len(mine)) if into else []:
        if any(_differ(found.entries[number], found.entries[target]) for number, target in into.items()):
            differing.append(found.path)
        found.set([entry for number, entry in enumerate(found.entries) if number not in into])
    return differing


def leave_out_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Take parameters out of their groups that are frozen for good, which they say by ``stays_frozen``.

    Any other frozen parameter may thaw: under bf16 and ZeRO its state is kept, and moves with it.
    """
    for group in optimizer.param_groups:
        kept = [p for p in group["params"] if p.requires_grad or not getattr(p, "stays_frozen", False)]
        if len(kept) < len(group["params"]):
            group["params"] = kept
            group.pop("param_names", None)  # optional labels of torch's, by position


def separate_own(optimizer: torch.optim.Optimizer, scheduler: Any | None) -> bool:
    """Put parameters that are each replica's own into groups after the others, with the options of those they were in.

    Return whether there are any.

    Args:
        optimizer: whose ``param_groups`` are changed in place.
        scheduler: an LR scheduler that was built on it already, whose lists get entries for these groups, or None.
    """
    groups = optimizer.param_groups
    count = len(groups)
    sources = [number for number, group in enumerate(groups) if any(map(is_own, group["params"]))]
    for group in [groups[number] for number in sources]:
        groups.append({**options_of(group), REPLICA_OWN: True, "params": [p for p in group["params"] if is_own(p)]})
        group["params"] = [p for p in group["params"] if not is_own(p)]
        group.pop("param_names", None)  # optional labels of torch's, by position
    for of_groups in group_lists(scheduler, count) if sources else []:
        of_groups.set([*of_groups.entries, *(of_groups.entries[number] for number in sources)])
    return bool(sources)


def in_order(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Sort every group's parameters in the order of ``parameters``; others stay in front."""
    place = {id(parameter): position for position, parameter in enumerate(parameters)}
    for group in optimizer.param_groups:
        group["params"] = sorted(group["params"], key=lambda p: place.get(id(p), -1))
        group.pop("param_names", None)


class Placeholders:
    """One element per group, which keeps the group alive in DeepSpeed's wrappers on a stage that has nothing of it.

    The wrappers reduce group by group over all stages: a stage that lacked one would hang the job. Nothing uses
    the element, and it does not reach a checkpoint.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        param_names: dict[nn.Parameter, str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        groups = optimizer.param_groups
        self.parameters = [nn.Parameter(torch.zeros(1, dtype=dtype, device=device)) for _ in groups]
        self.names = {parameter: f"dynmo_placeholder_{number}" for number, parameter in enumerate(self.parameters)}
        param_names.update(self.names)
        for group, parameter in zip(groups, self.parameters):
            if not any(member.requires_grad and member.numel() for member in group["params"]):
                group["params"] = [*group["params"], parameter]


def merged_order(orders: list[list[str]]) -> list[str]:
    """Merge orders into one that holds every name; each rank's own order is kept as far as they agree.

    >>> merged_order([["a", "c"], ["b", "c"], ["a", "b"]])
    ['a', 'b', 'c']
    """
    merged: list[str] = []
    for order in orders:
        position = 0
        for name in order:
            if name in merged:
                position = merged.index(name) + 1
            else:
                merged.insert(position, name)
                position += 1
    return merged


def _complete_scheduler(
    scheduler: Any,
    mine: list[str],
    order: list[str],
    gather: Callable[[Any], list[Any]],
    complete: bool,
    unclear: list[str],
    differing: list[str],
) -> None:
    """Reorder and fill the scheduler's lists that hold one entry per group."""
    lists = {found.path: found for found in group_lists(scheduler, len(mine))}
    sendable = {path: dict(zip(mine, found.entries)) for path, found in lists.items() if can_be_sent(found.entries)}
    every = gather((complete, mine, list(lists), sendable, unclear, differing))
    if names := sorted({name for *_, of_rank in every for name in of_rank}):
        raise ConfigError(
            "parameter groups with equal options, of which the ranks have different numbers, have different entries in "
            f"{names} of the LR scheduler {type(scheduler).__name__}, so a parameter that moves could not find its "
            'own: give each group an option of its own, e.g. {"name": "no_decay", ...}'
        )
    if all(rank_complete for rank_complete, *_ in every):
        return
    for rank, (*_, rank_unclear, _) in enumerate(every):
        if rank_unclear:
            raise ConfigError(
                f"the LR scheduler {type(scheduler).__name__} has a list {rank_unclear[0]!r} as long as rank {rank} "
                "has parameter groups, which the ranks do not have alike: it may have an entry for each group or "
                "not; pass the scheduler as a callable, which is called when every rank has every group"
            )
    known: dict[str, dict[str, Any]] = {}
    for _, _, _, rank_lists, *_ in reversed(every):
        for attribute, entries in rank_lists.items():
            known.setdefault(attribute, {}).update(entries)
    for rank, (_, has, attributes, *_) in enumerate(every):  # of every rank, so that all raise
        for attribute in attributes:
            missing = [name for name in order if name not in has and name not in known.get(attribute, {})]
            if missing:
                raise ConfigError(
                    f"the LR scheduler {type(scheduler).__name__} has one entry of {attribute!r} per parameter group, "
                    f"but rank {rank} lacks group {missing[0]} and its entry cannot be sent there; give every rank "
                    "every parameter group (empty ones are kept), or pass the scheduler as a callable"
                )
    for path, found in lists.items():
        entries = {**known.get(path, {}), **dict(zip(mine, found.entries))}
        found.set([entries[name] for name in order])


def _differ(one: Any, other: Any) -> bool:
    return one is not other and bool(_plain(one) != _plain(other))
