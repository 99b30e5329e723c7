"""LR schedulers that a program builds on parameter groups which differ between ranks, in number or order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import ds_dynmo
from ds_dynmo.errors import ConfigError
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import module_of
from tests.support.training import batches, build

pytestmark = pytest.mark.ranks

Schedule = Callable[[torch.optim.Optimizer], Any]

RATES = {"a": 0.03, "b": 0.01}


class Restarts(lr_scheduler.LRScheduler):
    """A schedule of the program's, with a list that nothing says to be of parameter groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.restarts = [1, 3]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [group["initial_lr"] * (self.last_epoch not in self.restarts) for group in self.optimizer.param_groups]


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Make a schedule of as many phases as there are groups."""
    rates = [10 * RATES[group["name"]] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, rates, total_steps=8)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    """Make a schedule that runs as many others as there are groups, each with an entry for each group."""
    runs = [lr_scheduler.ConstantLR(optimizer, 0.5, 9), lr_scheduler.LambdaLR(optimizer, [slower for _ in RATES])]
    return lr_scheduler.SequentialLR(optimizer, runs, milestones=[1])


def sequential_of_fewer(optimizer: torch.optim.Optimizer) -> Any:
    runs = [lr_scheduler.StepLR(optimizer, 3), lr_scheduler.CosineAnnealingLR(optimizer, 4)]
    return lr_scheduler.SequentialLR(optimizer, [*runs, lr_scheduler.LambdaLR(optimizer, slower)], milestones=[1, 2])


def slower(step: int) -> float:
    return 1 / (1 + step)


def train(schedule: Schedule, second_rank: str) -> tuple[str, list[float], dict[str, Any]]:
    """Return the refusal, the losses, and the learning rates of groups by name."""
    torch.manual_seed(0)
    module = module_of(Case(stages=2))
    has_both = torch.distributed.get_rank() == 0
    matrices = [p for p in module.parameters() if p.dim() > 1 or not has_both]
    vectors = [p for p in module.parameters() if p.dim() <= 1 and has_both]
    groups = [{"params": each, "name": name, "lr": RATES[name]} for name, each in (("a", matrices), ("b", vectors))]
    if not has_both and second_rank != "alike":
        groups = groups[::-1] if second_rank == "in another order" else groups[:1]
    optimizer = torch.optim.AdamW(groups)
    settings = config(Case(optimizer="client"))
    try:
        engine = ds_dynmo.initialize(
            model=module, optimizer=optimizer, lr_scheduler=schedule(optimizer), config=settings
        )[0]
    except ConfigError as error:
        return str(error), [], {}
    data, rates = batches(engine), []
    losses = []
    for _ in range(3):
        losses.append(engine.train_batch(data).item())
        rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
    return "", losses, {name: [each[name] for each in rates] for name in RATES}


def test_phases_stay_in_their_order_and_a_group_that_a_rank_lacks_gets_the_rates_it_has_elsewhere() -> None:
    for schedule, others in (
        (one_cycle, ("in another order", "without one")),
        (sequential, ("in another order",)),
        (sequential_of_fewer, ("without one",)),
    ):
        alike, *different = run_each(2, train, *((schedule, second) for second in ("alike", *others)))
        assert different == [alike] * len(others), schedule
        for refusal, losses, rates in alike:
            assert not refusal and len(losses) == 3 and len({*rates["a"]}) > 1, schedule
            assert rates == alike[0][2], schedule


def test_a_list_that_may_be_of_groups_is_refused_by_name() -> None:
    alike, reordered = run_each(2, train, (Restarts, "alike"), (Restarts, "in another order"))
    assert not alike[0][0] and alike[0] == alike[1]
    for refusal, *_ in reordered:
        assert "LR scheduler Restarts has a list 'restarts' as long as rank 0 has parameter groups" in refusal
        assert "pass the scheduler as a callable" in refusal


def set_a_rate(precision: str) -> list[float]:
    """Set the rate of vectors where a stage has some, move one to the other stage, and return its rates."""
    engine = build(Case(precision=precision, groups="two", start=(0, 1, 8)))
    engine.train_batch(batches(engine))
    if engine.stage_id == 1:
        engine.basic_optimizer.param_groups[1]["lr"] = 0.125
    engine.rebalance([0, 2, 8])
    return [group["lr"] for group in engine.basic_optimizer.param_groups]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.nightly)])
def test_a_rate_set_where_a_group_has_parameters_goes_with_them(precision: str) -> None:
    of_matrices, of_vectors = zip(*run(2, set_a_rate, precision))
    assert of_vectors == (0.125, 0.125) and of_matrices == (0.03, 0.03)
