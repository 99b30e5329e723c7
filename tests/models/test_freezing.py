import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from torch import nn

from ds_dynmo.config import parse_section
from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.state.clipping import gradient_magnitudes
from ds_dynmo.errors import ConfigError
from ds_dynmo.models.case import RunSizes
from ds_dynmo.models.freezing.config import FreezingConfig
from ds_dynmo.models.freezing.freezing import (
    Freezing,
    FreezingController,
    auto_freeze,
    gradient_change,
    scheduled_blocks,
)
from ds_dynmo.models.freezing.frozen_prefix import set_frozen_prefix
from ds_dynmo.models.gpt import gpt_layers, language_model_loss
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.layer_numbers import block_numbers, local_layers

UNTIED = GPTConfig(vocab_size=20, sequence_length=4, layers=3, hidden_size=8, heads=2, tied_embedding=False)
TIED = UNTIED.model_copy(update={"tied_embedding": True})


class Stage(nn.Module):
    """The attributes of a PipelineModule for layers ``start`` to ``stop``, without processes."""

    def __init__(self, config: GPTConfig, start: int, stop: int) -> None:
        super().__init__()
        self._layer_specs = gpt_layers(config)
        self._local_start, self._local_stop = start, stop
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Any] = []
        for layer in range(start, stop):
            spec = self._layer_specs[layer]
            if not isinstance(spec, TiedLayerSpec):
                self.add_module(str(layer), spec.build())
                self.forward_funcs.append(self._modules[str(layer)])
                continue
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = spec.build()
            module = self.tied_modules[spec.key]
            self.forward_funcs.append(partial(spec.forward_fn, module) if spec.forward_fn else module)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for function in self.forward_funcs:
            states = function(states)
        return states

    def trains(self) -> dict[int, bool]:
        return {number: any(p.requires_grad for p in layer.parameters()) for number, layer in local_layers(self)}


def controller(block: dict[str, Any], *, blocks: range = range(1, 4), total_steps: int = 100) -> FreezingController:
    config = parse_section(FreezingConfig, block, "freezing")
    return FreezingController(config, RunSizes(total_steps=total_steps, num_layers=blocks.stop + 2, blocks=blocks))


def magnitudes(stage: Stage) -> torch.Tensor:
    alone = RankCoordinates()
    return gradient_magnitudes(
        dict(local_layers(stage)), len(stage._layer_specs), alone, torch.device("cpu"), lambda p: p.grad
    )


def alone(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clone()


# -- decisions ---------------------------------------------------------------------------------------------


def test_a_schedule_counts_in_fractions_of_the_steps() -> None:
    schedule = [(0.2, 2), (0.4, 4), (0.6, 6)]
    at = {step: scheduled_blocks(schedule, step, total_steps=150) for step in (0, 29, 30, 59, 60, 89, 90, 149)}
    assert at == {0: 0, 29: 0, 30: 2, 59: 2, 60: 4, 89: 4, 90: 6, 149: 6}
    assert scheduled_blocks([(0.7, 1)], 7, total_steps=10) == 1  # 0.7 * 10 is more than 7 in floating point


def test_layers_before_the_blocks_are_frozen_with_the_first_block() -> None:
    """A schedule may unfreeze."""
    frozen = controller({"schedule": [[0.0, 2], [0.5, 0], [0.75, 1]]}, total_steps=4)
    assert [frozen.frozen_prefix(step) for step in range(4)] == [3, 3, 0, 2]
    decides = controller({"schedule": [[0.5, 1]]}, blocks=range(2, 5), total_steps=2)  # GPT-2 embeds positions, too
    assert [decides.frozen_prefix(step) for step in range(2)] == [0, 3]
    assert block_numbers(gpt_layers(UNTIED)) == range(1, 4)


def test_the_change_of_a_gradient() -> None:
    assert gradient_change(4.0, 3.0) == 0.25
    assert gradient_change(4.0, 6.0) == 0.5
    assert gradient_change(0.0, 1.0) == gradient_change(1.0, math.nan) == gradient_change(math.inf, 1.0) == math.inf


def test_auto_freeze_by_hand() -> None:
    for current, frozen_before, frozen_after in (
        ([9.9, 9.5, 8.0, 5.0, 9.8], 0, 1),  # eta .01 .05 .2 .5 .02, median .05
        ([9.9, 9.8, 8.0, 5.0, 6.0], 0, 2),  # eta .01 .02 .2 .5 .4, median .2: the third equals the median
        ([5.0, 9.9, 9.9, 9.9, 9.9], 0, 0),  # the first changes most
        ([9.0, 9.0, 9.0, 9.0, 9.0], 0, 0),  # all equal the median
        ([0.0, 0.0, 9.9, 9.8, 5.0], 2, 3),  # of the active ones eta is .01 .02 .5, median .02
        ([0.0, 0.0, 0.0, 9.9, 5.0], 3, 4),  # eta .01 .5, median .255
        ([0.0, 0.0, 0.0, 0.0, 10.0], 4, 4),  # the last one is never frozen
        ([math.nan] * 5, 0, 0),
    ):
        assert auto_freeze([10.0] * 5, current, frozen_before) == frozen_after, current


def test_automatic_freezing_compares_intervals() -> None:
    automatic = controller({"automatic": {"interval": 0.1, "start": 0.3}}, blocks=range(1, 3), total_steps=20)
    stage = Stage(UNTIED.model_copy(update={"layers": 2}), 0, 5)
    frozen = []
    for step in range(8):
        for number, layer in local_layers(stage):
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 if number == 1 else 2.0**step)
        frozen.append(automatic.frozen_prefix(step))
        automatic.add_gradients(magnitudes(stage))
        automatic.evaluate(step + 1, alone)
    assert frozen == [0, 0, 0, 0, 0, 0, 2, 2]  # embedding and block 0, whose gradients do not change


