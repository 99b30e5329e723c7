"""Measure how much a block still changes: its activations against those of the same block some steps ago, a reference.

Wang et al., "Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing" (EuroSys 2023). Egeria runs a whole
reference model; here a block's reference gets the very input that the block got, so that a stage needs nothing of
another. :mod:`ds_dynmo.models.freezing.egeria` says why that is the same for a block behind a frozen prefix.

References run on a thread beside the training: a block that draws random numbers there would disturb the layers' own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_dynmo.models.stream import Activations, Stream

__all__ = ["WatchedBlock", "capture_first", "similarity_loss", "watch"]

MOST_SAMPLES = 512  # their products are a square matrix
REFERENCE_DTYPE = torch.bfloat16

# Plain attributes of a block, which move with it.
WATCHING, CAPTURED, REFERENCE = "egeria_watching", "egeria_captured", "egeria_reference"


def similarity_loss(activations: torch.Tensor, reference: torch.Tensor) -> float:
    """Compute the similarity-preserving loss ``||norm(A A^T) - norm(R R^T)||_F^2 / b^2``.

    Args:
        activations, reference: ``A`` and ``R``, ``[..., width]``; each of the ``b`` tokens is a sample, or evenly
            spaced ones where there are more than 512. ``norm`` scales rows to length 1.
    """
    similarities = []
    for states in (activations, reference):
        samples = states.reshape(-1, states.shape[-1]).float()
        samples = samples[:: math.ceil(len(samples) / MOST_SAMPLES)]
        similarities.append(F.normalize(samples @ samples.T, dim=1))
    return float((similarities[0] - similarities[1]).square().sum()) / len(similarities[0]) ** 2


class WatchedBlock:
    """Copies of a block's first input and output in a watched batch, and of its reference.

    The constructor, before the batch's step, leaves a new reference on the block: its present weights in bf16, on the
    CPU, and its buffers as they are (rotary frequencies in bf16 would turn by other angles).

    Attributes:
        comparable: whether the block ran, and there is a reference with tensors of its shapes.
    """

    def __init__(self, block: nn.Module) -> None:
        state = vars(block)
        captured, reference = state.get(CAPTURED), state.get(REFERENCE)
        state[WATCHING], state[CAPTURED], state[REFERENCE] = False, None, None
        if reference is not None and _shapes(reference.items()) != _shapes(_tensors(block)):
            reference = None
        self.comparable = captured is not None and reference is not None
        if captured is not None and reference is not None:
            self._inputs, self._hidden = captured
            self._model = _reference_model(block, reference)
        state[REFERENCE] = {
            name: tensor.detach().to("cpu", _reference_dtype(tensor), copy=True) for name, tensor in _tensors(block)
        }

    def plasticity(self) -> float:
        """Compute the similarity-preserving loss between the two; on any thread."""
        with torch.no_grad():
            reference = Stream.unpack(self._model(self._inputs)).hidden
        return similarity_loss(self._hidden, reference)


def watch(block: nn.Module, watching: bool) -> None:
    """Let :func:`capture_first` keep the next pass; or let it keep nothing, and drop the reference too."""
    state = vars(block)
    state[WATCHING], state[CAPTURED] = watching, None
    if not watching:
        state[REFERENCE] = None


def capture_first(block: nn.Module, inputs: tuple[Activations], output: Activations) -> None:
    """Keep, on the CPU, the first input and output of a block that is being watched; a forward hook."""
    state = vars(block)
    if block.training and state.get(WATCHING) and state.get(CAPTURED) is None:
        state[CAPTURED] = (_on_cpu(inputs[0]), _on_cpu(Stream.unpack(output).hidden))


def _tensors(block: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*block.named_parameters(), *block.named_buffers()]


def _shapes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors}


def _reference_dtype(tensor: torch.Tensor) -> torch.dtype:
    return REFERENCE_DTYPE if isinstance(tensor, nn.Parameter) else tensor.dtype


def _reference_model(block: nn.Module, reference: dict[str, torch.Tensor]) -> nn.Module:
    """Copy ``block`` to the CPU with the reference's weights, in fp32, and without hooks."""
    memo: dict[int, Any] = {}
    for name, tensor in _tensors(block):
        weights = reference[name].float() if tensor.is_floating_point() else reference[name]
        memo[id(tensor)] = nn.Parameter(weights, False) if isinstance(tensor, nn.Parameter) else weights
    for module in block.modules():
        memo.update({id(held): type(held)() for name, held in vars(module).items() if name.endswith("_hooks")})
    return copy.deepcopy(block, memo)


def _on_cpu(activations: Activations) -> Any:
    if isinstance(activations, tuple):
        return tuple(_on_cpu(part) for part in activations)
    copied = activations.detach().to("cpu", copy=True)
    return copied.float() if copied.is_floating_point() else copied
