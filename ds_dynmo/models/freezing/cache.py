"""Keep outputs of a stage's frozen layers for inputs that come again (Egeria's activation cache).

The *run* of a stage is its leading layers that are frozen. Their output depends on their input and their weights
alone. So where data comes again (epochs), an output that was kept replaces their forward pass. No number changes:

- an input is found by its fingerprint and compared as a whole with the one that is kept;
- a layer that draws random numbers ends the run, and outputs of a pass in which one drew are not kept;
- before every batch the weights' fingerprints are compared with those of the batch before. An output is dropped unless
  every layer that it was made by is still here, frozen, and has the weights it had (thawing, moves, a checkpoint).
  Attributes of a frozen layer are taken to be what they were.

When the run grows, outputs of fewer layers are still used: a pass goes on from there, and its output replaces them.
Evaluations run all layers. So does a batch after a move by hand; and where activations are checkpointed, the run ends
where a segment does, so that none of it is recomputed.

A profiled batch uses the cache like any other: layers are measured as they are now, lookups included, and the balancer
gives more layers to a stage whose run is mostly found. After the run has grown by a move, the new layers run, and are
measured, until the data has come again.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger
from torch import nn

from ds_dynmo.models.freezing.fingerprint import fingerprint
from ds_dynmo.models.local_layers import local_layers
from ds_dynmo.models.stream import Activations

__all__ = ["ActivationCache"]

Tensors = tuple[torch.Tensor, ...]
Key = tuple[tuple[torch.Size, torch.dtype, int], ...]


@dataclass(frozen=True)
class _Kept:
    """Inputs, and what the layers before number ``stop`` gave for them, in the memory of the host."""

    inputs: Tensors
    outputs: Tensors
    is_tuple: bool
    stop: int

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs))


class ActivationCache:
    """Keeps outputs of this stage's run, and drops the least recently used ones first.

    Args:
        module: whose stage it is.
        limit_bytes: of inputs and outputs together, in the memory of the host.
        first_block: the number of the model's first block. A run that ends before it is not looked up.

    Attributes:
        lookups, hits: passes of a micro-batch through the run, and those in which an output was found.
        num_bytes: held now.
    """

    def __init__(self, module: PipelineModule, limit_bytes: int, first_block: int) -> None:
        self._module = module
        self._limit_bytes = limit_bytes
        self._first_block = first_block
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._weights: dict[int, list[int]] = {}  # of the run's layers, their tensors' fingerprints
        self._drawing: set[int] = set()  # layers that were seen to draw
        self._run = range(0)
        self._key: Key | None = None  # of the pass under way; None: it cannot be kept
        self._inputs: Tensors = ()
        self._go_on_from = 0
        self.lookups = self.hits = self.num_bytes = 0

    def install(self, num_frozen: int, chunk: range) -> None:
        """Put the cache around the frozen layers of this stage, for one batch. :meth:`remove` follows.

        Args:
            num_frozen: how many leading layers of the model are frozen.
            chunk: the stage's layers, or the first chunk of them: ``engine.chunks[0]``.
        """
        layers, before = dict(local_layers(self._module)), self._weights
        self._run = self._run_of(num_frozen, chunk)
        self._weights = {number: _fingerprints(layers.get(number)) for number in self._run}
        start = self._run.start
        same = takewhile(lambda number: self._weights[number] == before.get(number), self._run)
        unchanged = start + len(list(same)) if start == min(before, default=None) else 0
        for key in [key for key, kept in self._kept.items() if kept.stop > unchanged]:
            self._drop(key)
        functions = self._module.forward_funcs
        for number in self._run:
            position = number - self._run.start
            functions[position] = _InRun(functions[position], number, self._layer)

    def remove(self) -> None:
        """Take the cache off the layers, after a batch."""
        functions = self._module.forward_funcs
        functions[:] = [each.layer if isinstance(each, _InRun) else each for each in functions]

    def _run_of(self, num_frozen: int, chunk: range) -> range:
        start, stop = chunk.start, min(chunk.stop, num_frozen)
        stop = min([stop, *(number for number in self._drawing if number >= start)])
        segment = self._module.activation_checkpoint_interval
        if segment and stop < chunk.stop:
            stop -= (stop - start) % segment
        return range(start, stop if stop > self._first_block else start)

    # -- a pass ---------------------------------------------------------------------------------------

    def _layer(self, number: int, layer: Callable[[Any], Any], given: Activations) -> Activations:
        """Run a layer of the run, or give what was kept where the output of this or later layers is known."""
        if not self._module.training:
            return layer(given)
        if number == self._run.start:
            given = self._begin(given)
        if number < self._go_on_from:
            return given
        before = _random_states()
        outputs: Activations = layer(given)
        if _random_states() != before:
            self._drew(number)
        if number == self._run[-1]:
            self._keep(outputs)
        return outputs

    def _begin(self, given: Activations) -> Activations:
        """Look the run's input up."""
        inputs = given if isinstance(given, tuple) else (given,)
        self._go_on_from = self._run.start
        key = self._key = _key(inputs)
        self.lookups += 1
        kept = self._kept.get(key)
        if kept is None or not all(torch.equal(old.to(new), new) for old, new in zip(kept.inputs, inputs)):
            self._inputs = _on_host(inputs)
            return given
        self.hits += 1
        self._kept.move_to_end(key)
        self._inputs, self._go_on_from = kept.inputs, kept.stop
        outputs = tuple(tensor.to(inputs[0].device, copy=True) for tensor in kept.outputs)
        return outputs if kept.is_tuple else outputs[0]

    def _keep(self, given: Activations) -> None:
        outputs = given if isinstance(given, tuple) else (given,)
        if self._key is None or any(tensor.requires_grad for tensor in outputs):
            return
        kept = _Kept(self._inputs, _on_host(outputs), isinstance(given, tuple), self._run.stop)
        self._drop(self._key)
        if kept.num_bytes > self._limit_bytes:
            return
        self._kept[self._key] = kept
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self._limit_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        self.num_bytes -= 0 if kept is None else kept.num_bytes

    def _drew(self, number: int) -> None:
        self._key = None
        if number not in self._drawing:
            self._drawing.add(number)
            logger.warning(f"freezing: layer {number} draws random numbers: its outputs and later ones are not cached")


