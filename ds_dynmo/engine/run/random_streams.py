"""Random numbers per layer, which do not depend on the layer's rank.

Before a layer runs, the global generators (of torch, the accelerator, Python's ``random`` and numpy's legacy generator)
are seeded from the run's seed, the step, the micro-batch, the layer's number and the data-parallel index. So the layer
gets the same numbers on any stage, when it is recomputed for backward, and after a resume. The named states of trackers
are seeded in the same way (:mod:`ds_dynmo.engine.run.rng_trackers`). A layer's ``draws_as_layer`` replaces its number
here, so that a model that is cut into layers in another way gets the same numbers.

After a pass (a micro-batch's forward or backward through the stage) the generators are restored to their states before
its first layer, so that the rank's other random numbers are unchanged. The loss continues the last layer's stream. A
backward function that uses random numbers has no stream; that of dropout keeps its mask and needs none.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from numpy.random.mtrand import get_bit_generator

from ds_dynmo.engine.run.rng_trackers import TrackedStates

Layer = Callable[[Any], Any]

_KEY = struct.Struct("<Q4q?")
_POSITION = struct.Struct("i")


def stream_seed(seed: int, *, step: int, micro_batch: int, layer: int, replica: int, training: bool) -> int:
    """Hash the identity of a stream to 64 bits, equal in every process (unlike Python's ``hash``)."""
    key = _KEY.pack(seed % 2**64, step, micro_batch, layer, replica, training)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


class LayerPass(NamedTuple):
    """A pass that may run layers; ``recomputes``: they repeat what they ran in the forward pass."""

    micro_batch: int
    recomputes: bool


class TorchGenerators:
    """The default generators of torch and the accelerator."""

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        accelerator = get_accelerator()
        if accelerator.device_name() != "cpu":
            self._generators.append(accelerator.default_generator(accelerator.current_device()))

    def seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)

    def state(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states):
            generator.set_state(state)


class NumpyGenerator:
    """numpy's legacy global generator.

    numpy takes 40 microseconds to return its state, as it copies 624 numbers one by one. So the state is read again
    only if the generator's memory (these numbers and a position) has changed since the last read. A cached normal
    number is not in this memory: while there is one, the state is read every time.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._memory = b""  # of the generator in this state
        self._known: Any = None  # the generator, if its memory is its whole state

    def seed(self, seed: int) -> None:
        numpy.random.seed(seed)

    def state(self) -> dict[str, Any]:
        generator = get_bit_generator()
        if generator is self._known:
            address = generator.ctypes.state_address
            if ctypes.string_at(address, len(self._memory)) == self._memory:
                return self._state
        self._state = numpy.random.get_state(legacy=False)
        numbers = self._state["state"]
        self._memory = numbers["key"].tobytes() + _POSITION.pack(numbers["pos"])
        self._known = None if self._state["has_gauss"] else generator
        numbers["key"] = numbers["key"].tolist()  # restored 20 times as fast as numpy's own array
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        numpy.random.set_state(state)


class PythonGenerators:
    """Python's ``random`` and numpy's legacy global generator."""

    def __init__(self) -> None:
        self._numpy = NumpyGenerator()

    def seed(self, seed: int) -> None:
        random.seed(seed)
        self._numpy.seed(seed >> 32)  # torch on the CPU has the same algorithm and takes the low half

    def state(self) -> tuple[Any, Any]:
        return random.getstate(), self._numpy.state()

    def restore(self, state: tuple[Any, Any]) -> None:
        random.setstate(state[0])
        self._numpy.restore(state[1])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global generators afterwards, also after an exception: code of users may draw inside."""
    kept = [(generators, generators.state()) for generators in (TorchGenerators(), PythonGenerators())]
    try:
        yield
    finally:
        for generators, state in kept:
            generators.restore(state)  # type: ignore[arg-type]


class LayerStreams:
    """Runs each layer of one stage with the layer's random stream.

    States are saved once in a pass, before its first layer, because each layer seeds the generators anyway. But
    activation checkpointing sets the states of torch and of trackers around a recomputation, so there they are restored
    after every layer.

    Args:
        replica: data-parallel index.
        trackers: named random states that layers fork.

    Attributes:
        seed: of the run, the same on every rank.
        seed_of_user: whether the user chose it for layers; else a run that is resumed keeps its own.
    """

    def __init__(
        self, seed: int, replica: int, trackers: TrackedStates | None = None, *, seed_of_user: bool = True
    ) -> None:
        self.seed, self.seed_of_user = seed, seed_of_user
        self._replica = replica
        self._torch = TorchGenerators()
        self._trackers = TrackedStates(lambda mine: [mine]) if trackers is None else trackers
        self._python = PythonGenerators()
        self._numbers: Mapping[int, int] = {}  # by layer of the stage
        self._now: dict[str, Any] = {}  # step and training, which identify streams together with the draws
        self._swapped: tuple[Any, ...] = (self._torch,)  # also restored by activation checkpointing
        self._pass: LayerPass | None = None
        self._outer: list[Any] | None = None
        self._outer_of_python: Any = None

    def begin(self, numbers: Mapping[int, int], *, step: int, training: bool) -> None:
        """Start a batch, whose layers run through :meth:`wrap`.

        Args:
            numbers: by layer of the stage, the number that seeds its stream.
            training: whether it is a training batch; evaluations have different streams.
        """
        self._trackers.find()
        self._swapped = (self._torch, self._trackers) if self._trackers.are_there else (self._torch,)
        self._numbers, self._now = numbers, {"step": step, "training": training}

    @contextmanager
    def running(self, micro_batch: int, *, recomputes: bool) -> Iterator[None]:
        """Run the pass of a micro-batch inside, and restore the generators afterwards.

        Args:
            recomputes: its layers repeat what they ran in the forward pass.
        """
        self._pass = LayerPass(micro_batch, recomputes)
        try:
            yield
        finally:
            self._pass = None
            if self._outer_of_python is not None:
                self._python.restore(self._outer_of_python)
                self._outer_of_python = None
            if self._outer is not None:
                self._restore(self._outer)
                self._outer = None

    def wrap(self, index: int, layer: Layer) -> Layer:
        """Wrap the layer of a number, so that it draws from its own streams."""
        number = self._numbers[index]

        def drawing(inputs: Any) -> Any:
            begun = self._pass
            if begun is None:  # a user's code runs it outside of passes
                return layer(inputs)
            swapped = self._state() if begun.recomputes else None
            if self._outer_of_python is None:
                self._outer_of_python = self._python.state()
            if not begun.recomputes:
                self._outer = self._outer or self._state()
            seed = stream_seed(
                self.seed, layer=number, replica=self._replica, micro_batch=begun.micro_batch, **self._now
            )
            for generators in self._swapped:
                generators.seed(seed)
            self._python.seed(seed)
            try:
                return layer(inputs)
            finally:
                if swapped is not None:
                    self._restore(swapped)

        return drawing

    def _state(self) -> list[Any]:
        return [generators.state() for generators in self._swapped]

    def _restore(self, states: list[Any]) -> None:
        for generators, state in zip(self._swapped, states, strict=True):
            generators.restore(state)
