"""fp16 training: the loss scale, and steps that an overflow skips, under everything that moves layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from tests.support import checkpoints
from tests.support.configs import Case, config, parameter_groups
from tests.support.elastic import losses, merged, train_alone, train_and_repack
from tests.support.harness import run, run_each
from tests.support.models import layers, module_of
from tests.support.training import (
    batches,
    build,
    check_moves_changed_nothing,
    drop_decision,
    freeze,
    gather,
    outcome_of,
    partitions,
    raw,
    train_and_move,
    whole,
)

pytestmark = pytest.mark.ranks

nightly = partial(pytest.param, marks=pytest.mark.nightly)
CASE = Case(precision="fp16 zero1", groups="two")
CALM = {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 4}}


class Overflow(nn.Module):
    """Passes its input on. In given batches the gradient that it passes back is infinite."""

    def __init__(self, steps: Sequence[int], micro_batches: int) -> None:
        super().__init__()
        self.steps, self.micro_batches, self.passes = steps, micro_batches, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        step = self.passes // self.micro_batches
        self.passes += 1
        output = hidden.clone()
        if step in self.steps and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output


def layers_that_overflow(case: Case) -> list[Any]:
    plain = layers(case)
    return [*plain[:3], LayerSpec(Overflow, (1, 3), case.micro_batches), *plain[3:]]


def scale_and_skipped(engine: Any) -> tuple[float, int]:
    return engine.optimizer.loss_scale, engine.skipped_steps


def train_through_overflows(case: Case, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Train 6 batches, with a move after each; two of them overflow in a layer that one stage has."""
    engine = build(case, layers_that_overflow, more=CALM)
    scales, magnitudes = [], []
    engine.before_step(lambda: magnitudes.append(engine.gradient_magnitudes()))

    def after(step: int) -> None:
        sums = engine.sum_over_world(magnitudes.pop()).sum().nan_to_num(-1).item()
        scales.append((*scale_and_skipped(engine), float(engine.get_global_grad_norm()), round(sums, 6)))

    found = train_and_move(engine, batches(engine), moves, 6, after)
    assert gather(scales) == [scales] * engine.world_size
    return {**outcome_of(engine, found), "scales": scales}


@pytest.mark.parametrize("kind", ["v", nightly("1f1b")])
def test_overflows_at_given_steps_change_nothing_under_moves(kind: str) -> None:
    case = replace(CASE, tied=True, clip=0.5)
    moves = [[0, 1, 9], [0, 3, 9], [0, 8, 9], [0, 4, 9], [0, 5, 9]]
    if kind == "v":
        moves[1], moves[3] = [0, 1, 3, 6, 9], [0, 2, 4, 7, 9]
    ours = replace(case, dynmo={"interval": 0, "schedule": {"kind": kind}})
    still, moved = run_each(2, train_through_overflows, (case, []), (ours, moves))
    check_moves_changed_nothing(still, moved)
    assert moved[0]["scales"] == still[0]["scales"]
    scales, skipped, norms, sums = zip(*still[0]["scales"])
    assert skipped == (0, 1, 1, 2, 2, 2)
    assert scales[0] == 1024.0 and scales[1] == 512.0  # halved on every stage; growth is DeepSpeed's
    assert [norm for norm in norms if norm == float("inf")] == [norms[1], norms[3]]
    trained = [(norm, total) for norm, total in zip(norms, sums) if norm != float("inf")]
    assert all(0.01 < norm < 20 and norm < total < 100 * norm for norm, total in trained)  # both without the scale


def train_beside_stock(case: Case, which: str) -> tuple[Any, ...]:
    """Train under DeepSpeed's engine or ours, at one partition."""
    module, initialize = module_of(case), ds_dynmo.initialize
    if which == "deepspeed":
        initialize, case = deepspeed.initialize, replace(case, dynmo=None)
    parameters = parameter_groups(module, case.groups)
    engine = initialize(model=module, model_parameters=parameters, config=config(case))[0]
    data, found = batches(engine), []
    for _ in range(7):
        found.append((engine.train_batch(data).item(), *scale_and_skipped(engine), engine.get_lr()))
    return found, {name: raw(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(CASE, id="moves"), nightly(replace(CASE, precision="fp16", dynmo=None), id="no block, no ZeRO")],
)
def test_an_unclipped_run_equals_deepspeed(case: Case) -> None:
    """Losses, loss scales, skipped steps and learning rates: a skipped step skips the scheduler's, too."""
    case = replace(case, clip=0.0, tied=True, scheduler=True)
    stock, ours = run_each(case.ranks, train_beside_stock, (case, "deepspeed"), (case, "ds_dynmo"))
    assert stock == ours
    _, scales, skipped, _ = zip(*ours[0][0])
    assert case.dynmo is None or (
        1 < skipped[-1] < 6 and any(after > before for before, after in zip(scales, scales[1:]))
    )


