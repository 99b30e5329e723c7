"""Layers that sleep and still train: each scales what comes in, so that weights tell one order of passes from another.

Their seconds are those of every pass: forward, both parts of a backward pass, and a backward pass in one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.emulation import sleep_backward
from ds_dynmo.partitioners import loads, uniform
from ds_dynmo.schedules import PassCosts

WIDTH = 8
MOST_OVERSLEPT = 0.005  # seconds that are made up for; more is a stall of the machine
SPLITS = {  # the weight part's share of a backward pass, and seconds of both parts over those of a pass in one
    "even": (0.5, 1.0),
    "realistic": (0.4, 1.05),
}
LOADS = ("equal", "random", "frozen", "weightless")


class LayerSeconds(NamedTuple):
    """What a layer takes per micro-batch; ``backward``: in one."""

    forward: float
    input_gradient: float
    weight_gradient: float
    backward: float


def layer_seconds(kind: str, split: str, layers: int, pass_seconds: float, seed: int) -> list[LayerSeconds]:
    """Return every layer's seconds; where layers are alike, a backward pass in one takes two forward passes.

    Args:
        kind: "equal"; "random": each pass up to 30% more or less; "frozen": the first quarter of the layers takes no
            time backward; "weightless": the second half takes no time for weights.
        split: a name of :data:`SPLITS`.
    """
    share, price = SPLITS[split]
    chooser, found = np.random.default_rng(seed), []
    for layer in range(layers):
        by = chooser.uniform(0.7, 1.3, 3).tolist() if kind == "random" else [1.0, 1.0, 1.0]
        if kind == "frozen" and layer < layers // 4:
            by[1] = by[2] = 0.0
        if kind == "weightless" and layer >= layers // 2:
            by[2] = 0.0
        forward, first, second = pass_seconds * by[0], 2 * (1 - share) * by[1], 2 * share * by[2]
        parts = [pass_seconds * part for part in (first, second)]
        found.append(LayerSeconds(forward, price * parts[0], price * parts[1], sum(parts)))
    return found


def chunk_costs(seconds: Sequence[LayerSeconds], owners: Sequence[int]) -> PassCosts:
    """Add up what the passes of each chunk take, where layers are split uniformly over chunks with these ``owners``."""
    chunks = uniform(len(seconds), len(owners))
    forward, first, second, backward = (tuple(loads(of_kind, chunks)) for of_kind in zip(*seconds))
    return PassCosts(tuple(owners), forward, first, second, backward)


class _EvenSleep:
    """Sleeps. What was overslept is taken off the next time, so that passes take what they should on average."""

    def __init__(self) -> None:
        self._overslept = 0.0

    def __call__(self, seconds: float) -> None:
        if seconds <= 0:
            return
        began, wanted = time.perf_counter(), seconds - self._overslept
        if wanted > 0:
            time.sleep(wanted)
        late = time.perf_counter() - began - wanted
        self._overslept = min(max(0.0, late), MOST_OVERSLEPT)


even_sleep = _EvenSleep()


class _Scale(torch.autograd.Function):
    """``input * weight``, after a while. The weight is hidden from autograd: its gradient can be put off."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, block: ScalingBlock, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.block = block
        even_sleep(block.seconds.forward)
        return input * block.weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (input,) = ctx.saved_tensors
        block, seconds = ctx.block, ctx.block.seconds
        sleep_backward(
            block.weight,
            (seconds.backward, seconds.input_gradient, seconds.weight_gradient),
            lambda: (input * gradient).sum(0),
            even_sleep,
            held_bytes=input.nbytes,
        )
        return gradient * block.weight, None, None


class ScalingBlock(nn.Module):
    """Scales its input, in the seconds that it is given; ``layer`` seeds the weights."""

    def __init__(self, layer: int, seconds: LayerSeconds) -> None:
        super().__init__()
        self.seconds = seconds
        generator = torch.Generator().manual_seed(layer)
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH, generator=generator))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Scale.apply(input, self, torch.empty(0, requires_grad=True))  # type: ignore[no-any-return]
