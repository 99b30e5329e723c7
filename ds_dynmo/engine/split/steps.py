"""A pipeline schedule as DeepSpeed's instructions of one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as deepspeeds

from ds_dynmo.config.dynmo import ScheduleConfig
from ds_dynmo.engine.deepspeed.instruction_map import check_steps
from ds_dynmo.engine.split.messages import receives, sends
from ds_dynmo.errors import ConfigError
from ds_dynmo.schedules import (
    Action,
    Kind,
    PassCosts,
    Schedule,
    one_f_one_b,
    schedule_for_equal_costs,
)

REPLACED = (
    "train_batch or _exec_schedule was replaced on the engine by a function that does not call the engine's own "
    "_exec_schedule: instructions ran without what moving layers needs. Call it, or override it in a class given as "
    "engine_class"
)
SPLIT_IN_PROFILES = 2  # backward passes per chunk that a profile splits if the schedule splits none


class InputGradientPass(deepspeeds.BufferOpInstruction):
    """The first part of a backward pass: the gradient of the input, and all gradients that cannot be deferred."""


class WeightGradientPass(deepspeeds.BufferOpInstruction):
    """The second part of a backward pass: the deferred gradients."""


_BACKWARD = {
    Kind.BACKWARD: deepspeeds.BackwardPass,
    Kind.INPUT_GRADIENT: InputGradientPass,
}


class ScheduleSteps(deepspeeds.PipeSchedule):
    """One batch of a stage. A step is an action, with its messages.

    A micro-batch gets the lowest free buffer; the last buffer is for weight gradients.

    Attributes:
        costs: of the search for the schedule; None: nothing has been measured.
        begun: whether the engine's ``_exec_schedule`` runs it.
    """

    def __init__(self, schedule: Schedule, stage: int, costs: PassCosts | None = None) -> None:
        super().__init__(schedule.micro_batches, schedule.num_stages, stage)
        self.schedule, self.costs = schedule, costs
        self._order = schedule.orders[stage]
        self._buffers = _buffers(self._order)
        self.begun = False

    def __iter__(self) -> Any:
        """Start a batch; only the engine's ``_exec_schedule`` may, which prepares what these instructions need."""
        if not self.begun:
            raise ConfigError(REPLACED)
        return super().__iter__()

    def num_pipe_buffers(self) -> int:
        """Return the largest number of micro-batches in flight, plus one."""
        return max(self._buffers.values()) + 2

    def steps(self) -> Iterator[list[deepspeeds.PipeInstruction]]:
        """Yield the instructions of each action, and those of the optimizer at the end."""
        for action in self._order:
            yield list(self._instructions(action))
        yield [deepspeeds.ReduceTiedGrads(), deepspeeds.ReduceGrads(), deepspeeds.OptimizerStep()]

    def _instructions(self, action: Action) -> Iterator[deepspeeds.PipeInstruction]:
        kind, chunk, micro_batch = action
        if kind == Kind.WEIGHT_GRADIENT:
            yield WeightGradientPass(buffer_id=self.num_pipe_buffers() - 1)
            return
        buffer = self._buffers[chunk, micro_batch]
        received, sent = receives(action, self.schedule), sends(action, self.schedule)
        if kind == Kind.FORWARD:
            if received is not None:
                yield deepspeeds.RecvActivation(buffer_id=buffer)
            if chunk in (0, self.schedule.num_chunks - 1):
                yield deepspeeds.LoadMicroBatch(buffer_id=buffer)
            yield deepspeeds.ForwardPass(buffer_id=buffer)
            if sent is not None:
                yield deepspeeds.SendActivation(buffer_id=buffer)
            return
        if received is not None:
            yield deepspeeds.RecvGrad(buffer_id=buffer)
        yield _BACKWARD[kind](buffer_id=buffer)
        if sent is not None:
            yield deepspeeds.SendGrad(buffer_id=buffer)


def with_some_split(schedule: Schedule, count: int = SPLIT_IN_PROFILES) -> Schedule:
    """Split the last ``count`` backward passes of every chunk without splits; the parts follow each other directly.

    So a profile measures both parts even if the schedule does not use them.
    """
    first = schedule.micro_batches - count
    in_two = {action.chunk for order in schedule.orders for action in order if action.kind == Kind.INPUT_GRADIENT}
    orders = tuple(
        tuple(
            part
            for action in order
            for part in (_parts(action) if action.chunk not in in_two and action.micro_batch >= first else (action,))
        )
        for order in schedule.orders
    )
    return schedule if orders == schedule.orders else replace(schedule, orders=orders)


def _parts(action: Action) -> tuple[Action, ...]:
    if action.kind != Kind.BACKWARD:
        return (action,)
    return action._replace(kind=Kind.INPUT_GRADIENT), action._replace(kind=Kind.WEIGHT_GRADIENT)


