"""Masks, positions, tables and labels beside the hidden states cross stages once, and get no gradient."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec

import ds_dynmo
from ds_dynmo.engine.comm.links import Links
from ds_dynmo.engine.comm.message_forms import Lane, MessageForm, MessageKind
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import VOCABULARY, WIDTH, Block, Embedding, Head, module_of
from tests.support.sliced_layers import SlicedBlock, sliced_layers
from tests.support.training import drop_decision, freeze, outcome_of, partitions, train_and_move, whole
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks

Tensors = tuple[torch.Tensor, ...]
Carry = Callable[[torch.Tensor, Tensors], Tensors]  # of hidden states and a batch: what travels beside them


def bool_mask(hidden: torch.Tensor, batch: Tensors) -> Tensors:
    """A mask before a tensor that has a gradient: DeepSpeed receives that into the mask's memory."""
    return batch[1].bool(), hidden.mean(-1, keepdim=True)


def positions(hidden: torch.Tensor, batch: Tensors) -> Tensors:
    """Position ids that are one row, expanded."""
    return (batch[2],)


def additive_mask(hidden: torch.Tensor, batch: Tensors) -> Tensors:
    return (batch[1],)


def tables(hidden: torch.Tensor, batch: Tensors) -> Tensors:
    """Cosines and sines, made by the first layer."""
    angles = batch[2].to(hidden.dtype)[..., None] * torch.arange(1.0, WIDTH + 1, device=hidden.device)
    return angles.cos(), angles.sin()


def labels(hidden: torch.Tensor, batch: Tensors) -> Tensors:
    """The last layer calculates the loss: of -100 there is none."""
    return (batch[3],)


def odd(hidden: torch.Tensor, batch: Tensors) -> Tensors:
    """A rotary table of complex numbers, no mask, a number, and a mask in bf16, expanded."""
    device = hidden.device
    angles = torch.arange(float(WIDTH), device=device).expand(hidden.shape[1:])
    return (
        torch.polar(torch.ones_like(angles), angles)[None],
        torch.tensor([], device=device),
        torch.tensor(hidden.shape[1], device=device),
        batch[1].bfloat16()[..., None].expand(-1, -1, 2),
    )


def everything(hidden: torch.Tensor, batch: Tensors) -> Tensors:
    return (
        *bool_mask(hidden, batch),
        *additive_mask(hidden, batch),
        *positions(hidden, batch),
        *tables(hidden, batch),
        *labels(hidden, batch),
    )


KINDS: dict[str, Carry] = {
    carry.__name__: carry for carry in (bool_mask, positions, additive_mask, tables, labels, odd, everything)
}


class Carrying(Embedding):
    """Embeds tokens, and begins to carry."""

    def __init__(self, kind: str) -> None:
        super().__init__(1)
        self.kind = kind

    def forward(self, batch: Tensors) -> Tensors:  # type: ignore[override]
        hidden = super().forward(batch[0])
        return hidden, *KINDS[self.kind](hidden, batch)


class Passing(Block):
    """Uses all that is carried, and passes it on."""

    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        hidden, *carried = inputs
        changed = super().forward(hidden)
        for tensor in carried:
            assert tensor.shape[2:] == (1,) or not tensor.requires_grad or not torch.is_grad_enabled()
            if tensor.numel():
                values = (tensor.imag if tensor.is_complex() else tensor).to(hidden.dtype)
                changed = changed + 0.1 * torch.tanh(values if values.dim() in (0, 3) else values[..., None]).mean(
                    -1, True
                )
        means = changed.mean(-1, keepdim=True)
        return changed, *(0.5 * tensor + means if tensor.shape[2:] == (1,) else tensor for tensor in carried)


class Dropping(Head):
    """Uses nothing of what is carried, but labels for its loss."""

    def forward(self, inputs: Tensors) -> torch.Tensor:  # type: ignore[override]
        logits = super().forward(inputs[0])
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), inputs[-1].reshape(-1)) if is_labels(inputs) else logits


