"""Random draws belong to a layer, not to a rank.

Whenever a layer runs, the global generators (torch's, the accelerator's, Python's ``random``, numpy's legacy one) are
seeded from the run's seed, the step, the micro-batch, the layer's number and the data-parallel index: it draws the same
on any stage, when it is recomputed for backward, and after a resume. A layer may have another number for this, its
``draws_as_layer``, so that a model cut into layers in another way draws the same. After a pass (a micro-batch's forward
or backward through the stage) they are what they were before its first layer, so the rank's own draws are not
disturbed. The loss draws on from the last layer's stream. A backward function that draws (dropout's keeps its mask) has
no stream.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule

Layer = Callable[[Any], Any]
Instruction = Callable[..., None]

_KEY = struct.Struct("<Q4q?")


def stream_seed(seed: int, *, step: int, micro_batch: int, layer: int, replica: int, training: bool) -> int:
    """64 bits that tell one stream from another, the same in every process (Python's ``hash`` is not)."""
    key = _KEY.pack(seed % 2**64, step, micro_batch, layer, replica, training)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


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


class PythonGenerators:
    """Python's ``random`` and numpy's legacy global generator."""

    def seed(self, seed: int) -> None:
        random.seed(seed)
        numpy.random.seed(seed >> 32)  # torch's on the CPU, the same algorithm, takes the low half

    def state(self) -> tuple[Any, Any]:
        of_numpy = numpy.random.get_state(legacy=False)
        of_numpy["state"]["key"] = of_numpy["state"]["key"].tolist()  # put back 20 times as fast as numpy's own array
        return random.getstate(), of_numpy

    def restore(self, state: tuple[Any, Any]) -> None:
        random.setstate(state[0])
        numpy.random.set_state(state[1])


class LayerStreams:
    """Runs the layers of one stage under streams of their own.

    States are saved once in a pass, when its first layer runs: each layer seeds the generators anyway. But
    checkpointing swaps torch's around what it recomputes, so in a backward pass those are put back after every layer.
    """

    def __init__(self, seed: int, replica: int) -> None:
        self._seed = seed
        self._replica = replica
        self._torch = TorchGenerators()
        self._python = PythonGenerators()
        self._begun = 0  # forward passes of this batch: they come in the order of the micro-batches
        self._in_buffer: dict[int, int] = {}  # the micro-batch in each of DeepSpeed's pipeline buffers
        self._now: dict[str, Any] = {}  # step, training, micro_batch: what tells the streams of a layer apart
        self._backward = False
        self._outer: tuple[Any, Any] | None = None

    @contextmanager
    def batch(
        self, module: Any, numbers: Sequence[int], *, step: int, training: bool, first_micro_batch: int = 0
    ) -> Iterator[None]:
        """While a batch runs, the PipelineModule's ``forward_funcs`` draw from their streams; afterwards they are bare.

        ``numbers`` are those of the stage's layers; an evaluation (not ``training``) has streams of its own.
        ``first_micro_batch`` is this rank's in the batch, where others train on those before.
        """
        bare = module.forward_funcs
        self._now, self._begun = {"step": step, "training": training}, first_micro_batch
        module.forward_funcs = [self._drawing(number, layer) for number, layer in zip(numbers, bare, strict=True)]
        try:
            yield
        finally:
            module.forward_funcs = bare

    def instructions(self, present: Mapping[type, Instruction]) -> dict[type, Instruction]:
        """The two of a stage's ``present`` instructions that run layers, each telling which micro-batch it is."""
        forward, backward = present[schedule.ForwardPass], present[schedule.BackwardPass]

        def forward_pass(engine: Any, buffer_id: int) -> None:
            self._in_buffer[buffer_id] = self._begun
            self._begun += 1
            with self._one_pass(buffer_id, backward=False):
                forward(engine, buffer_id)

        def backward_pass(engine: Any, buffer_id: int) -> None:
            with self._one_pass(buffer_id, backward=True):
                backward(engine, buffer_id)

        return {schedule.ForwardPass: forward_pass, schedule.BackwardPass: backward_pass}

    @contextmanager
    def _one_pass(self, buffer_id: int, *, backward: bool) -> Iterator[None]:
        self._now["micro_batch"], self._backward = self._in_buffer[buffer_id], backward
        try:
            yield
        finally:
            if self._outer is not None:
                of_torch, of_python = self._outer
                self._python.restore(of_python)
                if not backward:
                    self._torch.restore(of_torch)
                self._outer = None

    def _drawing(self, number: int, layer: Layer) -> Layer:
        def drawing(inputs: Any) -> Any:
            of_torch = self._torch.state()
            if self._outer is None:
                self._outer = of_torch, self._python.state()
            seed = stream_seed(self._seed, layer=number, replica=self._replica, **self._now)
            self._torch.seed(seed)
            self._python.seed(seed)
            try:
                return layer(inputs)
            finally:
                if self._backward:
                    self._torch.restore(of_torch)

        return drawing