def _buffers(order: tuple[Action, ...]) -> dict[tuple[int, int], int]:
    """Assign a buffer to each chunk and micro-batch, from its forward pass to its input gradient."""
    buffers: dict[tuple[int, int], int] = {}
    taken: set[int] = set()
    for kind, chunk, micro_batch in order:
        key = (chunk, micro_batch)
        if kind == Kind.FORWARD:
            buffers[key] = next(number for number in range(len(order)) if number not in taken)
            taken.add(buffers[key])
        elif kind in _BACKWARD:
            taken.discard(buffers[key])
    return buffers


class ScheduleInForce:
    """The schedule in force: DeepSpeed's 1F1B, run by DeepSpeed's code, or a schedule of ds_dynmo.

    Attributes:
        found: the schedule of the latest decision; None: there was no decision, or DeepSpeed's 1F1B is as short.
        over_bound: of ``found``, as in a :class:`FoundSchedule`; 0.0: there is none.
        running: the steps of the running batch; None: they are DeepSpeed's.
        is_profiled: returns whether the batch that starts is measured. Then each chunk splits some backward passes.
        back_to_back: whether schedules assume that batches overlap between stages.

    Args:
        use_1f1b_until_decided: use 1F1B's order, not that for equal costs, until a decision, because memory is limited
            and the bytes of passes are not yet known.
        stages_synchronise_per_batch: whether every stage waits for the others at the end of a batch.
    """

    def __init__(
        self,
        config: ScheduleConfig | None = None,
        *,
        use_1f1b_until_decided: bool = False,
        stages_synchronise_per_batch: bool = True,
    ) -> None:
        self._config, self._use_1f1b_until_decided = config or ScheduleConfig(), use_1f1b_until_decided
        # With 1F1B's memory no stage can start earlier.
        self.back_to_back = self._config.memory > 1 and not stages_synchronise_per_batch
        self._schedule_before_decision: Schedule | None = None
        self._decided = False
        self.found: Schedule | None = None
        self._found_for: PassCosts | None = None
        self.over_bound = 0.0
        self.running: ScheduleSteps | None = None
        self._chosen: Any = None  # for the next batch
        self._ran_others = False  # than those chosen
        self.is_profiled: Callable[[], bool] = lambda: False

    @property
    def may_choose_schedule(self) -> bool:
        """Whether a schedule of ds_dynmo may be in force: not if a user's ``train_batch`` runs DeepSpeed's."""
        return self._config.kind != "1f1b" and not self._ran_others

    def decide(self, found: Schedule | None, costs: PassCosts | None = None, *, over_bound: float = 0.0) -> None:
        """Train by ``found``, which was searched under ``costs``, from the next batch on; None: by DeepSpeed's 1F1B.

        Args:
            over_bound: as in a :class:`FoundSchedule`.
        """
        self.found, self._found_for, self.over_bound, self._decided = found, costs, over_bound, True

    def forget(self) -> None:
        """Train as before the first decision until the next one: new ranks do not know the latest."""
        self.found, self._found_for, self.over_bound, self._decided = None, None, 0.0, False
        self._ran_others = False  # until the next batch

    def steps(self, default: Any) -> Any:
        """Choose the steps of the next batch.

        Args:
            default: DeepSpeed's steps.

        Raises:
            ConfigError: they are the user's.
        """
        check_steps(default, deepspeeds.TrainSchedule)
        self._chosen = default
        if self._config.kind == "1f1b" or default.stages == 1:
            return default
        schedule = self.schedule_for(default.stages, default.micro_batches)
        if schedule is None:
            return default
        costs = self._found_for if schedule is self.found else None
        if self.is_profiled():
            schedule = with_some_split(schedule)
        self._chosen = ScheduleSteps(schedule, default.stage_id, costs)
        return self._chosen

    def begin(self, steps: Any) -> None:
        """Record the steps that the engine is about to run.

        Raises:
            ConfigError: they are neither DeepSpeed's nor ds_dynmo's.
        """
        training = torch.is_grad_enabled()
        if not training or steps is not self._chosen:
            check_steps(steps, deepspeeds.TrainSchedule if training else deepspeeds.InferenceSchedule)
        self.running = steps if isinstance(steps, ScheduleSteps) else None
        if self.running is not None:
            self.running.begun = True
        if training:
            self._ran_others = steps is not self._chosen

    def schedule_for(self, num_stages: int, micro_batches: int) -> Schedule | None:
        """Return the schedule of the next batch of this shape; None: DeepSpeed's 1F1B."""
        shape = num_stages, micro_batches
        if self._decided and (self.found is None or _shape(self.found) == shape):
            return self.found
        if self._schedule_before_decision is None or _shape(self._schedule_before_decision) != shape:
            self._schedule_before_decision = (
                one_f_one_b(*shape)
                if self._use_1f1b_until_decided
                else schedule_for_equal_costs(*shape, self._config.memory, back_to_back=self.back_to_back)
            )
        return self._schedule_before_decision


def _shape(schedule: Schedule) -> tuple[int, int]:
    return schedule.num_stages, schedule.micro_batches
