"""Programs that change parameters, groups or gradients between batches train on to the bit, or are refused by name."""

from __future__ import annotations

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
    outcome_of,
    whole,
)

pytestmark = pytest.mark.ranks

PRECISIONS = ("fp32", "fp32 zero1", "bf16", "bf16 zero1")
STEPS, CHANGED, CHANGED_LAYERS = 6, 2, (1, 2)  # one layer that stays, one that leaves
MOVES = {3: [0, 2, 6], 5: [0, 3, 6]}


# -- parameters that layers drop, rename or register in another order ---------------------------------


def changed_layers(engine: Any) -> list[Any]:
    return [layer for number, layer in layers_of(engine).items() if number in CHANGED_LAYERS]


def change(engine: Any) -> None:
    """Rename, reorder, exchange, drop and freeze parameters."""
    for layer in changed_layers(engine):
        prune.l1_unstructured(layer.up, "weight", amount=0.3)  # the same parameter by another name, behind the others
        layer.up.bias = None
        weight, bias = layer.norm.weight, layer.norm.bias
        layer.norm.weight, layer.norm.bias = bias, weight
        frozen = nn.Linear(layer.down.in_features, layer.down.out_features).to(layer.down.weight.dtype)
        frozen.load_state_dict(layer.down.state_dict())
        layer.down = frozen.requires_grad_(False)


def train(precision: str, way: str, folder: str) -> dict[str, Any]:
    """Train, change layers, and go on ``way``: still, blocking, background, or through a checkpoint."""
    engine = build(Case(blocks=3, precision=precision))
    data, losses = batches(engine), []
    for step in range(STEPS):
        if step == CHANGED:
            change(engine)
        if way in ("blocking", "background") and step in MOVES:
            engine.rebalance(MOVES[step], background=way == "background")
        if way == "checkpoint" and step in MOVES:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
        if way == "announced" and step in MOVES:
            engine.model_changed("layers were changed")
        losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_changed_layers_move_and_are_saved_as_what_they_are(precision: str, tmp_path: Path) -> None:
    ways = ("still", "blocking", "background", "checkpoint", "announced")
    still, blocking, background, saved, announced = run_each(
        2, train, *((precision, way, str(tmp_path)) for way in ways)
    )
    check_moves_changed_nothing(still, blocking)
    check_moves_changed_nothing(still, background)
    for through in (saved, announced):
        assert [rank["losses"] for rank in through] == [rank["losses"] for rank in still]
        assert whole(through) == whole(still)


def train_and_change_meanwhile(precision: str, moves: bool) -> dict[str, Any]:
    """Change layers before the step of a batch in which one of them is on its way; decide again later."""
    engine = build(Case(blocks=3, precision=precision))
    data, losses, seen, warnings = batches(engine), [], [], Warnings()
    engine.before_step(lambda: change(engine) if engine.global_steps == CHANGED else None)
    for step in range(STEPS):
        if moves and step in (CHANGED, CHANGED + 1):
            engine.rebalance([0, 2, 6], background=True)
        losses.append(engine.train_batch(data).item())
        seen.append(engine.partition)
    return {**outcome_of(engine, losses), "seen": seen, "warnings": warnings.messages}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_that_change_on_their_way_arrive_so_or_stay_until_the_next_move(precision: str) -> None:
    still, moved = run_each(2, train_and_change_meanwhile, (precision, False), (precision, True))
    check_moves_changed_nothing(still, moved)
    stays = precision != "fp32"  # state in flat buffers follows the order in which it was planned
    assert moved[0]["seen"][CHANGED : CHANGED + 2] == [[0, 3, 6] if stays else [0, 2, 6], [0, 2, 6]]
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


def announced_inside_a_batch(precision: str, moves: bool) -> str:
    """Freeze a layer in a callback before the step, and announce it there."""
    engine = build(Case(blocks=3, precision=precision))
    data = batches(engine)
    engine.train_batch(data)

    def announce() -> None:
        freeze(engine, 2)
        engine.model_changed("frozen")

    engine.before_step(announce)
    if moves:
        engine.rebalance([0, 2, 6], background=True)
    with pytest.raises(ConfigError) as raised:
        engine.train_batch(data)
    return str(raised.value)


