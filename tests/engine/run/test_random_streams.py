"""The random streams of layers, without an engine: ``run_batch`` runs instructions as DeepSpeed does."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from ds_dynmo.engine.deepspeed.module import runs_shown
from ds_dynmo.engine.run import generators
from ds_dynmo.engine.run.random_streams import (
    LayerStreams,
    NumpyGenerator,
    PythonGenerators,
    TorchGenerators,
    stream_seed,
)
from ds_dynmo.engine.run.rng_trackers import find_trackers

Pass = tuple[str, int]  # "F" or "B", and the pipeline buffer


def draw() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), numpy.random.random_sample()


def module_like(layers: Sequence[Any]) -> Any:
    return SimpleNamespace(forward_funcs=list(layers), _local_start=0, _local_stop=len(layers))


@contextmanager
def drawing(
    streams: LayerStreams, module: Any, *, start: int = 0, step: int = 0, training: bool = True
) -> Iterator[None]:
    """Run a batch inside, whose layers are numbered from ``start``."""
    numbers = range(start, start + len(module.forward_funcs))
    streams.begin({number: number for number in numbers}, step=step, training=training)
    with runs_shown(module, [numbers], [streams.wrap]) as show:
        show(0)
        yield


def run_batch(
    streams: LayerStreams,
    passes: Sequence[Pass] = (("F", 0),),
    *,
    step: int = 3,
    start: int = 0,
    layers: Sequence[Callable[[Any], Any]] = (lambda drawn: [*drawn, draw()],),
    training: bool = True,
) -> list[list[Any]]:
    """Return the random numbers of a stage's layers in each pass; a backward pass recomputes them."""
    module, found = module_like(layers), []
    with drawing(streams, module, start=start, step=step, training=training):
        for what, micro_batch in passes:
            with streams.running(micro_batch, recomputes=what == "B"):
                drawn: list[Any] = []
                for layer in module.forward_funcs:
                    drawn = layer(drawn)
                found.append(drawn)
    assert module.forward_funcs == list(layers)
    return found


def test_each_part_of_the_key_changes_all_generators() -> None:
    here = run_batch(LayerStreams(7, 0))[0][0]
    others = {
        "seed": run_batch(LayerStreams(8, 0))[0][0],
        "replica": run_batch(LayerStreams(7, 1))[0][0],
        "step": run_batch(LayerStreams(7, 0), step=4)[0][0],
        "layer": run_batch(LayerStreams(7, 0), start=1)[0][0],
        "evaluation": run_batch(LayerStreams(7, 0), training=False)[0][0],
        "micro-batch": run_batch(LayerStreams(7, 0), [("F", 0), ("F", 1)])[1][0],
    }
    for what, other in others.items():
        assert all(mine != theirs for mine, theirs in zip(here, other, strict=True)), what
    assert len(set(others.values())) == len(others)
    assert run_batch(LayerStreams(7, 0))[0][0] == here


def test_seeds_are_the_same_in_every_process() -> None:
    assert stream_seed(1234, step=5, micro_batch=2, layer=9, replica=1, training=True) == 0xF95D13346D6CCE45
    assert stream_seed(-1, step=0, micro_batch=0, layer=0, replica=0, training=True) == stream_seed(
        2**64 - 1, step=0, micro_batch=0, layer=0, replica=0, training=True
    )


def words() -> tuple[int, int, int]:
    return int(torch.randint(2**20, ())), random.getrandbits(20), numpy.random.randint(2**32, dtype="u4") % 2**20


def test_the_generators_give_different_bits() -> None:
    """Torch's generator on the CPU and numpy's are one algorithm: the same seed would give the same bits."""
    torch.manual_seed(5), numpy.random.seed(5)
    of_torch, _, of_numpy = words()
    assert of_torch == of_numpy
    TorchGenerators().seed(0x0123456789ABCDEF), PythonGenerators().seed(0x0123456789ABCDEF)
    assert len(set(words())) == 3


