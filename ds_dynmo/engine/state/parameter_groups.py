"""The optimizer's parameter groups, made the same list on every rank.

A parameter that moves has to arrive in the same group. Positions do not identify groups: DeepSpeed drops groups that
are empty on a rank, and so do users. So a group is identified by its options. Groups that a rank lacks are added there,
empty. Then every rank has all groups in the same order, and LR schedulers drive all of them everywhere. Groups with
equal options are merged if ranks have different numbers of them, as with a group for each parameter: they cannot be
told apart, and while their options are equal this does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.replicas import is_per_replica
from ds_dynmo.engine.deepspeed.flat_adapter import REPLICA_OWN
from ds_dynmo.engine.move.description import can_be_sent, kind_of
from ds_dynmo.engine.move.object_graph import is_constant
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
        scheduler: an LR scheduler built on the optimizer, whose per-group lists are completed too, or None.
        gather: collective; gathers one picklable value of every stage.
        separate: first put parameters that differ between replicas into separate groups.

    Raises:
        ConfigError: a scheduler has different entries for groups with equal options of which ranks have different
            numbers, or a list whose entries cannot be sent to a rank that lacks them, or a list that may or may not
            have an entry per group.
    """
    unclear = unclear_lists(scheduler, len(optimizer.param_groups))
    separated = separate and separate_per_replica(optimizer, scheduler)
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
    """Name each group by its options and the number of earlier groups with the same options."""
    names: list[str] = []
    for entry in options:
        text = repr(sorted((name, _plain(value)) for name, value in entry.items()))
        names.append(f"{text}#{sum(name.rpartition('#')[0] == text for name in names)}")
    return names


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _later_equals(every: list[dict[str, Options]]) -> set[str]:
    """Find groups with the options of an earlier one, if ranks have different numbers of such groups."""
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
    """Move the parameters of groups ``later`` into the first group with the same options, in place.

    Returns:
        Paths of the scheduler's lists whose entries for such groups differ.
    """
    first = {_options_text(name): number for number, name in reversed(list(enumerate(mine)))}
    into = {number: first[_options_text(name)] for number, name in enumerate(mine) if name in later}
    groups, differing = list(optimizer.param_groups), []
    for number, target in into.items():
        groups[target]["params"] = [*groups[target]["params"], *groups[number]["params"]]
        groups[target].pop("param_names", None)  # torch's optional labels, by position
    if into:
        optimizer.param_groups[:] = [group for number, group in enumerate(groups) if number not in into]
    for group_list in group_lists(scheduler, len(mine)) if into else []:
        entries = group_list.entries
        if any(_differ(entries[number], entries[target]) for number, target in into.items()):
            differing.append(group_list.path)
        group_list.set([entry for number, entry in enumerate(entries) if number not in into])
    return differing


def leave_out_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Remove parameters that are frozen for good from their groups: as they say (``stays_frozen``), or are integers.

    Other frozen parameters may be unfrozen: under bf16 and ZeRO their state is kept, and moves with them.
    """
    for group in optimizer.param_groups:
        kept = [p for p in group["params"] if p.requires_grad or not _stays_frozen(p)]
        if len(kept) < len(group["params"]):
            group["params"] = kept
            group.pop("param_names", None)  # torch's optional labels, by position


def _stays_frozen(parameter: nn.Parameter) -> bool:
    can_train = torch.is_floating_point(parameter) or torch.is_complex(parameter)
    return not can_train or bool(getattr(parameter, "stays_frozen", False))


def separate_per_replica(optimizer: torch.optim.Optimizer, scheduler: Any | None) -> bool:
    """Move parameters that differ between replicas into additional groups with the options of their old ones.

    Return whether there are any.

    Args:
        optimizer: whose ``param_groups`` are changed in place.
        scheduler: an LR scheduler built on the optimizer, whose lists get entries for these groups, or None.
    """
    groups = optimizer.param_groups
    count = len(groups)
    sources = [number for number, group in enumerate(groups) if any(map(is_per_replica, group["params"]))]
    for group in [groups[number] for number in sources]:
        groups.append(
            {**options_of(group), REPLICA_OWN: True, "params": [p for p in group["params"] if is_per_replica(p)]}
        )
        group["params"] = [p for p in group["params"] if not is_per_replica(p)]
        group.pop("param_names", None)  # torch's optional labels, by position
    for group_list in group_lists(scheduler, count) if sources else []:
        entries = group_list.entries
        group_list.set([*entries, *(entries[number] for number in sources)])
    return bool(sources)


OptionTexts = list[dict[str, str] | None]


def option_texts(groups: Sequence[dict[str, Any]], used: Sequence[bool]) -> OptionTexts:
    """Write the options of each group as text; None: no parameter here has them."""
    return [
        {name: _comparable(value) for name, value in options_of(group).items()} if in_use else None
        for group, in_use in zip(groups, used, strict=True)
    ]


def check_alike(of_ranks: Mapping[int, OptionTexts]) -> None:
    """Refuse to move parameters between ranks that have different groups: they would train otherwise, or not at all.

    Args:
        of_ranks: :func:`option_texts` by rank.

    Raises:
        ConfigError: the same on every rank.
    """
    counts = {rank: len(texts) for rank, texts in of_ranks.items()}
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[most] != counts[least]:
        raise ConfigError(
            f"the optimizer has {counts[most]} parameter groups on rank {most} and {counts[least]} on rank {least}: "
            'call add_param_group on every rank, with "params": [] where the parameters are not'
        )
    for number in range(counts[most]):
        known = [(rank, texts[number]) for rank, texts in of_ranks.items() if texts[number] is not None]
        for rank, options in known[1:]:
            first_rank, first = known[0]
            assert options is not None and first is not None
            for name in sorted(first.keys() | options.keys()):
                if first.get(name) != options.get(name):
                    raise ConfigError(
                        f"parameter group {number} has {name} = {first.get(name)} on rank {first_rank} and "
                        f"{options.get(name)} on rank {rank}: set it alike on every rank, or use groups of their own"
                    )


def _comparable(value: Any) -> str:
    """Write a value as text that is the same on every rank."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_comparable, value))})"
    return repr(_plain(value)) if is_constant(value) or isinstance(value, torch.Tensor) else kind_of(value)


def in_order(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Sort every group's parameters in the order of ``parameters``; others come first."""
    place = {id(parameter): position for position, parameter in enumerate(parameters)}
    for group in optimizer.param_groups:
        group["params"] = sorted(group["params"], key=lambda p: place.get(id(p), -1))
        group.pop("param_names", None)


class Placeholders:
    """One element per group, for stages without parameters of the group under DeepSpeed's wrappers.

    The wrappers reduce group by group over all stages, so the job would hang if a stage lacked a group. The element is
    not used and not saved.
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
    """Merge orders into one with every name, which keeps the order of each rank as far as these agree.

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
    """Reorder and complete the scheduler's lists with one entry per group."""
    lists = {group_list.path: group_list for group_list in group_lists(scheduler, len(mine))}
    sendable = {
        path: dict(zip(mine, group_list.entries))
        for path, group_list in lists.items()
        if can_be_sent(group_list.entries)
    }
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
    for path, group_list in lists.items():
        entries = {**known.get(path, {}), **dict(zip(mine, group_list.entries))}
        group_list.set([entries[name] for name in order])


def _differ(entry: Any, other: Any) -> bool:
    return entry is not other and bool(_plain(entry) != _plain(other))