@pytest.mark.parametrize("precision", ["fp32 zero1", "bf16"])
def test_a_change_that_is_announced_inside_a_batch_is_refused(precision: str) -> None:
    for messages in run_each(2, announced_inside_a_batch, (precision, False), (precision, True)):
        assert all("parameters between two batches" in message and "before_step" in message for message in messages)


def refused_while_frozen(precision: str, refused: bool) -> dict[str, Any]:
    """Rename frozen parameters, let a move be refused, and thaw them."""
    engine = build(Case(blocks=3, precision=precision))
    data, losses, spoilt = batches(engine), [], [refused]
    engine.on_layer_arrival(lambda number, layer: setattr(layer, "spoilt", 1) if spoilt[0] else None)
    freeze(engine, 5)
    engine.model_changed("all but the head are frozen")
    for step in range(4):
        drop_decision(engine)
        if step == 1:
            for layer in changed_layers(engine):
                prune.l1_unstructured(layer.up, "weight", amount=0.3)
            if refused:
                with pytest.raises(MigrationError, match="spoilt") as raised:
                    engine.rebalance([0, 2, 6])
                assert raised.value.harmless
                spoilt[0] = False
            engine.model_changed("renamed")
        if step == 2:
            freeze(engine, 0)
            engine.model_changed("all train")
        losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


@pytest.mark.parametrize("precision", ["fp32 zero1", "bf16"])
def test_after_a_refused_move_thawed_layers_have_the_state_that_they_had(precision: str) -> None:
    still, refused = run_each(2, refused_while_frozen, (precision, False), (precision, True))
    assert [rank["losses"] for rank in refused] == [rank["losses"] for rank in still]
    assert whole(refused) == whole(still)


def repack(fewer: bool) -> list[float]:
    """Change layers on three stages, and go on with two."""
    engine = build(Case(stages=3, blocks=3, precision="fp32 zero1", dynmo={"interval": 0, "repack": {"enabled": True}}))
    data, losses = batches(engine), []
    for step in range(STEPS):
        if step == CHANGED:
            change(engine)
        if fewer and step == CHANGED + 1:
            engine.repack(2)
            if engine.released:
                break
        losses.append(engine.train_batch(data).item())
    return losses


def test_changed_layers_are_repacked() -> None:
    still, fewer = run(3, repack, False)[0], run(3, repack, True, complete=False)[0]
    assert fewer == still and len(still) == STEPS


def on_one_replica(change_all: bool) -> str:
    """Drop a bias on one replica only, or on both, and move."""
    engine = build(Case(blocks=3, replicas=2, precision="bf16 zero1"))
    data = batches(engine)
    engine.train_batch(data)
    if change_all or engine.grid.get_data_parallel_id() == 1:
        for layer in changed_layers(engine):
            layer.up.bias = None
    try:
        engine.rebalance([0, 2, 6])
    except MigrationError as error:
        assert error.harmless
        return str(error)
    return "moved"


def test_replicas_that_hold_other_parameters_are_refused() -> None:
    refused, moved = run_each(4, on_one_replica, (False,), (True,))
    assert all("replicas 0 and 1 of stage 0 hold other parameters: layer 1's up.bias" in m for m in refused)
    assert moved == ["moved"] * 4


def hidden(how: str) -> list[str]:
    """Hide a parameter from its layer, which goes on computing with it, and try to move, save and announce it."""
    engine = build(Case(blocks=3, precision="fp32 zero1"))
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    for layer in changed_layers(engine):
        weight = layer.up.weight
        del layer.up.weight
        layer.up.hidden, layer.up.weight = [weight], weight.detach()
    messages = []
    for call in (
        lambda: engine.rebalance([0, 2, 6]),
        lambda: engine.save_checkpoint(how),
        lambda: engine.load_checkpoint(how),
        lambda: engine.model_changed("hidden"),
    ):
        with pytest.raises((MigrationError, ConfigError)) as raised:
            call()
        messages.append(str(raised.value))
    losses.append(engine.train_batch(data).item())
    assert engine.partition == [0, 3, 6]
    return messages


