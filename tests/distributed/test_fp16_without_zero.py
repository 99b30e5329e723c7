"""fp16 without ZeRO is refused; what it saved loads under ZeRO-1: fp32 weights, moments and the loss scale, bitwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from torch import nn

import ds_dynmo
from ds_dynmo.errors import CheckpointError, ConfigError
from tests.distributed.harness import run
from tests.distributed.support.checkpoints import STEPS, stock_engine, train_on
from tests.distributed.support.configs import Case, config
from tests.distributed.support.models import module_of
from tests.distributed.support.training import build, raw

MOMENTS = ("exp_avg", "exp_avg_sq")
UNFUSED = Case(precision="fp16", groups="two", clip=0.0, dynmo=None)
FUSED = replace(UNFUSED, optimizer="uncompiled FusedAdam")
ZERO = {"precision": "fp16 zero1", "dynmo": {"interval": 0}}


def stock_state(wrapper: Any) -> Iterator[tuple[nn.Parameter, dict[str, torch.Tensor]]]:
    """List parameters with their fp32 weights and moments."""
    state = wrapper.optimizer.state
    for number, group in enumerate(wrapper.fp16_groups):
        sizes = [parameter.numel() for parameter in group]
        if isinstance(wrapper, FP16_Optimizer):
            flat = wrapper.fp32_groups_flat[number]
            masters, moments = flat.split(sizes), zip(*(state[flat][name].split(sizes) for name in MOMENTS))
        else:
            masters = wrapper.fp32_groups[number]
            moments = ([state[master][name] for name in MOMENTS] for master in masters)
        for parameter, master, held in zip(group, masters, moments, strict=True):
            yield parameter, {"master": master, **dict(zip(MOMENTS, held))}


def save_stock(case: Case, folder: str) -> dict[str, Any]:
    """Train and save under DeepSpeed's engine. Return what its optimizer holds by layer and name, and the progress."""
    engine = stock_engine(case)
    train_on(engine, 0)
    engine.save_checkpoint(folder, client_state={"epoch": 4})
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    held = {names[id(p)]: {kind: raw(v) for kind, v in state.items()} for p, state in stock_state(engine.optimizer)}
    return {"held": held, "progress": progress(engine)}


def progress(engine: Any) -> tuple[Any, ...]:
    steps = {int(state["step"]) for state in engine.basic_optimizer.state.values()}
    return engine.optimizer.loss_scale, engine.global_steps, engine.skipped_steps, engine.get_lr(), steps


def load_ours(case: Case, folder: str) -> dict[str, Any]:
    """Load under ZeRO-1, move layers and train on. Return what each rank's shards held once it was loaded."""
    engine = build(case)
    _, client = engine.load_checkpoint(folder)
    held = {
        name: {kind: (part[0], raw(part[1])) for kind, part in state.items() if isinstance(part, tuple)}
        for name, parameter in engine.module.named_parameters()
        if (state := engine.stage.state.state_of(parameter))
    }
    found = {"held": held, "progress": progress(engine), "epoch": client["epoch"]}
    engine.rebalance([0, 2, case.num_layers])
    return {**found, "losses": train_on(engine, STEPS)}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("case", [UNFUSED, FUSED], ids=["unfused", "fused"])
def test_a_checkpoint_of_stock_deepspeed_loads_bitwise(case: Case, replicas: int, tmp_path: Path) -> None:
    saved = run(2, save_stock, replace(case, scheduler=True), str(tmp_path))
    loaded = run(2 * replicas, load_ours, replace(case, scheduler=True, replicas=replicas, **ZERO), str(tmp_path))
    held: dict[str, dict[str, list[tuple[int, bytes]]]] = {}
    for of_rank in loaded:
        for name, state in of_rank["held"].items():
            for kind, part in state.items():
                held.setdefault(name, {}).setdefault(kind, []).append(part)
    joined = {n: {k: b"".join(part for _, part in sorted(parts)) for k, parts in s.items()} for n, s in held.items()}
    assert joined == {name: state for of_rank in saved for name, state in of_rank["held"].items()}
    assert {of_rank["epoch"] for of_rank in loaded} == {4}
    assert all(of_rank["progress"] == saved[0]["progress"] for of_rank in loaded)
    assert all(loss < 4 for loss in loaded[0]["losses"])


def refused(case: Case) -> tuple[str, bool]:
    """Return what initialize says, and whether the optimizer is as it was."""
    module = module_of(case)
    optimizer = torch.optim.Adafactor(module.parameters())
    before = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(ConfigError) as refusal:
        ds_dynmo.initialize(model=module, optimizer=optimizer, config=config(case))
    return str(refusal.value), before == [group["params"] for group in optimizer.param_groups]


def test_initialize_refuses_it_and_names_the_remedy() -> None:
    for message, untouched in run(2, refused, replace(UNFUSED, dynmo={"interval": 0})):
        assert message.startswith("fp16.enabled = true with zero_optimization.stage = 0: ")
        assert 'set "zero_optimization": {"stage": 1}' in message and "Adafactor, need fp32" in message
        assert untouched


def change_stage_0(folder: str, change: str) -> None:
    path = next(Path(folder).glob("*/mp_rank_00_model_states.pt"))
    content = torch.load(path, weights_only=False)
    wrapper = content["optimizer"]
    states = wrapper["optimizer_state_dict"]["state"]
    if change == "steps":
        states[1]["step"] += 2
    elif change == "rows":
        states[1]["row_var"] = torch.zeros(3, 1)
    elif change == "elements":
        wrapper["fp32_groups"][0][1] = wrapper["fp32_groups"][0][1][:1]
    elif change == "groups":
        wrapper["optimizer_state_dict"]["param_groups"].pop()
    elif change == "parameters":
        wrapper["fp32_groups"][0].pop()
    else:
        del content["optimizer"]
    torch.save(content, path)


def load_refused(case: Case, folder: str) -> tuple[str, list[float]]:
    engine = build(case)
    with pytest.raises(CheckpointError) as refusal:
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    return str(refusal.value), train_on(engine, STEPS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps", "took 4 steps and layer .* 6, but bf16 and ZeRO count steps per parameter group: both are in"),
        ("rows", r"does not hold the fp16 optimizer's state .*: row_var of shape \[3, 1\], not \["),
        ("elements", "fp32 weights of .* elements, not"),
        ("parameters", r"\d parameters in parameter group 0, not \d"),
        ("groups", "1 parameter groups, not 2"),
        ("no optimizer", "holds no state of an fp16 optimizer, and no file beside it shards of ZeRO"),
    ],
)
def test_a_checkpoint_that_cannot_be_held_in_shards_is_refused(change: str, message: str, tmp_path: Path) -> None:
    run(2, save_stock, UNFUSED, str(tmp_path))
    change_stage_0(str(tmp_path), change)
    for found, losses in run(2, load_refused, replace(UNFUSED, **ZERO), str(tmp_path)):
        assert re.search(message, found), found
        assert all(loss < 4 for loss in losses)