def test_gradients_of_all_stages_decide() -> None:
    whole, front, back = (controller({"automatic": {"interval": 0.5, "start": 0.0}}, total_steps=2) for _ in range(3))
    stages = {whole: Stage(UNTIED, 0, 6), front: Stage(UNTIED, 0, 2), back: Stage(UNTIED, 2, 6)}
    for step in range(2):
        for each, stage in stages.items():
            for number, layer in local_layers(stage):
                for parameter in layer.parameters():
                    parameter.grad = torch.full_like(parameter, -1.0 - step * number)
            each.add_gradients(magnitudes(stage))
        total = front._sums + back._sums
        assert torch.equal(total, whole._sums)
        for each in stages:
            each.evaluate(step + 1, lambda _: total)  # noqa: B023
    assert {each.frozen_prefix(2) for each in stages} == {2}  # eta 1, 2, 3


def test_automatic_freezing_fails_without_gradients() -> None:
    automatic = controller({"automatic": {}})
    automatic.add_gradients(torch.zeros_like(automatic._sums))
    with pytest.raises(RuntimeError, match="no gradient in blocks 0 to 2 up to step 10"):
        automatic.evaluate(10, alone)


def test_batches_whose_step_was_skipped_count_in_no_interval() -> None:
    """As fp16 overflows at first: an interval may have no batch, and one with fewer has the same mean."""
    automatic = controller({"automatic": {"interval": 0.2, "start": 0.0}}, total_steps=20)
    for step in range(1, 13):
        changing = torch.tensor([step, 1.0, step, step, 1.0, 1.0], dtype=torch.float64)
        if step not in (1, 2, 3, 4, 7):
            automatic.add_gradients(changing)
        automatic.evaluate(step, alone)
        assert (automatic._previous is None) == (step < 8)
    assert automatic._previous == pytest.approx([1.0, (9 + 10 + 11 + 12) / 4, (9 + 10 + 11 + 12) / 4])
    assert automatic._frozen_blocks == 1, "the first block did not change"


def test_a_resumed_controller_decides_as_the_first_one() -> None:
    block = {"automatic": {"interval": 0.2, "start": 0.0}}
    first, stage = controller(block, total_steps=10), Stage(UNTIED, 0, 6)

    def step(each: FreezingController, number: int) -> None:
        for layer_number, layer in local_layers(stage):
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + number * layer_number)
        each.add_gradients(magnitudes(stage))
        each.evaluate(number + 1, alone)

    for number in range(3):
        step(first, number)
    second = controller(block, total_steps=10)
    second.load_state_dict(first.state_dict(alone), first_rank=True)
    other = controller(block, total_steps=10)
    other.load_state_dict(first.state_dict(alone), first_rank=False)
    assert not other._sums.any()
    for each in (first, second):
        step(each, 3)
    assert second.state_dict(alone) == first.state_dict(alone)
    assert second.frozen_prefix(4) == first.frozen_prefix(4) == 2


# -- application -------------------------------------------------------------------------------------------


