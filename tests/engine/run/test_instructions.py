"""Wrappers around instructions, and engine classes that ours is built upon, without a process group."""

from __future__ import annotations

from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

import ds_dynmo
from ds_dynmo.engine.deepspeed.engine_class import engine_class
from ds_dynmo.engine.deepspeed.instruction_map import AT_THE_END, checked_instructions
from ds_dynmo.errors import ConfigError

STOCK = PipelineEngine._INSTRUCTION_MAP
REMEDY = r'"schedule": {"kind": "zero_bubble"}; .* call engine.before_step'


class OwnKind(schedule.PipeInstruction):  # type: ignore[misc]
    """A kind of instruction that DeepSpeed does not have."""


def own(engine: Any, **where: int) -> None: ...


def test_only_instructions_at_the_end_of_a_batch_may_be_the_users() -> None:
    """A wrapper under DeepSpeed's name counts as the user's."""
    for kind, stock in [*STOCK.items(), (OwnKind, own)]:
        for instruction in (own, wraps(stock)(lambda *args, **kwargs: None)):
            engine = SimpleNamespace(_INSTRUCTION_MAP={**STOCK, kind: instruction})
            if kind in AT_THE_END:
                assert checked_instructions(engine)[kind] is instruction
                continue
            with pytest.raises(
                ConfigError,
                match=rf"_INSTRUCTION_MAP\[{kind.__name__}\] = .*{REMEDY}",
            ):
                checked_instructions(engine)
    assert checked_instructions(PipelineEngine) is STOCK


# -- engine classes -----------------------------------------------------------------------------------


class Theirs(PipelineEngine):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return super().save_checkpoint(*args, **kwargs)

    def train_batch(self) -> None:  # type: ignore[override]
        pass


class Deciding(PipelineEngine):
    def rebalance(self) -> None:
        pass

    rebalancer = rebalance


def test_an_engine_class_is_built_once_and_keeps_its_name() -> None:
    built = engine_class(Theirs).func
    assert built is engine_class(Theirs).func
    assert built.__mro__[:2] == (built, ds_dynmo.DynMoPipelineEngine)
    order = built.__mro__
    assert order.index(ds_dynmo.DynMoPipelineEngine) < order.index(Theirs) < order.index(PipelineEngine)
    assert (built.__name__, built.__module__) == ("DynMoTheirs", __name__)
    assert built._INSTRUCTION_MAP is PipelineEngine._INSTRUCTION_MAP
    assert built.save_checkpoint is Theirs.save_checkpoint
    assert built.load_checkpoint is ds_dynmo.DynMoPipelineEngine.load_checkpoint
    assert engine_class(PipelineEngine).func is ds_dynmo.DynMoPipelineEngine
    assert engine_class(built).func is built
    assert engine_class(partial(Theirs, weight=2)).keywords == {"weight": 2}


def test_wrong_engine_classes_are_refused_before_anything_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, message in (
        (dict, "engine_class = <class 'dict'>: has to be a subclass of deepspeed.*PipelineEngine"),
        ("Theirs", "engine_class = 'Theirs': has to be a subclass"),
        (partial(Theirs, 1), "has to be a subclass .* with keyword arguments"),
        (Deciding, "engine_class = Deciding: it defines rebalance, rebalancer, which ds_dynmo's engine uses"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_class(given)
            pytest.fail(f"{given} is not refused")
    monkeypatch.setattr("ds_dynmo.engine.validation.check_module", lambda model: None)
    monkeypatch.setattr("deepspeed.initialize", lambda **_: pytest.fail("an engine is built"))
    with pytest.raises(ConfigError, match="engine_class = 3"):
        ds_dynmo.initialize(model=None, config={}, engine_class=3)


# -- schedules ----------------------------------------------------------------------------------------


def loads_first(self: Any) -> Any:
    """Order DeepSpeed's own instructions otherwise, as diffusion-pipe does."""
    for commands in TRAIN_STEPS(self):
        yield sorted(commands, key=lambda command: not isinstance(command, schedule.LoadMicroBatch))


class ZeroBubble(schedule.PipeSchedule):  # type: ignore[misc]
    """A schedule in the place of DeepSpeed's, as Megatron-DeepSpeed's --enable-zbh1-pipeline has one."""


TRAIN_STEPS = schedule.TrainSchedule.steps


@pytest.mark.parametrize(
    ("place", "attribute", "own"),
    [
        (schedule.TrainSchedule, "steps", loads_first),
        (schedule.InferenceSchedule, "num_pipe_buffers", loads_first),
        (schedule.PipeSchedule, "_buffer_idx", loads_first),
        (schedule, "TrainSchedule", ZeroBubble),
    ],
)
def test_a_schedule_of_the_users_is_refused_before_anything_is_created(
    monkeypatch: pytest.MonkeyPatch, place: Any, attribute: str, own: Any
) -> None:
    for name in ("check_module", "check_partitioned_activations", "check_initial_partition", "check_shapes"):
        monkeypatch.setattr(f"ds_dynmo.engine.validation.{name}", lambda *_: None)
    for name in ("is_dual_pipe_v", "check_uses", "layer_specs", "num_stages_of"):
        monkeypatch.setattr(f"ds_dynmo.engine.initialization.{name}", lambda *_: None)
    monkeypatch.setattr("deepspeed.initialize", lambda **_: pytest.fail("an engine is built"))
    monkeypatch.setattr(place, attribute, own)
    message = rf"{attribute} = {__name__}.{own.__qualname__}: batches .*remove the patch; .*{REMEDY}"
    with pytest.raises(ConfigError, match=message):
        ds_dynmo.initialize(model=None, config={"train_batch_size": 1, "dynmo": {}})
