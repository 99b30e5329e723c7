"""Optimizers given after ``initialize``, and ones whose step counts are on the accelerator, follow the layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import logger as deepspeed_logger

import ds_dynmo
from ds_dynmo.errors import ConfigError, MigrationError
from tests.support.configs import Case, config, parameter_groups
from tests.support.harness import run, run_each
from tests.support.models import module_of
from tests.support.stand_in import Accelerated
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

# -- given late, or not at all ----------------------------------------------------------------------------

nightly = partial(pytest.param, marks=pytest.mark.nightly)
MOVES = [[0, 1, 6], [0, 4, 6], [0, 2, 6]]


def train(case: Case, moves: list[list[int]], again: bool) -> dict[str, Any]:
    """Train with a late optimizer and moves. ``again``: another optimizer replaces it in the middle."""
    warnings = Warnings(deepspeed_logger)
    engine = without_optimizer(case)
    said = [message for message in warnings.messages if message.startswith("optimizer: the engine has none to train")]
    assert len(said) == (engine.global_rank == 0)
    with pytest.raises(ConfigError, match=r"^optimizer: the engine has none to train with"):
        engine.train_batch(batches(engine))
    give_optimizer(engine)

    def after(step: int) -> None:
        if again and step == 1:
            give_optimizer(engine, lr=0.01)

    return outcome_of(engine, train_and_move(engine, batches(engine), moves, 4, after))


@pytest.mark.parametrize(
    ("precision", "again"),
    [
        ("bf16 immediate", True),
        *(nightly(*each) for each in (("fp32", True), ("bf16", True), ("bf16 immediate", False))),
    ],
)
def test_a_late_optimizer_follows_the_layers(precision: str, again: bool) -> None:
    case = Case(blocks=3, precision=precision)
    still, moved = run_each(2, train, (case, [], again), (case, MOVES, again))
    check_moves_changed_nothing(still, moved)


def train_both(case: Case) -> tuple[list[float], list[float]]:
    """Train the same in DeepSpeed's own engine and in ours."""
    losses = []
    for initialize, dynmo in ((deepspeed.initialize, None), (ds_dynmo.initialize, case.dynmo)):
        engine = without_optimizer(replace(case, dynmo=dynmo), initialize)
        give_optimizer(engine)
        data = batches(engine)
        losses.append([engine.train_batch(data).item() for _ in range(3)])
    return losses[0], losses[1]


def test_without_moves_it_equals_stock() -> None:
    for stock, ours in run(2, train_both, Case(blocks=3, clip=0.0)):
        assert ours == stock


def refuse(engine: Any, expected: str) -> None:
    """Check that a move is refused, with what the second stage says, and changes nothing."""
    message = r"^getting layers ready to move failed on ranks \[1\].*" + re.escape(expected)
    with pytest.raises(MigrationError, match=re.compile(message, re.DOTALL)) as raised:
        engine.rebalance([0, 1, 6])
    assert raised.value.harmless and engine.partition == [0, 3, 6]


def give_others() -> None:
    """Give optimizers that do not train exactly the trainable parameters of the last stage, and train on.

    The first one has parameters that were collected before layers moved, so that some belong to no layer. An engine
    without an optimizer evaluates and moves.
    """
    engine = without_optimizer(Case(blocks=3))
    parameters = list(engine.module.parameters())
    before = engine.eval_batch(batches(engine)).item()
    engine.rebalance([0, 1, 6])
    assert engine.partition == [0, 1, 6] and engine.eval_batch(batches(engine)).item() == before
    with pytest.raises(ConfigError, match=r"^rank 0: the optimizer trains a parameter of shape"):
        give_optimizer(engine, parameters)
    engine = without_optimizer(Case(blocks=3))
    give_optimizer(engine)
    data = batches(engine)
    engine.train_batch(data)
    held, last = engine.basic_optimizer.param_groups[0]["params"], engine.stage_id == 1
    taken = [held.pop()] if last else []
    refuse(engine, "layer 5: weight requires a gradient and is in no parameter group of the optimizer")
    held += [*taken, torch.nn.Parameter(torch.zeros(3))] if last else []
    refuse(engine, "the optimizer trains a parameter of shape [3] that is in no layer of this stage")
    if last:
        held.pop()
        engine.optimizer = torch.optim.SGD(list(engine.module.parameters()), lr=0.1)
    refuse(engine, "engine.optimizer is another SGD than the AdamW that the engine was configured with")
    engine.train_batch(data), engine.train_batch(data)