def test_a_parameter_that_its_layer_hides_is_refused_by_its_path(tmp_path: Path) -> None:
    for messages in run(2, hidden, str(tmp_path)):
        assert all(
            "layer 1: up.hidden[0] is a parameter that the optimizer trains, but the layer" in m for m in messages
        )


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


def train_marked(precision: str, way: str) -> dict[str, Any]:
    """Hook parameters before and after DeepSpeed does; freeze layers for a while, and move them."""
    blocks = [LayerSpec(Marked, index) for index in range(4)]
    engine = build(
        Case(blocks=3, precision=precision), lambda _: [LayerSpec(Embedding, 1), *blocks, LayerSpec(Head, 2)]
    )
    data, losses = batches(engine), []
    for layer in layers_of(engine).values():
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(doubled)
    seen = [set_on_parameters(engine)]
    for step in range(STEPS):
        if step in (2, 4):
            freeze(engine, 3 if step == 2 else 0)
            engine.model_changed("frozen or thawed")
            drop_decision(engine)
        if way != "still" and step in MOVES:
            engine.rebalance(MOVES[step], background=way == "background")
        losses.append(engine.train_batch(data).item())
    return {**outcome_of(engine, losses), "seen": [*seen, set_on_parameters(engine)]}


@pytest.mark.every_variant
@pytest.mark.parametrize("precision", ["fp32", "fp32 zero1", "bf16 immediate"])
def test_marks_stay_and_hooks_run_in_their_order(precision: str) -> None:
    still, *moved = run_each(2, train_marked, *((precision, way) for way in ("still", "blocking", "background")))
    for each in moved:
        check_moves_changed_nothing(still, each)
    for each in (still, *moved):
        first, last = each[0]["seen"]
        assert first == last
    marks, hooks = first["2.up.weight"]
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


def with_foreign_parameter(precision: str, where: str) -> str:
    """Initialize with a trainable parameter that is in no layer of the stage."""
    case = Case(blocks=3, precision=precision)
    torch.manual_seed(0)
    kind: type[PipelineModule] = WithScale if where == "module" else PipelineModule
    given = [Embedding(1), *(Block(index) for index in range(4)), Head(2)]
    module = kind(
        layers=given if where == "given" else layers(case),
        num_stages=2,
        loss_fn=WeightedLoss() if where in ("loss", "frozen loss") else loss,
        partition_method="uniform",
    )
    if where == "frozen loss":
        module.loss_fn.requires_grad_(False)
    parameters = [p for layer in given for p in layer.parameters()] if where == "given" else [*module.parameters()]
    try:
        engine = ds_dynmo.initialize(model=module, model_parameters=parameters, config=config(case))[0]
    except ConfigError as error:
        return str(error)
    engine.rebalance([0, 2, 6])
    return f"trained {engine.train_batch(batches(engine)).item() > 0}"


@pytest.mark.parametrize("precision", ["fp32", "fp32 zero1", "bf16"])
def test_a_trained_parameter_of_no_layer_is_refused_at_initialize_by_name(precision: str) -> None:
    of_loss, of_module, of_given, frozen = run_each(
        2, with_foreign_parameter, *((precision, where) for where in ("loss", "module", "given", "frozen loss"))
    )
    assert all("the optimizer trains loss_fn.weight, which is in no layer" in message for message in of_loss)
    assert all("the optimizer trains scale, which is in no layer" in message for message in of_module)
    assert all("the optimizer trains layer 3's norm.weight, which is in no layer of this" in m for m in of_given)
    assert frozen == ["trained True"] * 2


# -- parameters of integers ---------------------------------------------------------------------------