def test_a_layers_random_numbers_depend_neither_on_its_stage_nor_on_its_neighbours() -> None:
    def much(drawn: list[Any]) -> list[Any]:
        return [*drawn, [draw() for _ in range(5)]]

    def little(drawn: list[Any]) -> list[Any]:
        return [*drawn, draw()]

    together = run_batch(LayerStreams(7, 0), layers=[much, little, little], start=2)[0]
    apart = run_batch(LayerStreams(7, 0), layers=[little, little, little], start=2)[0]
    alone = run_batch(LayerStreams(7, 0), layers=[little], start=4)[0]
    assert together[1:] == apart[1:] and together[2:] == alone
    assert len({apart[0], apart[1], apart[2]}) == 3


def test_recomputation_repeats_the_random_numbers_of_its_micro_batch() -> None:
    one_f_one_b = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)]
    first, second, first_again, third, second_again, fourth, third_again, fourth_again = run_batch(
        LayerStreams(7, 0), one_f_one_b
    )
    assert [first_again, second_again, third_again, fourth_again] == [first, second, third, fourth]
    assert len({found[0] for found in (first, second, third, fourth)}) == 4


def test_random_numbers_do_not_depend_on_the_order_of_passes_nor_on_an_evaluation_in_between() -> None:
    streams = LayerStreams(7, 0)
    few = run_batch(streams, [("F", 0), ("B", 0), ("F", 1), ("B", 1)])
    run_batch(streams, [("F", 0), ("F", 1), ("F", 2)], training=False)
    many = run_batch(streams, [("F", 0), ("F", 1), ("B", 0), ("B", 1)])
    assert [few[0], few[2]] == many[:2]


def set_global_generators() -> tuple[float, ...]:
    """Set known states, with half a pair of normal numbers waiting, and return the next random numbers."""
    for _ in range(2):
        torch.manual_seed(5), random.seed(6), numpy.random.seed(8)
        random.gauss(0.0, 1.0), numpy.random.normal()
        expected = (*draw(), random.gauss(0.0, 1.0), numpy.random.normal())
    torch.manual_seed(5), random.seed(6), numpy.random.seed(8)
    random.gauss(0.0, 1.0), numpy.random.normal()
    return expected


def next_draws() -> tuple[float, ...]:
    return (*draw(), random.gauss(0.0, 1.0), numpy.random.normal())


def test_the_global_generators_are_restored_also_after_a_layer_fails() -> None:
    def fails(drawn: list[Any]) -> list[Any]:
        draw()
        raise OSError("out of order")

    expected = set_global_generators()
    run_batch(LayerStreams(7, 0), [("F", 0), ("F", 1), ("B", 0), ("B", 1)])
    assert next_draws() == expected
    expected = set_global_generators()
    with pytest.raises(OSError, match="out of order"):
        run_batch(LayerStreams(7, 0), layers=[fails])
    assert next_draws() == expected


def test_numpys_state_is_what_numpy_returns() -> None:
    """It is read again where another generator took its place, a number was drawn, or a normal number waits."""
    generator, own = NumpyGenerator(), numpy.random.get_bit_generator()
    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "bytes": lambda: numpy.random.bytes(4),
        **{f"normal {number}": numpy.random.normal for number in range(4)},
        "another": lambda: numpy.random.set_bit_generator(numpy.random.MT19937(5)),
    }
    numpy.random.seed(3)
    try:
        for name, change in changes.items():
            for _ in range(2):
                change()
                state, expected = generator.state(), numpy.random.get_state(legacy=False)
                assert (state["has_gauss"], state["gauss"]) == (expected["has_gauss"], expected["gauss"]), name
                assert state["state"]["key"] == expected["state"]["key"].tolist(), name
                assert state["state"]["pos"] == expected["state"]["pos"], name
                generator.seed(8)
                generator.restore(state)
    finally:
        numpy.random.set_bit_generator(own)


