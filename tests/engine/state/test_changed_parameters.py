"""Programs that change parameters, groups or gradients between batches train on to the bit, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn.utils import prune

import ds_dynmo
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.planned_move import PlannedMove
from ds_dynmo.engine.state.resharding import Resharding
from ds_dynmo.errors import ConfigError, MigrationError
from ds_dynmo.torch_private import hooks_of
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import Block, Embedding, Head, layers, loss
from tests.support.training import (
    Warnings,
    batches,
    build,
    check_moves_changed_nothing,
    drop_decision,
    freeze,
    gather,
    layers_of,
    train_after,
    whole,
)

pytestmark = pytest.mark.ranks

nightly = partial(pytest.param, marks=pytest.mark.nightly)
FLAT = ["bf16 zero1", nightly("fp32 zero1"), nightly("bf16")]
AWAY, BACK = [0, 2, 6], [0, 3, 6]


def blocks_of(kind: type[Block], count: int = 4) -> list[Any]:
    return [LayerSpec(Embedding, 1), *(LayerSpec(kind, index) for index in range(count)), LayerSpec(Head, 2)]


def changed_layers(engine: Any, numbers: Sequence[int] = (1, 2)) -> list[Any]:
    return [layer for number, layer in layers_of(engine).items() if number in numbers]


# -- parameters that layers drop, rename or register in another order, and those of integers ----------


class Quantized(Block):
    """A block over frozen weights of integers, as of QLoRA or GPTQ."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        dtype = (torch.int8, torch.uint8, torch.int32, torch.bool)[index % 4]
        self.codes = nn.Parameter(torch.arange(8).add(index).to(dtype), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + self.codes.to(hidden.dtype) / 16)


def change(engine: Any, numbers: Sequence[int] = (1, 2)) -> None:
    """Rename, reorder, exchange, drop and freeze parameters."""
    for layer in changed_layers(engine, numbers):
        prune.l1_unstructured(layer.up, "weight", amount=0.3)  # the same parameter by another name, behind the others
        layer.up.bias = None
        weight, bias = layer.norm.weight, layer.norm.bias
        layer.norm.weight, layer.norm.bias = bias, weight
        frozen = nn.Linear(layer.down.in_features, layer.down.out_features).to(layer.down.weight.dtype)
        frozen.load_state_dict(layer.down.state_dict())
        layer.down = frozen.requires_grad_(False)


def train_changed(precision: str, folder: str, moves: bool) -> dict[str, Any]:
    """Change other layers before each batch. First of all they move, are saved and loaded, or are announced."""
    engine = build(Case(precision=precision), lambda _: blocks_of(Quantized, 8))

    def before(step: int) -> None:
        change(engine, [(), (1, 3), (2, 4), (5, 6), (7, 8), ()][step])  # of two, one leaves
        if moves and step in (1, 2, 5):
            engine.rebalance({1: [0, 3, 10], 2: [0, 2, 10], 5: [0, 4, 10]}[step], background=step == 2)
        elif moves and step == 3:
            assert engine.partition == [0, 2, 10]  # the move in the background was made
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
        elif moves and step == 4:
            engine.model_changed("layers were changed")

    found = train_after(engine, before, 6)
    held = {id(parameter) for parameter in engine.stage.state.parameters()}
    assert not any(id(layer.codes) in held for layer in layers_of(engine).values() if isinstance(layer, Quantized))
    return found


@pytest.mark.parametrize("precision", [*FLAT, nightly("fp32")])
def test_changed_layers_and_weights_of_integers_move_and_are_saved_as_what_they_are(
    precision: str, tmp_path: Path
) -> None:
    still, moved = run_each(2, train_changed, *((precision, str(tmp_path), moves) for moves in (False, True)))
    check_moves_changed_nothing(still, moved)


def train_and_change_meanwhile(precision: str, moves: bool) -> dict[str, Any]:
    """Change layers before the step of a batch in which one of them is on its way; decide again later."""
    engine = build(Case(blocks=3, precision=precision))
    seen, warnings = [], Warnings()
    engine.before_step(lambda: change(engine) if engine.global_steps == 1 else None)

    def before(step: int) -> None:
        seen.append(engine.partition)
        if moves and step in (1, 2):
            engine.rebalance(AWAY, background=True)

    return {**train_after(engine, before, 4), "seen": seen, "warnings": warnings.messages}


