"""Parameter groups are completed to the same list on every rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
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
    """Run ``complete_groups`` on all ranks: threads, which gather from each other."""
    told: list[Any] = [None] * len(optimizers)
    met = threading.Barrier(len(optimizers), timeout=60)

    def complete(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            told[rank] = value
            met.wait()
            every = [*told]
            met.wait()
            return every

        complete_groups(optimizers[rank], schedulers[rank] if schedulers else None, gather)

    with ThreadPoolExecutor(len(optimizers)) as ranks:
        list(ranks.map(complete, range(len(optimizers))))


def test_groups_are_completed_to_one_list_in_one_order() -> None:
    decays, plain = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    a, b = {"name": "a"}, {"name": "b"}
    for case, first, second, completed, sizes in (
        ("a missing group is added empty", [decays], [plain, decays], [plain, decays], [[0, 1], [1, 1]]),
        ("equal lists stay", [decays, plain], [decays, plain], [decays, plain], [[1, 1], [1, 1]]),
        ("equal options are told apart by position", [{}, {}], [{}, {}], [{}, {}], [[1, 1], [1, 1]]),
        ("or by names", [a, b], [b], [a, b], [[1, 1], [0, 1]]),
    ):
        optimizers: list[Any] = [optimizer_of(*options) for options in (first, second)]
        before = [list(optimizer.param_groups) for optimizer in optimizers]
        complete_on_all_ranks(optimizers)
        for optimizer, held, counts in zip(optimizers, before, sizes):
            groups = optimizer.param_groups
            assert all(group.items() >= options.items() for group, options in zip(groups, completed, strict=True)), case
            assert [len(group["params"]) for group in groups] == counts, case
            assert len(held) < len(groups) or all(one is other for one, other in zip(held, groups)), case


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


def test_a_scheduler_that_cannot_be_completed_is_refused() -> None:
    torchs = torch.optim.lr_scheduler
    for options, words in (([{}, {}], r"lr_lambdas.*LambdaLR.*name"), ([{"name": "a"}, {"name": "b"}], "lr_lambdas")):
        first, second = optimizer_of(*options), optimizer_of(options[1])
        lambdas = [lambda step: 1.0, lambda step: 0.5**step]
        schedulers: list[Any] = [torchs.LambdaLR(first, lambdas), torchs.LambdaLR(second, lambdas[1:])]
        with pytest.raises(ConfigError, match=words):
            complete_on_all_ranks([first, second], schedulers)
            pytest.fail(f"{options} are not refused")


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
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert rates == [(1.0, 0.01), (1.0, 0.5), (1.0, 0.5)]


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
    held, none = (list(map(id, group["params"])) for group in optimizer.param_groups)
    assert held == [*map(id, (trains, thaws, thawed))] and none == []


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