class _InRun:
    """A layer of the run in the PipelineModule's ``forward_funcs``; its attributes are those of the layer."""

    def __init__(self, layer: Any, number: int, run: Callable[[int, Any, Any], Any]) -> None:
        self.layer = layer
        self._number = number
        self._call = run

    def __call__(self, inputs: Any) -> Any:
        return self._call(self._number, self.layer, inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def _key(inputs: Tensors) -> Key:
    numbers = torch.stack([fingerprint(tensor) for tensor in inputs]).tolist()
    return tuple((tensor.shape, tensor.dtype, number) for tensor, number in zip(inputs, numbers))


def _fingerprints(layer: nn.Module | None) -> list[int]:
    tensors = [] if layer is None else [fingerprint(tensor) for tensor in (*layer.parameters(), *layer.buffers())]
    return torch.stack(tensors).tolist() if tensors else []


def _on_host(tensors: Tensors) -> Tensors:
    return tuple(tensor.detach().to("cpu", copy=True) for tensor in tensors)


def _random_states() -> tuple[Any, ...]:
    """Read the states of all global generators that a layer may draw from."""
    accelerator = get_accelerator()
    states = [torch.get_rng_state()]
    if accelerator.device_name() != "cpu":
        states.append(accelerator.get_rng_state())
    of_numpy = numpy.random.get_state(legacy=False)["state"]
    return (
        *(state.numpy().tobytes() for state in states),
        random.getstate(),
        of_numpy["key"].tobytes(),
        of_numpy["pos"],
    )