class Quantized(Block):
    """A block over frozen weights of integers, as of QLoRA or GPTQ."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__(index)
        codes = torch.arange(8).add(index).to(dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + self.codes.to(hidden.dtype) / 16)


def train_quantized(precision: str, way: str, folder: str) -> dict[str, Any]:
    case, dtypes = Case(blocks=3, precision=precision), (torch.int8, torch.uint8, torch.int32, torch.bool)
    blocks = [LayerSpec(Quantized, index, dtype) for index, dtype in enumerate(dtypes)]
    engine = build(case, lambda _: [LayerSpec(Embedding, 1), *blocks, LayerSpec(Head, 2)])
    data, losses = batches(engine), []
    for step in range(STEPS):
        if way in ("blocking", "background") and step in MOVES:
            engine.rebalance(MOVES[step], background=way == "background")
        if way == "checkpoint" and step in MOVES:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
        losses.append(engine.train_batch(data).item())
    held = {id(parameter) for parameter in engine.stage.state.parameters()}
    assert not any(id(layer.codes) in held for layer in layers_of(engine).values() if isinstance(layer, Quantized))
    return outcome_of(engine, losses)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_of_integers_move(precision: str, tmp_path: Path) -> None:
    ways = ("still", "blocking", "background", "checkpoint")
    still, blocking, background, saved = run_each(
        2, train_quantized, *((precision, way, str(tmp_path)) for way in ways)
    )
    check_moves_changed_nothing(still, blocking)
    check_moves_changed_nothing(still, background)
    assert whole(saved) == whole(still)


# -- parameter groups ---------------------------------------------------------------------------------


def scaled_by(layer: Block, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * layer.adapter


def train_with_group(where: str, moves: bool) -> dict[str, Any]:
    """Add an adapter to a layer that leaves, in a group that is added on its rank or on all; or change a rate."""
    engine = build(Case(blocks=3))
    data, losses, message = batches(engine), [], ""
    for step in range(STEPS):
        if step == CHANGED:
            adapters = []
            for number, layer in layers_of(engine).items():
                if number == 2 and where != "rate":
                    layer.adapter = nn.Parameter(torch.full((8,), 1.1))
                    layer.register_forward_hook(scaled_by)
                    adapters.append(layer.adapter)
            if where == "rate" and engine.stage_id == 1:
                engine.basic_optimizer.param_groups[0]["lr"] = 0.5
            elif adapters or where == "everywhere":
                engine.basic_optimizer.add_param_group({"params": adapters, "lr": 0.2})
        if moves and step in MOVES:
            try:
                engine.rebalance(MOVES[step])
            except MigrationError as error:
                assert error.harmless
                message = str(error)
        losses.append(engine.train_batch(data).item())
    return {**outcome_of(engine, losses), "message": message}


def test_groups_that_every_rank_has_move_and_others_are_refused() -> None:
    still, moved, refused, rate = run_each(
        2, train_with_group, ("everywhere", False), ("everywhere", True), ("its rank", True), ("rate", True)
    )
    check_moves_changed_nothing(still, moved)
    for rank in range(2):
        assert "has 2 parameter groups on rank 0 and 1 on rank 1: call add_param_group on" in refused[rank]["message"]
        assert "parameter group 0 has lr = 0.03 on rank 0 and 0.5 on rank 1: set it alike" in rate[rank]["message"]
    assert [rank["losses"] for rank in refused] == [rank["losses"] for rank in still]


# -- gradients of the user's own ----------------------------------------------------------------------


def train_with_penalty(precision: str, way: str) -> dict[str, Any]:
    """Add gradients of a penalty before each batch, and move between the two."""
    engine = build(Case(blocks=3, precision=precision, clip=0.0))
    data, losses, messages = batches(engine), [], []
    for step in range(STEPS):
        sum(0.05 * parameter.float().square().sum() for parameter in engine.module.parameters()).backward()
        if way != "still" and step in MOVES:
            try:
                engine.rebalance(MOVES[step], background=way == "background")
            except MigrationError as error:
                assert error.harmless
                messages.append(str(error))
        losses.append(engine.train_batch(data).item())
    return {**outcome_of(engine, losses), "messages": messages}


@pytest.mark.parametrize("precision", [*PRECISIONS, "bf16 immediate"])
def test_gradients_of_a_penalty_count_or_the_move_is_refused(precision: str) -> None:
    still, blocking, background = run_each(
        2, train_with_penalty, *((precision, way) for way in ("still", "blocking", "background"))
    )
    assert [rank["losses"] for rank in blocking] == [rank["losses"] for rank in still]
    assert [rank["losses"] for rank in background] == [rank["losses"] for rank in still]
    assert whole(blocking) == whole(background) == whole(still)
    moved = bool(blocking[0]["moved"])
    assert moved == (precision in ("fp32", "bf16"))
    assert moved or all("gradients" in message for message in blocking[0]["messages"])
