"""Emulated layers: they sleep for the time a load model gives. Engine, messages, profiles and moves are real.

A sleeping process leaves its core to the others, so that any number of stages runs on a few cores as it would on as
many accelerators.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from benchmarks.arms import NEVER, arm_block
from ds_dynmo.models.layer_numbers import local_layers
from ds_dynmo.partitioners import LayerPasses
from simulation import Phase

UNITS = 255  # in which the share of trainable parameters is counted, one parameter for each binary digit
UNIT = 64  # elements
MICRO_BATCH = (1, 8, 8)  # what is sent between stages


class _Work(torch.autograd.Function):
    """The identity, after a while. The part that trains is hidden from autograd: its gradient can be put off."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, block: EmulatedBlock, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)  # as a layer would
        ctx.block, ctx.part = block, block.parts[block.largest]
        sleep(block.forward_seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        block, part = ctx.block, ctx.part
        whole = block.backward_seconds * block.split_price
        seconds = block.backward_seconds, whole * (1 - block.weight_share), whole * block.weight_share
        sleep_backward(part, seconds, lambda: torch.zeros_like(part), sleep, held_bytes=gradient.nbytes)
        return gradient, None, None


def sleep_backward(
    weight: nn.Parameter,
    seconds: tuple[float, float, float],
    gradient: Callable[[], torch.Tensor],
    sleep: Callable[[float], None],
    *,
    held_bytes: int,
) -> None:
    """Sleep as long as a backward pass takes, and calculate the gradient of ``weight``, now or when it is its turn.

    Args:
        seconds: of a backward pass in one, and of its two parts; the second one is the weight gradient's.
        held_bytes: between the two parts.
    """
    whole, first, second = seconds
    if not weight.requires_grad:
        sleep(whole)
        return
    at_once, is_over = False, False

    def weight_gradient() -> torch.Tensor:
        nonlocal at_once
        if is_over:
            sleep(second)
        else:
            at_once = True
        return gradient()

    ds_dynmo.defer_weight_gradient(weight, weight_gradient, held_bytes=held_bytes)
    is_over = True
    sleep(whole if at_once else first)


def sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class EmulatedBlock(nn.Module):
    """Takes as long as it is told, per micro-batch; a share of its parameters trains, the others are frozen.

    Attributes:
        weight_share: of a backward pass in two parts, what its second part takes: a half, so that the forward pass and
            both parts take the same.
        split_price: seconds of both parts, over those of a backward pass in one.
    """

    weight_share, split_price = 0.5, 1.0

    def __init__(self, forward_seconds: float = 0.0) -> None:
        super().__init__()
        self.forward_seconds = forward_seconds
        self.backward_seconds = 2 * forward_seconds
        self.parts = nn.ParameterList(torch.ones(UNIT << digit) for digit in range(UNITS.bit_length()))
        self.largest = UNITS.bit_length() - 1  # of the parts that train; it alone gets gradients, to spare the CPU

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        anchor = torch.empty(0, requires_grad=self.parts[self.largest].requires_grad)
        return _Work.apply(hidden, self, anchor)  # type: ignore[no-any-return]

    def train_share(self, share: float) -> None:
        """Train only this share of the parameters from here on: none for 0, else one unit at least."""
        units = max(1, round(UNITS * share)) if share else 0
        for digit, part in enumerate(self.parts):
            part.requires_grad_(bool(units >> digit & 1))
        self.largest = max(units.bit_length() - 1, 0)


def make_engine(
    arm: str, *, layers: int, micro_batches: int, interval: int, block: dict[str, Any] | None = None
) -> Any:
    """Make an arm's engine over emulated blocks; ``block`` adds to the arm's "dynmo" section."""
    profile = {"warmup_batches": 0 if interval == 1 else NEVER}
    dynmo = arm_block(arm, {"interval": interval, "profile": profile})
    dynmo |= {"monitor": False, "randomness": {"per_layer": False}, **(block or {})}
    specs = [LayerSpec(EmulatedBlock) for _ in range(layers)]
    return pipeline_engine(specs, micro_batches=micro_batches, dynmo=dynmo)


def mean_square(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


PRECISIONS: dict[str, dict[str, Any]] = {  # DeepSpeed's keys, for :func:`pipeline_engine`
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp32-zero1": {"zero_optimization": {"stage": 1}},
}


def pipeline_engine(
    layers: list[Any],
    *,
    micro_batches: int,
    dynmo: dict[str, Any] | None,
    checkpoint_interval: int = 0,
    module_class: type[PipelineModule] = PipelineModule,
    loss_fn: Callable[[Any, Any], torch.Tensor] = mean_square,
    topology: Any = None,
    **config: Any,
) -> Any:
    """Make an engine over ``layers``, split uniformly.

    Args:
        topology: DeepSpeed's, of stages and replicas; None: one stage per rank.
        dynmo: the "dynmo" section, where moves are "blocking" unless it says otherwise: then the profile of a batch
            is there, and what is decided from it done, when the batch ends. None: the engine is DeepSpeed's own.
        config: more of DeepSpeed's keys.
    """
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": None,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        **({} if dynmo is None else {"dynmo": {"migration": "blocking", **dynmo}}),
        **config,
    }
    initialize = deepspeed.initialize if dynmo is None else ds_dynmo.initialize
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints lines about each layer
        module = module_class(
            layers=layers,
            num_stages=torch.distributed.get_world_size() if topology is None else None,
            topology=topology,
            loss_fn=loss_fn,
            partition_method="uniform",
            activation_checkpoint_interval=checkpoint_interval,
        )
        return initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]


def told_passes(phase: Phase, forward_seconds: float) -> LayerPasses:
    """Return what the passes of layers take; a backward pass of a dense layer takes two forward passes."""
    forward = tuple(forward_seconds * share for share in phase.forward)
    backward = tuple(2 * forward_seconds * share for share in phase.backward)
    share, price = EmulatedBlock.weight_share, EmulatedBlock.split_price
    parts = [
        (seconds * (1 - share) * price, seconds * share * price) if trained else (seconds, 0.0)
        for seconds, trained in zip(backward, phase.trainable)
    ]
    first, second = zip(*parts)
    none = (0,) * len(forward)
    frozen = next((layer for layer, share in enumerate(phase.trainable) if share), len(forward))
    return LayerPasses(forward, first, second, backward, none, none, none, none, frozen)


def set_loads(engine: Any, phase: Phase, forward_seconds: float) -> None:
    """Tell the layers of this rank what they cost from here on."""
    passes = told_passes(phase, forward_seconds)
    for layer, block in local_layers(engine.module):
        assert isinstance(block, EmulatedBlock)
        block.forward_seconds, block.backward_seconds = passes.forward_seconds[layer], passes.backward_seconds[layer]
        block.train_share(phase.trainable[layer])


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same micro-batch again and again."""
    while True:
        yield torch.zeros(MICRO_BATCH), torch.zeros(MICRO_BATCH)
