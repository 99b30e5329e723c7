"""The cache returns outputs of frozen layers, and only where the layers would compute the same again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.freezing.cache import ActivationCache
from ds_dynmo.models.freezing.fingerprint import CHUNK, fingerprint
from ds_dynmo.models.freezing.front import set_frozen_prefix
from ds_dynmo.models.seeding import generator_for
from tests.local.test_freezing import UNTIED, Stage

TOKENS = [torch.randint(20, (2, 4), generator=generator_for("tokens", n)) for n in range(4)]
PLENTY = 10**6


class Counted(Stage):
    """A stage that records which of its layers run."""

    def __init__(self, start: int = 0, stop: int = 6, *, interval: int = 0, limit_bytes: int = PLENTY) -> None:
        super().__init__(UNTIED, start, stop)
        self.activation_checkpoint_interval = interval
        self.ran: list[int] = []
        for number in range(start, stop):
            self.get_submodule(str(number)).register_forward_hook(lambda *_, number=number: self.ran.append(number))
        self.cache = ActivationCache(self, limit_bytes, first_block=1)  # type: ignore[arg-type]

    def batch(self, frozen: int, *inputs: torch.Tensor, check: bool = True) -> list[list[int]]:
        """Return which layers ran for each input, and check that outputs equal those without a cache."""
        set_frozen_prefix(self, frozen)  # type: ignore[arg-type]
        found = []
        self.cache.install(frozen, range(self._local_start, self._local_stop))
        for each in inputs:
            self.ran.clear()
            made = self(each)
            found.append(list(self.ran))
            made.sum().backward()
            plain = [getattr(function, "layer", function) for function in self.forward_funcs]
            wanted: Any = each
            for layer in plain:
                wanted = layer(wanted)
            assert not check or torch.equal(made, wanted)
        self.cache.remove()
        assert all(isinstance(function, nn.Module) for function in self.forward_funcs)
        return found


ALL = [0, 1, 2, 3, 4, 5]


def test_repeated_inputs_are_found() -> None:
    stage = Counted()
    assert stage.batch(3, TOKENS[0], TOKENS[1], TOKENS[0], TOKENS[0]) == [ALL, ALL, [3, 4, 5], [3, 4, 5]]
    assert stage.batch(3, TOKENS[1]) == [[3, 4, 5]]
    assert (stage.cache.lookups, stage.cache.hits) == (5, 3)
    assert stage.cache.num_bytes == 2 * (2 * 4 * 8 + 2 * 4 * 8 * 4)  # int64 tokens, fp32 of width 8


def test_inputs_that_differ_in_one_bit_are_told_apart() -> None:
    stage = Counted(2, 6)
    hidden = torch.randn(2, 4, 8, generator=generator_for("hidden"))
    other = hidden.clone()
    other[1, 3, 7] = torch.nextafter(hidden[1, 3, 7], torch.tensor(9.0))
    swapped = hidden.flip(0)
    stage.batch(4, hidden)
    assert stage.batch(4, other, swapped, hidden.view(1, 8, 8), hidden) == [[2, 3, 4, 5]] * 3 + [[4, 5]]


def test_colliding_fingerprints_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Counted()
    monkeypatch.setattr("ds_dynmo.models.freezing.cache.fingerprint", lambda tensor: torch.tensor(7))
    assert stage.batch(3, TOKENS[0], TOKENS[1], TOKENS[1], TOKENS[0]) == [ALL, ALL, [3, 4, 5], ALL]


def test_when_more_layers_freeze_a_pass_continues_from_the_cached_one() -> None:
    stage = Counted()
    stage.batch(2, TOKENS[0])
    assert stage.batch(4, TOKENS[0], TOKENS[0]) == [[2, 3, 4, 5], [4, 5]]
    assert stage.batch(3, TOKENS[0]) == [ALL]  # the cached output is of a layer behind the prefix now


def change(stage: Counted) -> None:
    stage.get_submodule("1").get_parameter("mlp.expand.weight").data[0, 0] += 1e-3  # does not change the version


def thaw(stage: Counted) -> None:
    stage.batch(0, TOKENS[3])


@pytest.mark.parametrize("happens", [change, thaw])
def test_changed_or_thawed_layers_drop_cached_outputs(happens: Callable[[Counted], None]) -> None:
    stage = Counted()
    stage.batch(3, TOKENS[0])
    happens(stage)
    assert stage.batch(3, TOKENS[0], TOKENS[0]) == [ALL, [3, 4, 5]]


def test_a_layer_that_arrives_in_front_invalidates_the_cache() -> None:
    stage = Counted(2, 6)
    hidden = torch.randn(2, 4, 8, generator=generator_for("hidden"))
    stage.batch(4, hidden)
    stage.add_module("1", Stage(UNTIED, 1, 2).get_submodule("1"))
    stage.forward_funcs.insert(0, stage.get_submodule("1"))
    stage._local_start = 1
    assert stage.batch(4, hidden) == [[2, 3, 4, 5]]


def test_a_layer_that_leaves_in_front_invalidates_the_cache() -> None:
    stage = Counted(2, 6)
    hidden = torch.randn(2, 4, 8, generator=generator_for("hidden"))
    stage.batch(5, hidden)
    del stage.forward_funcs[0]
    stage._local_start = 3
    assert stage.batch(5, hidden) == [[3, 4, 5]]


def test_outputs_of_a_layer_that_leaves_are_dropped() -> None:
    stage = Counted()
    stage.batch(4, TOKENS[0])
    stage.forward_funcs = stage.forward_funcs[:3]
    stage._local_stop = 3
    set_frozen_prefix(stage, 3)  # type: ignore[arg-type]
    stage.cache.install(3, range(stage._local_start, stage._local_stop))
    stage.ran.clear()
    stage(TOKENS[0])
    assert stage.ran == [0, 1, 2]


def test_the_least_recently_used_output_is_evicted_first() -> None:
    stage = Counted(limit_bytes=2 * 320)
    stage.batch(3, TOKENS[0], TOKENS[1], TOKENS[0], TOKENS[2])
    assert stage.cache.num_bytes == 640
    assert stage.batch(3, TOKENS[0], TOKENS[2], TOKENS[1]) == [[3, 4, 5], [3, 4, 5], ALL]
    assert stage.batch(3, torch.cat(TOKENS), TOKENS[1]) == [ALL, [3, 4, 5]]  # too large to cache: nothing is evicted
    small = Counted(limit_bytes=319)
    assert small.batch(3, TOKENS[0], TOKENS[0]) == [ALL, ALL] and small.cache.num_bytes == 0


def test_evaluation_runs_all_layers() -> None:
    stage = Counted()
    stage.batch(3, TOKENS[0])
    stage.eval()
    assert stage.batch(3, TOKENS[0], TOKENS[1]) == [ALL, ALL]
    stage.train()
    assert stage.batch(3, TOKENS[1]) == [ALL]


@pytest.mark.parametrize("draw", [lambda hidden: F.dropout(hidden, 0.5), lambda hidden: hidden * random.random()])
def test_a_layer_that_uses_random_numbers_is_not_skipped(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    stage = Counted()
    stage.get_submodule("2").register_forward_hook(lambda layer, inputs, output: draw(output))
    assert stage.batch(4, TOKENS[0], TOKENS[0], check=False) == [ALL, ALL]
    assert stage.batch(4, TOKENS[0], TOKENS[0], check=False) == [ALL, [2, 3, 4, 5]]  # cached up to that layer


def test_a_prefix_without_a_block_is_not_cached() -> None:
    stage = Counted()
    assert stage.batch(1, TOKENS[0], TOKENS[0]) == [ALL, ALL] and stage.cache.lookups == 0


@pytest.mark.parametrize(("interval", "skipped"), [(1, 3), (2, 2), (3, 3), (4, 0)])
def test_cached_layers_end_with_a_checkpointed_segment(interval: int, skipped: int) -> None:
    stage = Counted(interval=interval)
    assert stage.batch(3, TOKENS[0], TOKENS[0]) == [ALL, ALL[skipped:]]


def test_cached_outputs_may_be_changed_in_place() -> None:
    stage = Counted()
    stage.get_submodule("3").register_forward_pre_hook(lambda layer, given: given[0].add_(1.0))
    first, again, third = (stage.batch(3, TOKENS[0], check=False) for _ in range(3))
    kept = next(iter(stage.cache._kept.values())).outputs[0]
    assert first == [ALL] and again == third == [[3, 4, 5]]
    assert torch.equal(kept, nn.Sequential(*stage.forward_funcs[:3])(TOKENS[0]))


def test_a_skipped_layer_still_shows_its_weights() -> None:
    """An emergency checkpoint in the middle of a batch asks for its weights."""
    stage = Counted()
    stage.cache.install(3, range(stage._local_start, stage._local_stop))
    assert stage.forward_funcs[1].state_dict().keys() == stage.get_submodule("1").state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64])
def test_a_fingerprint_depends_on_positions_and_values(dtype: torch.dtype) -> None:
    size = 2 * CHUNK + 4
    tensor = (torch.arange(size) % 2).to(dtype)
    prints = {fingerprint(tensor).item(), fingerprint(tensor.flip(0)).item()}
    for places in [(0, 1), (0, CHUNK + 1), (CHUNK, size - 1), (1, 2 * CHUNK)]:
        other = tensor.clone()
        other[list(places)] = tensor[list(reversed(places))]
        prints.add(fingerprint(other).item())
    assert len(prints) == 6 and fingerprint(tensor.clone()).item() in prints
