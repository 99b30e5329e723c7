"""An optimizer given to the engine after ``initialize`` follows the layers; one that does not train all is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import logger as deepspeed_logger

from ds_dynmo.errors import ConfigError, MigrationError
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.training import (
    Warnings,
    batches,
    check_moves_changed_nothing,
    give_optimizer,
    outcome_of,
    train_and_move,
    without_optimizer,
)

pytestmark = pytest.mark.ranks

STEPS = 6
MOVES = [[0, 1, 6], [0, 4, 6], [0, 2, 6], [0, 5, 6], [0, 3, 6]]


def train(case: Case, moves: list[list[int]], again: bool = False) -> dict[str, Any]:
    """Train with a late optimizer and moves. ``again``: another optimizer replaces it in the middle."""
    warnings = Warnings(deepspeed_logger)
    engine = without_optimizer(case)
    said = [message for message in warnings.messages if message.startswith("optimizer: the engine has none to train")]
    assert len(said) == (engine.global_rank == 0)
    with pytest.raises(ConfigError, match=r"^optimizer: the engine has none to train with"):
        engine.train_batch(batches(engine))
    give_optimizer(engine)

    def after(step: int) -> None:
        if again and step == 2:
            give_optimizer(engine, lr=0.01)

    return outcome_of(engine, train_and_move(engine, batches(engine), moves, STEPS, after))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 immediate"])
def test_a_late_optimizer_follows_the_layers(precision: str, again: bool) -> None:
    case = Case(stages=2, blocks=3, precision=precision)
    still, moved = run_each(2, train, (case, [], again), (case, MOVES, again))
    check_moves_changed_nothing(still, moved)


def train_stock(case: Case) -> list[float]:
    """Train the same in DeepSpeed's own engine."""
    import deepspeed

    engine = without_optimizer(replace(case, dynmo=None), deepspeed.initialize)
    give_optimizer(engine)
    data = batches(engine)
    return [engine.train_batch(data).item() for _ in range(STEPS)]


def test_without_moves_it_equals_stock() -> None:
    case = Case(stages=2, blocks=3, clip=0.0)
    (stock, ours) = run(2, train_stock, case), run(2, train, case, [])
    assert [r["losses"] for r in ours] == stock


def move_before_the_optimizer(case: Case) -> str:
    """Collect parameters before layers move, so that some belong to no layer later."""
    engine = without_optimizer(case)
    parameters = list(engine.module.parameters())
    engine.rebalance([0, 1, 6])
    try:
        give_optimizer(engine, parameters)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_parameters_collected_before_a_move_are_refused() -> None:
    for message in run(2, move_before_the_optimizer, Case(stages=2, blocks=3)):
        assert message.startswith("rank 0: the optimizer trains a parameter of shape")


def refused(case: Case, how: str) -> dict[str, Any]:
    """Give an optimizer that does not train exactly the trainable parameters of the last stage."""
    engine = without_optimizer(case)
    give_optimizer(engine)
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    optimizer = engine.basic_optimizer
    if engine.stage_id == 1:
        if how == "left out":
            optimizer.param_groups[0]["params"].pop()
        elif how == "foreign":
            optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))
        else:
            engine.optimizer = torch.optim.SGD(list(engine.module.parameters()), lr=0.1)
    try:
        engine.rebalance([0, 1, 6])
    except MigrationError as error:
        message, harmless = str(error), error.harmless
    else:
        message, harmless = "moved", False
    losses += [engine.train_batch(data).item() for _ in range(2)]
    return {"message": message, "harmless": harmless, "partition": engine.partition, "losses": losses}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("left out", "layer 5: weight requires a gradient and is in no parameter group of the optimizer"),
        ("foreign", "the optimizer trains a parameter of shape [3] that is in no layer of this stage"),
        ("replaced", "engine.optimizer is another SGD than the AdamW that the engine was configured with"),
    ],
)
def test_a_move_is_refused_if_the_optimizer_trains_something_else(how: str, expected: str) -> None:
    for found in run(2, refused, Case(stages=2, blocks=3), how):
        assert expected in found["message"] and found["message"].startswith(
            "getting layers ready to move failed on ranks [1]"
        )
        assert found["harmless"] and found["partition"] == [0, 3, 6]
        assert len(found["losses"]) == 3


def save_and_load(stages: int, folder: str) -> list[float]:
    """Save at two stages and continue, or load that at ``stages`` stages and continue."""
    case = Case(stages=stages, blocks=3, dynmo={"interval": 0})
    engine = without_optimizer(case)
    give_optimizer(engine)
    data = batches(engine)
    if stages == 2:
        for move in ([0, 1, 6], [0, 4, 6]):
            engine.train_batch(data)
            engine.rebalance(move)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        for _ in range(2 * case.micro_batches):
            next(data)
    return [engine.train_batch(data).item() for _ in range(3)]


def test_its_state_is_loaded_at_another_number_of_stages(tmp_path: Path) -> None:
    went_on = run(2, save_and_load, 2, str(tmp_path))
    loaded = run(3, save_and_load, 3, str(tmp_path))
    assert loaded[0] == went_on[0]
