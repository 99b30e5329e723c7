"""Tuples as programs of others pass them between layers: what they do for DeepSpeed's sake works, and moves.

The layers are our own; what they pass, and how, is as in the program named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from tests.support.configs import Case, config
from tests.support.harness import run_each
from tests.support.models import VOCABULARY, WIDTH, Block, Embedding, Head, seeded
from tests.support.training import raw

pytestmark = pytest.mark.ranks

Tensors = tuple[torch.Tensor, ...]
STEPS, MICRO_BATCHES = 3, 3


def drawn(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def attend(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention with an additive mask, which is causal and hides what pads."""
    return torch.softmax(hidden @ hidden.transpose(1, 2) + mask, -1) @ hidden


# -- transpeeder: a bool mask at the end, tuples of one tensor (which DeepSpeed unpacks where it checkpoints)


class GPT2ModelPipe(PipelineModule):  # type: ignore[misc]
    """Has the name by which DeepSpeed treats the last tensor of every message as a mask."""


class MaskedEmbedding(Embedding):
    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        tokens, positions, mask = inputs
        return super().forward(tokens), positions, mask


class MaskedDecoder(Block):
    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        hidden, positions, mask = inputs
        additive = torch.zeros(mask.shape, device=mask.device).masked_fill(mask, float("-inf"))
        rotated = hidden + 0.1 * torch.sin(positions.float())[..., None]
        return super().forward(rotated + attend(rotated, additive)), positions, mask


class OneTuple(nn.LayerNorm):
    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        return (super().forward(inputs[0]),)


class OneTupleHead(Head):
    def forward(self, inputs: Any) -> Tensors:  # type: ignore[override]
        return (super().forward(inputs[0] if isinstance(inputs, tuple) else inputs),)


def loss_of_one(outputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0].reshape(-1, VOCABULARY), labels.reshape(-1))


def bool_mask_last(**options: Any) -> PipelineModule:
    decoders = [LayerSpec(MaskedDecoder, index) for index in range(4)]
    return GPT2ModelPipe(
        [LayerSpec(MaskedEmbedding, 1), *decoders, LayerSpec(OneTuple, WIDTH), LayerSpec(OneTupleHead, 2)],
        loss_fn=loss_of_one,
        num_stages=torch.distributed.get_world_size(),
        partition_method="uniform",
        checkpointable_layers=["MaskedDecoder"],
        **options,
    )


def padded_tokens() -> Iterator[Any]:
    for number in range(STEPS * MICRO_BATCHES):
        tokens = torch.randint(0, VOCABULARY, (2, 5), generator=drawn(number))
        length = 2 + number % 4
        labels = torch.where(torch.arange(5) < length, tokens.roll(-1, 1), -100)
        hidden_ones = torch.ones(5, 5).triu(1).bool() | (torch.arange(5) >= length)
        yield (tokens, torch.arange(5).expand(2, -1), hidden_ones.expand(2, -1, -1).clone()), labels


# -- qlora-pipe: all floating tensors require a gradient, labels travel, lengths differ, an empty tensor is no mask


class RotaryEmbedding(Embedding):
    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        tokens, mask, labels = inputs
        hidden, positions = super().forward(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        angles = positions[:, None] * torch.arange(1.0, WIDTH + 1, device=tokens.device)
        mask = mask if bool(mask.any()) else torch.tensor([], device=tokens.device)
        return requiring_gradients(hidden, mask, angles.cos(), angles.sin(), positions, labels)


def requiring_gradients(*tensors: torch.Tensor) -> Tensors:
    return tuple(tensor.requires_grad_(True) if tensor.is_floating_point() else tensor for tensor in tensors)


class RotaryDecoder(Block):
    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        hidden, mask, cosines, sines, *carried = inputs
        rotated = hidden * cosines + hidden.flip(-1) * sines
        attended = attend(rotated, mask) if mask.numel() else rotated
        return super().forward(hidden + attended), mask, cosines, sines, *carried


class LossHead(Head):
    def forward(self, inputs: Tensors) -> torch.Tensor:  # type: ignore[override]
        logits = super().forward(inputs[0])
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), inputs[-1].reshape(-1))


def floats_that_require_gradients(**options: Any) -> PipelineModule:
    decoders = [LayerSpec(RotaryDecoder, index) for index in range(5)]
    return PipelineModule(
        [LayerSpec(RotaryEmbedding, 1), *decoders, LayerSpec(LossHead, 2)],
        num_stages=torch.distributed.get_world_size(),
        partition_method="uniform",
        dynamic_shape=True,
        **options,
    )