def is_labels(inputs: Tensors) -> bool:
    return inputs[-1].dtype == torch.int64 and bool((inputs[-1] == -100).any())


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs if outputs.dim() == 0 else F.cross_entropy(outputs.reshape(-1, VOCABULARY), labels.reshape(-1))


def data(lengths: Sequence[int] = (5,), replica: int = 0) -> Iterator[Any]:
    """Tokens, an additive mask, positions and labels; of 3 micro-batches each, sequences of the next of ``lengths``."""
    number = 0
    while True:
        length = lengths[number // 3 % len(lengths)]
        generator = torch.Generator().manual_seed(100 * replica + number)
        tokens = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        mask = torch.where(torch.rand(2, length, generator=generator) < 0.3, -10.0, 0.0)
        targets = tokens.roll(-1, 1).masked_fill(mask < 0, -100)
        targets[:, -1] = -100
        yield (tokens, mask, torch.arange(length).expand(2, -1), targets), targets
        number += 1


def engine_of(case: Case, make_layers: Callable[[Case], list[Any]], **options: Any) -> Any:
    module = module_of(case, make_layers, loss_fn=loss, **options)
    return ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=config(case))[0]


def carrying_layers(kind: str) -> Callable[[Case], list[Any]]:
    def layers(case: Case) -> list[Any]:
        blocks = [LayerSpec(Passing, index) for index in range(case.num_layers - 2)]
        return [LayerSpec(Carrying, kind), *blocks, LayerSpec(Dropping, 2)]

    return layers


def train(
    case: Case,
    kind: str,
    moves: Sequence[Sequence[int]],
    lengths: Sequence[int] = (5,),
    dynamic: bool = False,
    frozen: Mapping[int, int] = MappingProxyType({}),
) -> Any:
    """Evaluate, and train 5 batches.

    Args:
        lengths: of the sequences of each batch, in turns.
        dynamic: the shapes of every message are announced; else, where there are several lengths, those of a batch.
        frozen: by number of a batch, how many leading layers are frozen from then on.
    """
    engine = engine_of(case, carrying_layers(kind), dynamic_shape=dynamic)
    replica, waiting, losses = engine.grid.get_data_parallel_id(), list(moves), []
    evaluation = engine.eval_batch(data(lengths, replica)).item()
    batches = data(lengths, replica)
    for step in range(5):
        if step in frozen:
            freeze(engine, frozen[step])
            engine.model_changed(f"{frozen[step]} layers are frozen")
            drop_decision(engine)
        if len(lengths) > 1 and not dynamic:
            engine.reset_activation_shape()
        losses.append(engine.train_batch(batches).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return {**outcome_of(engine, losses), "evaluation": evaluation}


def block_of(**more: Any) -> dict[str, Any]:
    return {"interval": 0, "profile": {"batches": 1, "warmup_batches": 0}, **more}


STAGES = Case(stages=3, blocks=4, dynmo=block_of())
ZERO_BUBBLE = block_of(schedule={"kind": "zero_bubble"})
MOVES = [[0, 1, 4, 7], [0, 4, 6, 7], [0, 2, 3, 7]]
CHECKPOINTED = {"checkpoint_interval": 1}
THAWED = {1: 3, 4: 0}  # the layers move before batches 1, 2 and 3, so thawing alone tells stages anew
WAYS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    **{kind: ({}, (kind,)) for kind in KINDS},
    "zero bubble": ({"dynmo": ZERO_BUBBLE}, ("everything",)),
    "checkpointed": (CHECKPOINTED, ("everything",)),
    "frozen for a time": ({}, ("everything", (5,), False, THAWED)),
    "shapes announced anew": ({"dynmo": ZERO_BUBBLE}, ("odd", (5, 3, 6))),
    "checkpointed, frozen for a time": (CHECKPOINTED, ("everything", (5,), False, THAWED)),
}