def test_the_ranks_generators_continue_around_the_layers_of_a_pass() -> None:
    """A hook runs before the layers of the module; a backward function runs between recomputed layers."""
    module, streams = module_like([lambda inputs: draw()]), LayerStreams(7, 0)
    forward_draws, backward_draws = [], []
    with drawing(streams, module):
        for micro_batch in range(2):
            with streams.running(micro_batch, recomputes=False):
                forward_draws.append(draw())
                module.forward_funcs[0](None)
            with streams.running(micro_batch, recomputes=True):
                for _ in range(2):
                    module.forward_funcs[0](None)
                    backward_draws.append(torch.rand(()).item())
    assert len({*forward_draws}) == 2 and len({*backward_draws}) == 4


def test_checkpointing_that_swaps_torchs_states_does_not_leak_them() -> None:
    """DeepSpeed sets the forward pass's state before it recomputes, and the backward pass's state afterwards."""
    module, streams = module_like([lambda inputs: draw()]), LayerStreams(7, 0)
    at_forward = torch.Generator().manual_seed(99).get_state()
    expected = set_global_generators()
    with drawing(streams, module), streams.running(0, recomputes=True):
        at_backward = torch.get_rng_state()
        torch.set_rng_state(at_forward)
        module.forward_funcs[0](None)
        torch.set_rng_state(at_backward)
    assert next_draws() == expected


def test_looking_for_trackers_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's function makes a tracker if there is none, and its package passes the function on."""
    package = "megatron.core.tensor_parallel"
    module, parent = ModuleType(f"{package}.random"), ModuleType(package)
    module.__dict__["_CUDA_RNG_STATE_TRACKER"] = None
    exec("def get_cuda_rng_tracker(): raise AssertionError('it would be made')", module.__dict__)
    parent.__dict__["get_cuda_rng_tracker"] = module.__dict__["get_cuda_rng_tracker"]
    for each in (module, parent):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    assert list(find_trackers()) == ["deepspeed.checkpointing"]
    module.__dict__["_CUDA_RNG_STATE_TRACKER"] = made = SimpleNamespace()
    assert find_trackers()[module.__name__] is made
    monkeypatch.delitem(sys.modules, module.__name__)
    parent.__dict__["get_cuda_rng_tracker"] = lambda: made  # as a library that makes its tracker when it is loaded
    assert find_trackers()[package] is made


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.Generator, lambda generator: torch.randn((), generator=generator).item()),
    "Generator": (numpy.random.default_rng, lambda generator: generator.standard_normal()),
    "PCG64": (numpy.random.PCG64, lambda bits: bits.random_raw()),
    "RandomState": (numpy.random.RandomState, lambda generator: generator.standard_normal()),
    "RandomState of PCG64": (
        lambda: numpy.random.RandomState(numpy.random.PCG64()),
        lambda made: made.standard_normal(),
    ),
    "Random": (random.Random, lambda generator: generator.gauss(0.0, 1.0)),
}


def test_a_generator_of_the_program_is_seeded_and_restored() -> None:
    for kind, (make, draw_from) in KINDS.items():
        generator, other = make(), make()
        assert generators.is_generator(generator), kind
        draw_from(generator)  # normal numbers come in pairs: another one is kept
        before = generators.state_of(generator)
        expected = draw_from(generator)
        found = []
        for seed in (7, 7, 2**64 - 1):
            generators.seed(generator, seed)
            generators.seed(other, seed)
            found.append((draw_from(generator), draw_from(generator)))
            assert (draw_from(other), draw_from(other)) == found[-1], kind
        assert found[0] == found[1] != found[2], kind
        generators.restore(generator, before)
        assert draw_from(generator) == expected, kind


def test_generators_without_a_state_are_left_alone() -> None:
    assert not any(map(generators.is_generator, (random.SystemRandom(), random, numpy.random, torch.Generator, 3)))