def test_a_run_resumes_on_other_stages_and_replicas(tmp_path: Path) -> None:
    case = replace(CASE, tied=True, clip=0.0)
    saved = run(2, checkpoints.save_and_continue, case, str(tmp_path), [0, 6, 8])
    loaded = run(1, checkpoints.load_and_continue, replace(case, stages=1), str(tmp_path), 1)
    checkpoints.check_same(saved, loaded)
    same, replicas = run_each(2, load_only, *((replace(case, **one), str(tmp_path)) for one in ({}, OTHER)))
    assert whole(replicas) == whole(same)
    ((scale, skipped),) = {result["scale"] for result in replicas}
    assert skipped and scale == 2.0 ** (17 - skipped)


OTHER = {"stages": 1, "replicas": 2}


def load_only(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(f"{folder}/by_{case.stages}")
    return {**outcome_of(engine, []), "scale": scale_and_skipped(engine)}


@pytest.mark.parametrize(("writer", "reader"), [("ours", "stock"), nightly("stock", "ours")])
def test_checkpoints_load_in_stock_and_back(writer: str, reader: str, tmp_path: Path) -> None:
    case = replace(CASE, clip=0.0, scheduler=True)
    saved = run(2, checkpoints.save_as, writer, case, str(tmp_path))
    assert [found[:2] for found in run(2, checkpoints.load_as, reader, case, str(tmp_path))] == saved


@pytest.mark.nightly
def test_fewer_ranks_keep_the_scale() -> None:
    case = replace(CASE, tied=True, clip=0.0, scheduler=True)
    fewer, stayed = run(2, train_and_repack, case, {4: 1}, 8), run(2, train_alone, case, 8)
    assert losses(fewer) == losses(stayed)
    assert merged(fewer) == merged(stayed)


def train_with_frozen(case: Case, folder: str, whole_group: bool, resumes: bool) -> Any:
    """Freeze in batch 1, thaw in batch 3: a parameter group, or the leading layers. Save or load in batch 2."""
    engine = build(case, more=CALM)
    found, first = [], 2 if resumes else 0
    if resumes:
        engine.load_checkpoint(folder)
    data = checkpoints.data_after(engine, first)
    for step in range(first, 5):
        if step in (1, 3) and whole_group:
            for parameter in (p for p in engine.module.parameters() if p.dim() > 1):
                parameter.requires_grad_(step == 3).grad = None
        elif step in (1, 3):
            freeze(engine, 4 if step == 1 else 0)
        if step in (1, 3):
            engine.model_changed("frozen or thawed")
        if step == 2 and not resumes:
            engine.save_checkpoint(folder)
        drop_decision(engine)
        found.append(engine.train_batch(data).item())
    return outcome_of(engine, found[-3:]), [float(s["step"]) for s in engine.basic_optimizer.state.values()]


@pytest.mark.parametrize("whole_group", [pytest.param(False, id="stage"), nightly(True, id="group")])
def test_a_group_frozen_on_a_stage_keeps_its_count_of_steps_when_a_run_resumes(
    whole_group: bool, tmp_path: Path
) -> None:
    case = replace(CASE, groups="two" if whole_group else "one", clip=0.0)
    calls = [(case, str(tmp_path), whole_group, resumes) for resumes in (False, True)]
    (saved, steps), (resumed, steps_resumed) = (zip(*results) for results in run_each(2, train_with_frozen, *calls))
    assert [result["losses"] for result in resumed] == [result["losses"] for result in saved]
    assert whole(resumed) == whole(saved) and steps_resumed == steps
    assert len({step for of_rank in steps for step in of_rank}) == 1


def train_with(case: Case, more: dict[str, Any], moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    engine = build(case, more=more)
    return outcome_of(engine, train_and_move(engine, batches(engine), moves, 4))


TRANSPEEDER = {  # configs/ds_config.json
    "gradient_clipping": 1.0,
    "bf16": {"enabled": False},
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 12,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1.0e-8, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-5, "warmup_num_steps": 100, "total_num_steps": 1000},
    },
    "wall_clock_breakdown": True,
}
GDGPT = {  # configs/ds_config_pp.yml, without fp16.fused_optimizer, which DeepSpeed 0.19.8 refuses
    "gradient_clipping": 2.0,
    "bf16": {"enabled": False},
    "fp16": {**TRANSPEEDER["fp16"], "auto_cast": False, "initial_scale_power": 16},
    "zero_allow_untested_optimizer": True,
}
STATIC = {"fp16": {"enabled": True, "loss_scale": 128.0}}


@pytest.mark.parametrize(
    "more",
    [pytest.param(TRANSPEEDER, id="transpeeder"), nightly(GDGPT, id="gdGPT"), nightly(STATIC, id="static")],
)
def test_configurations_as_they_are_shipped_move_under_zero(more: dict[str, Any]) -> None:
    case = replace(CASE, groups="one", dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}})
    still, moved = run_each(2, train_with, (case, more, []), (case, more, partitions(case, seed=2, count=3)))
    check_moves_changed_nothing(still, moved)