def check_as_on_one_stage(ways: Mapping[str, tuple[Case, tuple[Any, ...]]], moves: Sequence[Sequence[int]]) -> None:
    """Train in ``ways``, all with as many ranks, and with the same number of replicas on one stage."""
    some = next(iter(ways.values()))[0]
    alone = [(replace(case, stages=1), kind, [], *more) for case, (kind, *more) in ways.values()]
    several = [(case, kind, moves, *more) for case, (kind, *more) in ways.values()]
    expected, found = run_each(some.replicas, train, *alone), run_each(some.ranks, train, *several)
    for name, one, result in zip(ways, expected, found, strict=True):
        assert result[0]["partition"] == moves[-1], name
        for what in ("losses", "evaluation"):
            assert [each[what] for each in result] == some.ranks * [one[0][what]], (name, what)
        assert whole(result) == whole(one), name


@pytest.mark.parametrize(
    "ways", [["checkpointed, frozen for a time"], pytest.param([*WAYS][:-1], marks=pytest.mark.nightly)]
)
def test_what_travels_beside_hidden_states_trains_as_on_one_stage(ways: list[str]) -> None:
    check_as_on_one_stage({name: (replace(STAGES, **WAYS[name][0]), WAYS[name][1]) for name in ways}, MOVES)


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("v", ["shapes announced anew"]),
        *(pytest.param(kind, [*WAYS], marks=pytest.mark.nightly) for kind in ("v", "loop")),
    ],
)
def test_so_it_does_in_two_chunks_per_stage(kind: str, ways: list[str]) -> None:
    """Also on the way to a chain and back."""
    block = {"dynmo": block_of(schedule={"kind": kind})}
    check_as_on_one_stage(
        {name: (replace(STAGES, **{**WAYS[name][0], **block}), WAYS[name][1]) for name in ways},
        [[0, 1, 2, 3, 4, 5, 7], [0, 1, 4, 7], [0, 2, 3, 4, 5, 6, 7]],
    )


def drawn(seed: int) -> tuple[dict[str, tuple[Case, tuple[Any, ...]]], list[list[int]]]:
    """Draw 4 ways of 2 or 3 stages and of 1 or 2 replicas."""
    chooser = random.Random(seed)
    ways = {}
    stages, replicas = chooser.choice([(3, 1), (2, 2), (4, 1)])
    for number in range(4):
        case = replace(
            STAGES,
            stages=stages,
            replicas=replicas,
            checkpoint_interval=chooser.choice([0, 0, 1, 2]),
            reentrant=chooser.random() < 0.7,
            precision=chooser.choice(["fp32", "bf16", "bf16 zero1", "fp32 zero1"]),
            dynmo=block_of(schedule={"kind": chooser.choice(["1f1b", "zero_bubble", "auto"])}),
        )
        lengths = chooser.choice([(5,), (5, 3, 6), (6, 2)])
        frozen = chooser.choice([{}, THAWED, {1: 2}, {2: 4}, {1: 1, 2: 5, 4: 2}])
        ways[f"{seed}.{number}"] = case, (chooser.choice([*KINDS]), lengths, chooser.random() < 0.5, frozen)
    return ways, [*partitions(case, seed, 4)]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_so_it_does_in_any_way(seed: int) -> None:
    check_as_on_one_stage(*drawn(seed))


def tensors_sent(case: Case) -> dict[str, list[tuple[torch.dtype, int]]]:
    """Return dtype and bytes of what this stage sends in its second batch, forward and back."""
    engine = engine_of(case, carrying_layers("everything"))
    batches = data()
    engine.train_batch(batches)
    sent: dict[str, list[tuple[torch.dtype, int]]] = {"forward": [], "back": []}
    bare = Links.send

    def send(self: Links, lane: Lane, tensors: Sequence[torch.Tensor], form: MessageForm) -> None:
        way = sent["forward" if lane.kind is MessageKind.ACTIVATION else "back"]
        way += [(tensor.dtype, tensor.nbytes) for tensor in tensors]
        bare(self, lane, tensors, form)

    Links.send = send  # type: ignore[method-assign]
    engine.train_batch(batches)
    Links.send = bare  # type: ignore[method-assign]
    return sent