def tokens_of_several_lengths(masked: int = 2) -> Iterator[Any]:
    """Of 3 micro-batches, ``masked`` have a mask."""
    for number in range(STEPS * MICRO_BATCHES):
        length = (5, 3, 7)[number // MICRO_BATCHES]
        tokens = torch.randint(0, VOCABULARY, (2, length), generator=drawn(number))
        mask = torch.full((2, length, length), -10.0).triu(1) * (number % 3 < masked)
        labels = tokens.roll(-1, 1).index_fill(1, torch.tensor([length - 1]), -100)
        yield (tokens, mask, labels), labels


# -- diffusion-pipe: several hidden states, one that all layers use, numbers as tensors, other tuples further on


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.words, self.time = (Block(index) for index in range(3))

    def forward(self, inputs: Tensors) -> Tensors:
        image, words, time = requiring_gradients(*inputs)
        length, device = image.shape[1] + words.shape[1], image.device
        table = (torch.arange(float(length), device=device)[:, None] * torch.arange(WIDTH, device=device)).cos()
        count = torch.tensor(words.shape[1], device=device)
        vector = self.time(time)
        return self.image(image), self.words(words), table.requires_grad_(True), count, vector


class TwoStreams(Block):
    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        image, words, table, count, vector = inputs
        both = super().forward(torch.cat((words, image), 1) * table + vector[:, None])
        return both[:, count:].contiguous(), both[:, :count].contiguous(), table, count, vector


class Joined(Block):
    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        if len(inputs) == 5:
            image, words, *others = inputs
            return torch.cat((words, image), 1), *others
        hidden, table, count, vector = inputs
        return super().forward(hidden * table + vector[:, None]), table, count, vector


class Image(Block):
    def forward(self, inputs: Tensors) -> torch.Tensor:  # type: ignore[override]
        hidden, _, count, _ = inputs
        return super().forward(hidden[:, int(count) :])


def several_hidden_states(**options: Any) -> PipelineModule:
    layers = [LayerSpec(Streams), LayerSpec(TwoStreams, 3), LayerSpec(TwoStreams, 4)]
    layers += [LayerSpec(Joined, index) for index in (5, 6, 7)]
    return PipelineModule(
        [*layers, LayerSpec(Image, 8)],
        loss_fn=F.mse_loss,
        num_stages=torch.distributed.get_world_size(),
        partition_method="uniform",
        **options,
    )


def noisy_images() -> Iterator[Any]:
    for number in range(STEPS * MICRO_BATCHES):
        image, words, time = seeded((2, 5, WIDTH), number), seeded((2, 3, WIDTH), 50 + number), seeded((2, WIDTH), 99)
        yield (image, words, time), image.flip(1)


# ---------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, tuple[Callable[..., PipelineModule], Callable[[], Iterator[Any]]]] = {
    "transpeeder": (bool_mask_last, padded_tokens),
    "qlora-pipe": (floats_that_require_gradients, tokens_of_several_lengths),
    "qlora-pipe, always a mask": (floats_that_require_gradients, partial(tokens_of_several_lengths, 3)),
    "diffusion-pipe": (several_hidden_states, noisy_images),
}
MOVES = {2: [[0, 1, 7], [0, 5, 7]], 3: [[0, 1, 6, 7], [0, 4, 5, 7]]}  # by number of stages


def train(program: str, kind: str, checkpointed: bool, moves: Sequence[Sequence[int]]) -> Any:
    """Return losses and weights; ``kind``: of schedule, or "deepspeed" for its own engine."""
    import deepspeed

    torch.manual_seed(0)
    make_module, data = PROGRAMS[program]
    module, batches = make_module(activation_checkpoint_interval=int(checkpointed)), data()
    dynmo = {"interval": 0, "profile": {"batches": 1, "warmup_batches": 0}, "schedule": {"kind": kind}}
    case = Case(micro_batches=MICRO_BATCHES, clip=0.0, dynmo=None if kind == "deepspeed" else dynmo)
    initialize = deepspeed.initialize if kind == "deepspeed" else ds_dynmo.initialize
    engine = initialize(model=module, model_parameters=list(module.parameters()), config=config(case))[0]
    losses, waiting = [], list(moves)
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(batches)))
        if waiting:
            engine.rebalance(waiting.pop(0))
    return losses, {name: raw(parameter) for name, parameter in module.named_parameters()}


def whole(results: Sequence[Any]) -> Any:
    """Merge what the stages hold, which have one loss."""
    losses, weights = zip(*results, strict=True)
    assert all(one == losses[0] for one in losses)
    return losses[0], {name: value for held in weights for name, value in held.items()}


def check(stages: int, *ways: tuple[str, str, bool]) -> None:
    """Train in ``ways`` (a program, a kind of schedule, checkpointed?) under moves, and compare with one stage."""
    programs = list(dict.fromkeys((program, checkpointed) for program, _, checkpointed in ways))
    calls = [(program, "1f1b", checkpointed, []) for program, checkpointed in programs]
    alone = dict(zip(programs, map(whole, run_each(1, train, *calls)), strict=True))
    moved = run_each(stages, train, *((*way, MOVES[stages]) for way in ways))
    for (program, kind, checkpointed), found in zip(ways, map(whole, moved), strict=True):
        assert found == alone[program, checkpointed], (program, kind, checkpointed)


def test_programs_train_under_moves_as_on_one_stage() -> None:
    check(2, ("transpeeder", "1f1b", True), ("qlora-pipe", "1f1b", False), ("diffusion-pipe", "zero_bubble", False))


@pytest.mark.nightly
def test_programs_train_under_every_schedule_as_on_one_stage() -> None:
    check(3, *itertools.product(PROGRAMS, ("1f1b", "zero_bubble", "auto"), (False, True)))


@pytest.mark.nightly
def test_programs_train_as_under_deepspeed() -> None:
    """Where DeepSpeed can run them: it fails where a tensor that requires a gradient is used by no layer behind."""
    programs = [("transpeeder", True), ("qlora-pipe, always a mask", False), ("diffusion-pipe", False)]
    stock, ours = (
        run_each(2, train, *((program, kind, checkpointed, []) for program, checkpointed in programs))
        for kind in ("deepspeed", "1f1b")
    )
    for (program, _), expected, found in zip(programs, map(whole, stock), map(whole, ours), strict=True):
        if program == "diffusion-pipe":  # gradients of several tensors add up in another order
            assert found[0] == pytest.approx(expected[0], rel=1e-5)
        else:
            assert found == expected, program
