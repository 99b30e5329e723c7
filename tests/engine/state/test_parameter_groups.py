"""Parameter groups are completed to the same list on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch import nn

from ds_dynmo.engine.state.parameter_groups import complete_groups, leave_out_frozen, merged_order, separate_per_replica
from ds_dynmo.engine.state.scheduler_lists import group_lists, unclear_lists
from ds_dynmo.errors import ConfigError


def optimizer_of(*options: dict[str, Any]) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))], **entry} for entry in options], lr=0.1)


def complete_on_all_ranks(optimizers: list[torch.optim.Optimizer], schedulers: list[Any] | None = None) -> None:
    """Run ``complete_groups`` on all ranks, one after another, replaying what each of them gathers."""
    calls: list[list[Any]] = [[] for _ in optimizers]

    class Enough(Exception):
        pass

    for round_number in range(2 if schedulers else 1):
        for rank, optimizer in enumerate(optimizers):
            held = [*optimizer.param_groups, *([vars(schedulers[rank])] if schedulers else [])]
            groups, contents = list(optimizer.param_groups), [dict(entries) for entries in held]
            seen = 0

            def note(value: Any, rank: int = rank, rounds: int = round_number) -> list[Any]:
                nonlocal seen
                seen += 1
                if seen > rounds:
                    calls[rank].append(value)
                    raise Enough
                return [every[seen - 1] for every in calls]

            with pytest.raises(Enough):
                complete_groups(optimizer, schedulers[rank] if schedulers else None, note)
            optimizer.param_groups[:] = groups
            for entries, content in zip(held, contents):
                entries.update(content)
    for rank, optimizer in enumerate(optimizers):
        answers = iter(list(zip(*calls)))
        complete_groups(optimizer, schedulers[rank] if schedulers else None, lambda value, a=answers: list(next(a)))


def test_missing_groups_are_added_empty_in_one_order() -> None:
    first, second = optimizer_of({"weight_decay": 0.1}), optimizer_of({"weight_decay": 0.0}, {"weight_decay": 0.1})
    complete_on_all_ranks([first, second])
    assert [g["weight_decay"] for g in first.param_groups] == [g["weight_decay"] for g in second.param_groups]
    assert sorted(len(g["params"]) for g in first.param_groups) == [0, 1]
    assert first.param_groups[0]["params"] == []


def test_equal_lists_stay_unchanged() -> None:
    optimizers = [optimizer_of({"weight_decay": 0.1}, {"weight_decay": 0.0}) for _ in range(2)]
    groups = [list(optimizer.param_groups) for optimizer in optimizers]
    complete_on_all_ranks(list(optimizers))
    assert all(a is b for o, gs in zip(optimizers, groups) for a, b in zip(o.param_groups, gs))


def test_equal_options_on_every_rank_are_told_apart_by_position() -> None:
    optimizers = [optimizer_of({}, {}) for _ in range(2)]
    complete_on_all_ranks(list(optimizers))
    assert all(len(optimizer.param_groups) == 2 for optimizer in optimizers)


def test_equal_groups_that_ranks_have_in_different_numbers_are_one() -> None:
    first, second = optimizer_of({}, {"lr": 0.5}, {}, {"lr": 0.5}, {}), optimizer_of({"lr": 0.5})
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (first, second)]
    held = [parameter for group in first.param_groups for parameter in group["params"]]
    complete_on_all_ranks([first, second], schedulers)
    assert [group["params"] for group in first.param_groups] == [held[::2], held[1::2]]
    assert [len(group["params"]) for group in second.param_groups] == [0, 1]
    for optimizer, scheduler in zip((first, second), schedulers):
        optimizer.step()
        scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.25]


def test_equal_groups_with_schedules_of_their_own_are_refused() -> None:
    optimizers = [optimizer_of({}, {}), optimizer_of({})]
    lambdas = [[lambda step: 1.0, lambda step: 0.5**step], [lambda step: 1.0]]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(*built) for built in zip(optimizers, lambdas)]
    with pytest.raises(ConfigError, match=r"lr_lambdas.*LambdaLR.*name"):
        complete_on_all_ranks(list(optimizers), schedulers)


def test_names_tell_equal_groups_apart() -> None:
    first, second = optimizer_of({"name": "a"}, {"name": "b"}), optimizer_of({"name": "b"})
    complete_on_all_ranks([first, second])
    assert [group["name"] for group in second.param_groups] == ["a", "b"]
    assert [len(group["params"]) for group in second.param_groups] == [0, 1]


def test_a_schedulers_lists_are_completed() -> None:
    first, second = optimizer_of({"name": "a", "lr": 0.5}, {"name": "b"}), optimizer_of({"name": "b"})
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in (first, second)]
    complete_on_all_ranks([first, second], schedulers)
    assert schedulers[1].base_lrs == [0.5, 0.1]
    for optimizer, scheduler in zip((first, second), schedulers):
        optimizer.step()
        scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])


def test_what_is_a_replicas_own_gets_groups_of_its_own_with_all_options() -> None:
    shared, own, other = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    own.replica_own = True  # type: ignore[attr-defined]
    groups = [{"params": [other], "lr": 1.0}, {"params": [own, shared], "lr": 2.0, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5**step])
    separate_per_replica(optimizer, scheduler)
    assert [group["params"] for group in optimizer.param_groups] == [[other], [shared], [own]]
    assert [group.get("replica_own") for group in optimizer.param_groups] == [None, None, True]
    assert scheduler.base_lrs == [1.0, 2.0, 2.0]
    optimizer.step()
    scheduler.step()
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (1.0, 0.01),
        (1.0, 0.5),
        (1.0, 0.5),
    ]


def test_a_scheduler_that_cannot_be_completed_is_refused() -> None:
    first, second = optimizer_of({"name": "a"}, {"name": "b"}), optimizer_of({"name": "b"})
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.LambdaLR(first, [lambda step: 1.0, lambda step: 0.5]),
        torch.optim.lr_scheduler.LambdaLR(second, [lambda step: 0.5]),
    ]
    with pytest.raises(ConfigError, match="lr_lambdas"):
        complete_on_all_ranks([first, second], schedulers)


def test_merged_order_keeps_each_ranks_order() -> None:
    assert merged_order([["a", "c"], ["a", "b", "c"], ["d"]]) == ["d", "a", "b", "c"]


def test_parameters_that_are_frozen_for_good_are_in_no_group() -> None:
    trains, thaws, stays, thawed = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    for parameter in (stays, thawed):
        parameter.stays_frozen = True  # type: ignore[attr-defined]
    for parameter in (thaws, stays):
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": [trains, thaws, stays, thawed]}, {"params": []}])
    leave_out_frozen(optimizer)
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        [*map(id, (trains, thaws, thawed))],
        [],
    ]


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Make one of each LR scheduler of torch's and DeepSpeed's."""
    torchs = torch.optim.lr_scheduler
    return [
        torchs.ChainedScheduler([torchs.LinearLR(optimizer), torchs.ConstantLR(optimizer)]),
        torchs.ConstantLR(optimizer),
        torchs.CosineAnnealingLR(optimizer, 9),
        torchs.CosineAnnealingWarmRestarts(optimizer, 9),
        torchs.CyclicLR(optimizer, 0.1, 0.2),
        torchs.ExponentialLR(optimizer, 0.5),
        torchs.LambdaLR(optimizer, lambda step: 1.0),
        torchs.LinearLR(optimizer),
        torchs.MultiStepLR(optimizer, [1, 2, 3]),
        torchs.MultiplicativeLR(optimizer, lambda step: 1.0),
        *(torchs.OneCycleLR(optimizer, 0.1, 9, three_phase=three) for three in (False, True)),
        torchs.PolynomialLR(optimizer),
        torchs.ReduceLROnPlateau(optimizer),
        torchs.SequentialLR(optimizer, [torchs.StepLR(optimizer, 1), torchs.ConstantLR(optimizer)], [1]),
        torchs.StepLR(optimizer, 1),
        torch.optim.swa_utils.SWALR(optimizer, 0.1),
        lr_schedules.LRRangeTest(optimizer),
        lr_schedules.OneCycle(optimizer, 0.1, 0.2),
        lr_schedules.WarmupLR(optimizer),
        lr_schedules.WarmupDecayLR(optimizer, 9),
        lr_schedules.WarmupCosineLR(optimizer, 9),
    ]


def test_what_is_known_of_schedulers_is_true_of_all_that_torch_and_deepspeed_have() -> None:
    """A list is of groups if it is always as long as there are groups."""
    few, many = (schedulers_of(optimizer_of(*[{}] * count)) for count in (4, 7))
    base = torch.optim.lr_scheduler.LRScheduler
    every = {each for name, each in vars(torch.optim.lr_scheduler).items() if name[0] != "_" and isinstance(each, type)}
    theirs = {each for each in every if issubclass(each, base) and each is not base}
    theirs |= {getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    assert theirs <= {*map(type, few)}
    for first, second in zip(few, many):
        lists = [name for name, value in vars(first).items() if isinstance(value, list)]
        lengths = {name: (len(getattr(first, name)), len(getattr(second, name))) for name in lists}
        of_groups = {name for name, counts in lengths.items() if counts == (4, 7)}
        assert {found.name for found in group_lists(first, 4) if found.holder is first} == of_groups, first
        assert not [name for name, (length, _) in lengths.items() if unclear_lists(first, length)], first