def test_each_stage_freezes_and_thaws_its_part_of_the_prefix() -> None:
    front, back = Stage(UNTIED, 0, 3), Stage(UNTIED, 3, 6)
    for stage in (front, back):
        set_frozen_prefix(stage, 4)
    assert front.trains() == {0: False, 1: False, 2: False}
    assert back.trains() == {3: False, 4: True, 5: True}
    for stage in (front, back):
        set_frozen_prefix(stage, 2)
    assert front.trains() == {0: False, 1: False, 2: True}
    assert all(back.trains().values())


def test_frozen_layers_lose_their_gradients_and_keep_their_weights() -> None:
    model = Stage(UNTIED, 0, 6)
    text = torch.arange(10).view(2, 5)
    language_model_loss(model(text[:, :-1]), text[:, 1:]).backward()
    set_frozen_prefix(model, 3)
    assert all(p.grad is None for number, layer in local_layers(model) if number < 3 for p in layer.parameters())
    assert all(p.grad is not None for number, layer in local_layers(model) if number >= 3 for p in layer.parameters())
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    language_model_loss(model(text[:, :-1]), text[:, 1:]).backward()
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old) != parameter.requires_grad


def test_a_tied_embedding_is_frozen_in_the_head_too() -> None:
    stages = [Stage(TIED, 0, 3), Stage(TIED, 3, 6), Stage(TIED, 0, 6)]
    for stage in stages:
        set_frozen_prefix(stage, 2)
    assert stages[0].trains() == {0: False, 1: False, 2: True}
    assert stages[1].trains() == {3: True, 4: True, 5: False}
    assert stages[2].trains() == {0: False, 1: False, 2: True, 3: True, 4: True, 5: False}
    for stage in stages:
        set_frozen_prefix(stage, 0)
        assert all(stage.trains().values())


def test_local_layers_keep_their_numbers_in_the_model() -> None:
    stage = Stage(TIED, 3, 6)
    stage._layer_specs[4] = SimpleNamespace()  # a plain function in the list
    del stage._modules["4"]
    assert [number for number, _ in local_layers(stage)] == [3, 5]
    assert dict(local_layers(stage))[5] is stage.tied_modules["embedding"]


def test_a_model_without_blocks_is_refused() -> None:
    embedding, *_, norm, head = gpt_layers(UNTIED)
    with pytest.raises(ConfigError, match="none of the model's 3 layers is a block: no class has is_block = True"):
        block_numbers([embedding, norm, head])


def test_a_batch_whose_step_was_skipped_does_not_count() -> None:
    callbacks: list[Any] = []
    magnitudes = torch.tensor([0.0, float("inf"), 1.0, 2.0], dtype=torch.float64)
    engine = SimpleNamespace(
        before_step=callbacks.append,
        before_release=lambda callback: None,
        skipped_steps=0,
        gradient_magnitudes=lambda: magnitudes,
        sum_over_world=lambda sums: sums,
    )
    config = parse_section(FreezingConfig, {"automatic": {"interval": 1.0}}, "freezing")
    case = Freezing(config, engine, RunSizes(total_steps=10, num_layers=4, blocks=range(1, 4)))
    sums = []
    for step in range(3):
        callbacks[0]()
        engine.skipped_steps += step == 0
        case.after_batch(step + 1)
        sums.append(case.state_dict()["sums"])
        magnitudes = torch.arange(4, dtype=torch.float64)
    assert sums == [[0, 0, 0, 0], [0, 1, 2, 3], [0, 2, 4, 6]]


@pytest.mark.parametrize(("rank", "kept"), [(0, [1, 2, 3, 4]), (1, [0, 0, 0, 0])])
def test_the_first_rank_takes_over_what_others_summed_before_they_are_released(rank: int, kept: list[int]) -> None:
    before_step: list[Any] = []
    before_release: list[Any] = []
    engine = SimpleNamespace(
        before_step=before_step.append,
        before_release=before_release.append,
        global_rank=rank,
        skipped_steps=0,
        gradient_magnitudes=lambda: torch.arange(4, dtype=torch.float64),
        sum_over_world=lambda sums: torch.arange(1, 5, dtype=torch.float64),
    )
    config = parse_section(FreezingConfig, {"automatic": {"interval": 1.0}}, "freezing")
    case = Freezing(config, engine, RunSizes(total_steps=10, num_layers=4, blocks=range(1, 4)))
    before_step[0]()
    before_release[0]()
    engine.sum_over_world = lambda sums: sums
    assert case.state_dict()["sums"] == kept