@pytest.mark.parametrize("precision", [*FLAT, "fp32"])
def test_layers_that_change_on_their_way_arrive_so_or_stay_until_the_next_move(precision: str) -> None:
    still, moved = run_each(2, train_and_change_meanwhile, (precision, False), (precision, True))
    check_moves_changed_nothing(still, moved)
    stays = precision != "fp32"  # state in flat buffers follows the order in which it was planned
    assert moved[0]["seen"][1:] == [BACK, BACK if stays else AWAY, AWAY]
    said = [message for message in moved[0]["warnings"] if "parameters of layer 1 were renamed" in message]
    assert len(said) == stays and all("norm.weight" in message and "up.bias" in message for message in said)


def test_a_planned_move_knows_each_change_of_parameters() -> None:
    weight, bias, other = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    keys = [ParamKey(1, "weight"), ParamKey(1, "bias")]
    held = list(zip(keys, (weight, bias)))
    planned = PlannedMove(cast("Resharding", None), held, overlapped=True)
    planned.check_still_held(list(held))
    for now, names in (
        ([(ParamKey(1, "weight_orig"), weight), held[1]], "weight, weight_orig"),
        (held[::-1], "weight, bias"),
        (list(zip(keys, (bias, weight))), "bias, weight"),
        (list(zip(keys, (weight, other))), "bias"),
        (held[:1], "bias"),
        ([*held, (ParamKey(1, "other"), other)], "other"),
    ):
        with pytest.raises(MigrationError, match=f"on their way: {names}. "):
            planned.check_still_held(now)


def announce_inside_a_batch(precision: str, moves: bool) -> None:
    """Freeze a layer in a callback before the step, and announce it there."""
    engine = build(Case(blocks=3, precision=precision))
    data = batches(engine)
    engine.train_batch(data)
    engine.before_step(lambda: (freeze(engine, 2), engine.model_changed("frozen")))
    if moves:
        engine.rebalance(AWAY, background=True)
    with pytest.raises(ConfigError, match=r"parameters between two batches.*before_step"):
        engine.train_batch(data)


@pytest.mark.parametrize("precision", FLAT)
def test_a_change_that_is_announced_inside_a_batch_is_refused(precision: str) -> None:
    run_each(2, announce_inside_a_batch, (precision, False), (precision, True))


def refused_while_frozen(precision: str, refused: bool) -> dict[str, Any]:
    """Rename frozen parameters, let a move be refused, and thaw them."""
    engine = build(Case(blocks=3, precision=precision))
    spoilt = [refused]
    engine.on_layer_arrival(lambda number, layer: setattr(layer, "spoilt", 1) if spoilt[0] else None)

    def before(step: int) -> None:
        if step == 1:
            for layer in changed_layers(engine):
                prune.l1_unstructured(layer.up, "weight", amount=0.3)
            if refused:
                with pytest.raises(MigrationError, match="spoilt") as raised:
                    engine.rebalance(AWAY)
                assert raised.value.harmless
                spoilt[0] = False
        else:
            freeze(engine, 0 if step else 5)
        engine.model_changed("frozen, renamed, thawed")
        drop_decision(engine)

    return train_after(engine, before, 3)


@pytest.mark.parametrize("precision", ["bf16", nightly("fp32 zero1"), nightly("bf16 zero1")])
def test_after_a_refused_move_thawed_layers_have_the_state_that_they_had(precision: str) -> None:
    still, refused = run_each(2, refused_while_frozen, (precision, False), (precision, True))
    assert [rank["losses"] for rank in refused] == [rank["losses"] for rank in still]
    assert whole(refused) == whole(still)


def repack(fewer: bool) -> list[float]:
    """Change layers on both stages, and go on with one."""
    case = Case(blocks=3, precision="bf16 zero1", dynmo={"interval": 0, "repack": {"enabled": True}})
    engine = build(case)
    data, losses = batches(engine), [0.0]
    while engine.global_steps < 4 and not engine.released:
        losses.append(engine.train_batch(data).item())
        if engine.global_steps == 1:
            change(engine, (1, 3))
        if engine.global_steps == 2 and fewer:
            engine.repack(1)
    return losses


def test_changed_layers_are_repacked() -> None:
    still, fewer = (results[0] for results in run_each(2, repack, (False,), (True,)))
    assert fewer == still and len(still) == 5


def drop_on_one_replica() -> None:
    """Drop a bias on one replica and try to move; drop it on the other too, and move."""
    engine = build(Case(blocks=3, replicas=2, precision="bf16 zero1"))
    engine.train_batch(batches(engine))
    for replica in (1, 0):
        if engine.grid.get_data_parallel_id() == replica:
            for layer in changed_layers(engine):
                layer.up.bias = None
        if replica:
            match = r"replicas 0 and 1 of stage 0 hold other parameters: layer 1's up\.bias"
            with pytest.raises(MigrationError, match=match) as raised:
                engine.rebalance(AWAY)
            assert raised.value.harmless and engine.partition == BACK
    engine.rebalance(AWAY)
    assert engine.partition == AWAY


