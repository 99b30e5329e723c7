"""Batches under a schedule of ds_dynmo: DeepSpeed's instructions, messages that do not wait, and split passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from deepspeed.runtime.pipe import schedule as deepspeeds

from ds_dynmo.engine.comm.channels import Channels, LinkPlan, MessageKind
from ds_dynmo.engine.deepspeed import buffers
from ds_dynmo.engine.deepspeed.backward import backward_from
from ds_dynmo.engine.deepspeed.instruction_map import Instruction
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.deepspeed.point_to_point import messages_through, shapes_are_known
from ds_dynmo.engine.split.messages import link_plan
from ds_dynmo.engine.split.steps import InputGradientPass, ScheduleSteps, WeightGradientPass
from ds_dynmo.engine.split.weight_gradients import WeightGradients
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.schedules import Kind, PassCosts, Schedule

_logger = logging.getLogger("DynMo")
_MESSAGES = {  # by kind of instruction: the kind of message, and the engine's attribute with the neighbour
    deepspeeds.SendActivation: (MessageKind.ACTIVATION, "next_stage"),
    deepspeeds.RecvActivation: (MessageKind.ACTIVATION, "prev_stage"),
    deepspeeds.SendGrad: (MessageKind.GRADIENT, "prev_stage"),
    deepspeeds.RecvGrad: (MessageKind.GRADIENT, "next_stage"),
}
_SENDS = (deepspeeds.SendActivation, deepspeeds.SendGrad)

Through = Callable[[MessageKind, int], AbstractContextManager[None]]  # the context of a message with a stage


class ScheduledBatches:
    """Runs batches by schedules of ds_dynmo."""

    def __init__(self, engine: DeepSpeedPipeline, stage: StageContext) -> None:
        self._engine, self._stage = engine, stage
        self._channels = Channels(stage.comm.rank_of, lambda: stage.comm.neighbour_links().post)
        self.gradients = WeightGradients()
        self._splits: list[bool] = []  # per micro-batch, whether its backward pass runs in two parts
        self._forward_passes = 0
        self._losses: dict[int, Any] = {}  # on the last stage, by buffer
        self._logged = False
        self._planned: tuple[Schedule | None, PassCosts | None, int] = (None, None, -1)  # latest schedule, costs, stage
        self._plan: LinkPlan = {}

    @contextmanager
    def batch(self, steps: ScheduleSteps) -> Iterator[None]:
        """Run a batch by ``steps``; passes that are split over tensor-parallel slices run in one part."""
        engine = self._engine
        order = steps.schedule.orders[self._stage.comm.here.stage]
        splits = not engine.is_pipe_partitioned
        backward = [action.kind for action in order if action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)]
        self._splits = [splits and kind == Kind.INPUT_GRADIENT for kind in backward]
        self._forward_passes = 0
        self._losses = {}
        with (
            self._channels.batch(self._message_plan(steps), alike=shapes_are_known(engine)),
            messages_through(self._channels),
            self.gradients.splitting(self._modules(), splits=any(self._splits)),
        ):
            yield
            if any(self._splits) and not self._logged:
                self._log_layers_without_deferred_gradients()

    def _log_layers_without_deferred_gradients(self) -> None:
        """Log, once, the layers of this stage that have weight matrices but defer no gradient."""
        self._logged = True
        here = self._stage.comm.here
        if not self._stage.config.log or here.replica or here.tp_rank:
            return
        without = [
            f"{index} ({type(layer).__name__})"
            for index, layer in self._stage.layers.modules().items()
            if index > 0 and self._defers_nothing(layer)  # layer 0 sends no gradient back
        ]
        if without:
            _logger.info(
                f"schedule: backward passes of layer {', '.join(without)} always run in one: "
                "see docs/schedules.md, split backward passes"
            )

    def _defers_nothing(self, layer: Any) -> bool:
        weights = [weight for weight in layer.parameters() if weight.requires_grad and weight.dim() > 1]
        return bool(weights) and not any(weight in self.gradients.hidden for weight in weights)

    def _message_plan(self, steps: ScheduleSteps) -> LinkPlan:
        """Return the order of messages of a schedule on this stage, computed once."""
        schedule, costs, stage = self._planned
        present = self._stage.comm.here.stage  # a re-packing may change it
        if schedule is not steps.schedule or costs != steps.costs or stage != present:
            self._planned = steps.schedule, steps.costs, present
            self._plan = link_plan(steps.schedule, present, steps.costs)
        return self._plan

    def _modules(self) -> list[Any]:
        return [module for layer in self._stage.layers.modules().values() for module in layer.modules()]

    def forget_shapes(self) -> None:
        """Discard recorded message shapes."""
        self._channels.forget_shapes()

    def compose(self, composed: dict[type, Instruction]) -> dict[type, Instruction]:
        """Wrap ``composed`` for the steps of a schedule of ds_dynmo."""
        wrapped = dict(composed)
        backward = composed[deepspeeds.BackwardPass]
        wrapped[deepspeeds.ForwardPass] = partial(self._forward, composed[deepspeeds.ForwardPass])
        wrapped[deepspeeds.BackwardPass] = partial(self._backward, backward)
        wrapped[InputGradientPass] = partial(self._first_part, backward)
        wrapped[WeightGradientPass] = self._second_part
        for kind, (message_kind, neighbour) in _MESSAGES.items():
            through = self._channels.sending if kind in _SENDS else self._channels.receiving
            wrapped[kind] = partial(_message, composed[kind], through, message_kind, neighbour)
        return wrapped

    # -- passes ---------------------------------------------------------------------------------------

    def _forward(self, forward: Instruction, engine: Any, buffer_id: int) -> None:
        split = self._splits[self._forward_passes]
        self._forward_passes += 1
        with self.gradients.forward_pass(split=split):
            forward(engine, buffer_id=buffer_id)
        if engine.is_last_stage():
            self._losses[buffer_id] = buffers.loss_of(engine)

    def _backward(self, backward: Instruction, engine: Any, buffer_id: int) -> None:
        if engine.is_last_stage():
            buffers.set_loss(engine, self._losses.pop(buffer_id))
        backward(engine, buffer_id=buffer_id)
        buffers.free_outputs(engine, buffer_id)

    def _first_part(self, backward: Instruction, engine: Any, buffer_id: int) -> None:
        with self.gradients.first_part() if any(self._splits) else nullcontext():
            self._backward(backward, engine, buffer_id)

    def _second_part(self, engine: Any, buffer_id: int) -> None:
        deferred = self.gradients.second_part() if any(self._splits) else None
        if deferred:
            backward_from(engine, deferred.roots())


def _message(
    instruction: Instruction, through: Through, message_kind: MessageKind, neighbour: str, engine: Any, buffer_id: int
) -> None:
    with through(message_kind, getattr(engine, neighbour)):
        instruction(engine, buffer_id=buffer_id)