def test_an_engine_without_an_optimizer_moves_and_one_that_trains_something_else_is_refused() -> None:
    run(2, give_others)


def save_and_load(stages: int, folder: str) -> list[float]:
    """Save at two stages and continue, or load that at ``stages`` stages and continue."""
    engine = without_optimizer(Case(stages=stages, blocks=3))
    give_optimizer(engine)
    data = batches(engine)
    if stages == 2:
        engine.train_batch(data)
        engine.rebalance([0, 4, 6])
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        for _ in range(engine.micro_batches):
            next(data)
    return [engine.train_batch(data).item() for _ in range(2)]


def test_its_state_is_loaded_at_another_number_of_stages(tmp_path: Path) -> None:
    went_on = run(2, save_and_load, 2, str(tmp_path))
    loaded = run(3, save_and_load, 3, str(tmp_path))
    assert loaded[0] == went_on[0]


# -- step counts on the accelerator: they are never pickled there ------------------------------------------


def with_adamw(case: Case, **optimizer: Any) -> Any:
    """Build an engine with torch's AdamW and these options."""
    module = module_of(case)
    settings = config(case)
    settings["optimizer"]["params"].update(optimizer)
    parameters = parameter_groups(module, case.groups)
    return ds_dynmo.initialize(model=module, model_parameters=parameters, config=settings)[0]


def train_fused(case: Case, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    engine = with_adamw(case, fused=True)
    assert all(group["fused"] for group in engine.basic_optimizer.param_groups)
    found = outcome_of(engine, train_and_move(engine, batches(engine), moves, 4))
    found["state"]["shards"].clear()  # on a CPU torch's fused kernel rounds the last elements of a buffer differently
    return found


@pytest.mark.parametrize("precision", ["bf16 zero1", nightly("fp32"), nightly("bf16")])
def test_moves_change_nothing_under_a_fused_optimizer(precision: str) -> None:
    """Not in fp32 with ZeRO-1, whose weights are the buffers that the kernel rounds differently."""
    case = Case(precision=precision, groups="sparse", clip=0.0 if "zero1" in precision else 1.0)
    still, moved = run_each(2, train_fused, (case, []), (case, [[0, 2, 8], [0, 7, 8], [0, 4, 8]]))
    check_moves_changed_nothing(still, moved)


def send_accelerated() -> dict[str, Any]:
    """Gather state that is on an accelerator, and state without data."""
    engine = with_adamw(Case(precision="bf16"))
    engine.train_batch(batches(engine))
    comm, rank = engine.stage.comm, engine.global_rank
    for held in engine.basic_optimizer.state.values():
        held["step"] = Accelerated(held["step"])
    every = comm.gather_objects(engine.stage.state.take_inventory())
    value = Accelerated(torch.tensor(float(rank)))
    message = ""
    try:
        comm.gather_objects(torch.empty(2, device="meta") if rank == 1 else None)
    except ds_dynmo.MigrationError as error:
        message = str(error) if error.harmless else "fatal"
    return {
        "steps": [(type(held.scalars[0]["step"]), held.scalars[0]["step"].item()) for held in every],
        "gathered": [tensor.item() for tensor in comm.gather_objects(value)],
        "broadcast": comm.broadcast_object(value).item(),
        "message": message,
    }


def test_state_on_an_accelerator_is_pickled_on_the_cpu() -> None:
    for result in run(2, send_accelerated):
        assert result["steps"] == [(torch.Tensor, 1.0)] * 2
        assert result["gathered"] == [0.0, 1.0] and result["broadcast"] == 0.0
        assert "ranks [1]" in result["message"] and "device meta: it has no data" in result["message"]