def test_replicas_that_hold_other_parameters_are_refused() -> None:
    run(4, drop_on_one_replica)


def hide(folder: str) -> None:
    """Hide a parameter from its layer, which goes on computing with it, and try to move, save and announce it."""
    engine = build(Case(blocks=3, precision="bf16 zero1"))
    data = batches(engine)
    engine.train_batch(data)
    for layer in changed_layers(engine):
        weight = layer.up.weight
        del layer.up.weight
        layer.up.hidden, layer.up.weight = [weight], weight.detach()
    refused = r"layer 1: up\.hidden\[0\] is a parameter that the optimizer trains, but the layer"
    for call, given in (
        (engine.rebalance, AWAY),
        (engine.save_checkpoint, folder),
        (engine.load_checkpoint, folder),
        (engine.model_changed, "hidden"),
    ):
        with pytest.raises((MigrationError, ConfigError), match=refused):
            call(given)
    engine.train_batch(data)
    assert engine.partition == BACK


def test_a_parameter_that_its_layer_hides_is_refused_by_its_path(tmp_path: Path) -> None:
    run(2, hide, str(tmp_path))


# -- what users set on parameters ------------------------------------------------------------------------


def halved(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def doubled(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2.0)


class Marked(Block):
    """A block whose parameters have marks with names that DeepSpeed uses too, and a hook."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        for parameter in self.parameters():
            parameter.mine, parameter.group_name, parameter.allreduce = index, "decay", True  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(halved)


def set_on_parameters(engine: Any) -> dict[str, Any]:
    """Return the marks of all parameters, and their hooks in order."""
    found = {
        f"{number}.{name}": (
            {mark: value for mark, value in vars(parameter).items() if mark in ("mine", "group_name", "allreduce")},
            [getattr(hook, "__name__", "") for hook in hooks_of(parameter, "register_post_accumulate_grad_hook")],
        )
        for number, layer in layers_of(engine).items()
        for name, parameter in layer.named_parameters()
    }
    return {key: value for part in gather(found) for key, value in part.items()}


def train_marked(precision: str, moves: bool) -> dict[str, Any]:
    """Hook parameters before and after DeepSpeed does; freeze layers for a while, and move them."""
    engine = build(Case(blocks=3, precision=precision), lambda _: blocks_of(Marked))
    for parameter in engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(doubled)
    first = set_on_parameters(engine)

    def before(step: int) -> None:
        if step in (1, 3):
            freeze(engine, 3 if step == 1 else 0)
            engine.model_changed("frozen or thawed")
            drop_decision(engine)
        elif moves and step:
            engine.rebalance(AWAY if step == 2 else BACK, background=step == 4)

    found = train_after(engine, before, 5)
    assert set_on_parameters(engine) == first
    return {**found, "set": first["2.up.weight"]}


@pytest.mark.parametrize("precision", ["bf16 immediate", nightly("fp32"), nightly("fp32 zero1")])
def test_marks_stay_and_hooks_run_in_their_order(precision: str) -> None:
    still, moved = run_each(2, train_marked, (precision, False), (precision, True))
    check_moves_changed_nothing(still, moved)
    assert moved[0]["partition"] == BACK  # by the move in the background
    marks, hooks = moved[0]["set"]
    assert marks == {"mine": 1, "group_name": "decay", "allreduce": True}
    assert hooks[0] == "halved" and hooks[-1] == "doubled" and len(hooks) == (2 if precision == "fp32" else 3)


# -- parameters that are in no layer ------------------------------------------------------------------


class WeightedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.weight[0] * loss(logits, labels)


class WithScale(PipelineModule):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scale = nn.Parameter(torch.ones(3))


def with_foreign_parameter(precision: str, where: str, refused: str) -> None:
    """Initialize with a trainable parameter that is in no layer of the stage."""
    case = Case(blocks=3, precision=precision)
    torch.manual_seed(0)
    given = [Embedding(1), *(Block(index) for index in range(4)), Head(2)]
    module = (WithScale if where == "module" else PipelineModule)(
        layers=given if where == "given" else layers(case),
        num_stages=2,
        loss_fn=WeightedLoss().requires_grad_(bool(refused)) if where == "loss" else loss,
        partition_method="uniform",
    )
    parameters = [p for layer in given for p in layer.parameters()] if where == "given" else [*module.parameters()]
    if refused:
        with pytest.raises(ConfigError, match=f"the optimizer trains {refused}, which is in no layer of this stage"):
            ds_dynmo.initialize(model=module, model_parameters=parameters, config=config(case))
    else:
        engine = ds_dynmo.initialize(model=module, model_parameters=parameters, config=config(case))[0]
        engine.rebalance(AWAY)
        assert engine.train_batch(batches(engine)).item() > 0


@pytest.mark.parametrize("precision", ["bf16 zero1", nightly("fp32")])
def test_a_trained_parameter_of_no_layer_is_refused_at_initialize_by_name(precision: str) -> None:
    refused = [("loss", "loss_fn.weight"), ("module", "scale"), ("given", "layer 3's norm.weight"), ("loss", "")]
    run_each(2, with_foreign_parameter, *((precision, *each) for each in refused))


# -- parameter groups ---------------------------------------------------------------------------------


def scaled_by(layer: Block, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * layer.adapter


def refuse(engine: Any, match: str) -> None:
    with pytest.raises(MigrationError, match=match) as raised:
        engine.rebalance(AWAY)
    assert raised.value.harmless


def refuse_another_rate(engine: Any) -> None:
    group = engine.basic_optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], 0.5 if engine.stage_id == 1 else group["lr"]
    refuse(engine, "parameter group 0 has lr = 0.03 on rank 0 and 0.5 on rank 1: set it alike")
    group["lr"] = rate


def another_rate_in_flat_buffers() -> None:
    engine = build(Case(blocks=3, precision="bf16 zero1"))
    refuse_another_rate(engine)
    engine.rebalance(AWAY)
    assert engine.partition == AWAY


def test_a_rate_that_differs_between_ranks_is_refused_under_zero() -> None:
    run(2, another_rate_in_flat_buffers)


def train_with_group(moves: bool, everywhere: bool) -> dict[str, Any]:
    """Add a group with an adapter of a layer that leaves, on all ranks or only on its own; differ in a rate before."""
    engine = build(Case(blocks=3))

    def before(step: int) -> None:
        adapters = []
        if step == 1:
            refuse_another_rate(engine)
            for layer in changed_layers(engine, [2]):
                layer.adapter = nn.Parameter(torch.full((8,), 1.1))
                layer.register_forward_hook(scaled_by)
                adapters.append(layer.adapter)
            if adapters or everywhere:
                engine.basic_optimizer.add_param_group({"params": adapters, "lr": 0.2})
        if step and not everywhere:
            refuse(engine, "has 2 parameter groups on rank 0 and 1 on rank 1: call add_param_group on")
        elif step and moves:
            engine.rebalance(AWAY if step == 1 else BACK)

    return train_after(engine, before, 3)


def test_groups_that_every_rank_has_move_and_others_are_refused() -> None:
    still, moved, refused = run_each(2, train_with_group, (False, True), (True, True), (True, False))
    check_moves_changed_nothing(still, moved)
    assert [rank["losses"] for rank in refused] == [rank["losses"] for rank in still]


# -- gradients of the user's own ----------------------------------------------------------------------


def train_with_penalty(precision: str, moves: bool) -> dict[str, Any]:
    """Add gradients of a penalty before each batch, and move between the two, blocking and in the background."""
    engine, messages = build(Case(blocks=3, precision=precision, clip=0.0)), []

    def before(step: int) -> None:
        sum(0.05 * parameter.float().square().sum() for parameter in engine.module.parameters()).backward()
        if moves and step:
            try:
                engine.rebalance(AWAY if step == 1 else BACK, background=step == 2)
            except MigrationError as error:
                assert error.harmless
                messages.append("gradients" in str(error))

    return {**train_after(engine, before, 3), "refused": messages}


@pytest.mark.parametrize("precision", ["fp32", "bf16 immediate", *map(nightly, ("fp32 zero1", "bf16", "bf16 zero1"))])
def test_gradients_of_a_penalty_count_or_the_move_is_refused(precision: str) -> None:
    still, moved = run_each(2, train_with_penalty, (precision, False), (precision, True))
    assert [rank["losses"] for rank in moved] == [rank["losses"] for rank in still]
    assert whole(moved) == whole(still)
    moves = precision in ("fp32", "bf16")
    assert moved[0]["moved"] == (2 if moves else 0)  # a layer in each move
    assert all(moved[0]["refused"]) and bool(moved[0]["refused"]) != moves