HIDDEN, MEANS = (torch.float32, 2 * 5 * WIDTH * 4), (torch.float32, 2 * 5 * 4)
BOOLS, ADDED, IDS = (torch.bool, 2 * 5), (torch.float32, 2 * 5 * 4), (torch.int64, 2 * 5 * 8)


@pytest.mark.parametrize("block", [pytest.param(block_of(), marks=pytest.mark.nightly), ZERO_BUBBLE])
def test_each_tensor_crosses_a_boundary_once_and_two_of_eight_go_back(block: dict[str, Any]) -> None:
    """Back go the gradients of the hidden states, and of the means, which depend on them."""
    carried = [BOOLS, MEANS, ADDED, IDS, HIDDEN, HIDDEN, IDS]  # positions, cosines, sines and labels at the end
    forward, back = 3 * [HIDDEN, *carried], 3 * [HIDDEN, MEANS]
    sent = run(3, tensors_sent, replace(STAGES, dynmo=block), backend="gloo")  # elsewhere batches of messages are sent
    assert [stage["forward"] for stage in sent] == [forward, forward, []]
    assert [stage["back"] for stage in sent] == [[], back, back]


class MaskingEmbedding(Embedding):
    def forward(self, batch: Tensors) -> Tensors:  # type: ignore[override]
        return super().forward(batch[0]), batch[1], batch[2], *tables(batch[1], batch)


class MaskedSlice(SlicedBlock):
    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        hidden, mask, positions, cosines, sines = inputs
        seen = (mask[..., None].exp() * cosines).to(hidden.dtype)
        return super().forward(hidden + seen), mask, positions, cosines, sines


def masked_slices(case: Case) -> list[Any]:
    _, *blocks, _ = sliced_layers(case, MaskedSlice)
    return [LayerSpec(MaskingEmbedding, 1), *blocks, LayerSpec(Dropping, 2)]


CHAINS_OF_TWO = [[0, 2, 6], [0, 5, 6]]


def train_sliced(case: Case, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    engine = engine_of(case, masked_slices)
    return outcome_of(engine, train_and_move(engine, data(replica=engine.grid.get_data_parallel_id()), moves, 3))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "moves"),
    [
        ({}, CHAINS_OF_TWO),
        ({"checkpoint_interval": 1, "dynmo": ZERO_BUBBLE}, CHAINS_OF_TWO),
        ({"replicas": 2, "precision": "bf16 zero1"}, CHAINS_OF_TWO),
        ({"dynmo": block_of(schedule={"kind": "v"})}, [[0, 1, 3, 4, 6], [0, 2, 3, 5, 6]]),
        ({"dynmo": block_of(schedule={"kind": "loop"})}, [[0, 5, 6], [0, 1, 2, 5, 6]]),
    ],
)
def test_tables_cross_stages_whose_messages_are_split_over_slices(
    settings: dict[str, Any], moves: list[list[int]]
) -> None:
    """DeepSpeed waits for a gradient of each, which nobody sends."""
    case = replace(Case(slices=2, blocks=4, dynmo=block_of()), **settings)
    alone = run(case.ranks // 2, train_sliced, replace(case, stages=1), [])
    result = run(case.ranks, train_sliced, case, moves)
    assert [one["losses"] for one in result] == case.ranks * [alone[0]["losses"]]
    assert whole(result) == whole(alone)


@pytest.mark.nightly
def test_thawing_under_a_schedule_of_ours_equals_1f1b() -> None:
    check_as_under_1f1b(3, train, replace(STAGES, micro_batches=6), "everything", MOVES, (5,), False, THAWED)
