"""Parameters that become some of their elements train as dense ones with a mask, and take less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo.errors import ConfigError
from tests.distributed.harness import run, run_each
from tests.distributed.support.configs import Case
from tests.distributed.support.models import WIDTH, Embedding, layers, seeded
from tests.distributed.support.training import (
    batches,
    build,
    drop_decision,
    layers_of,
    outcome_of,
    state,
    whole,
)

INNER = 5


class Pruned(nn.Module):
    """A residual layer that multiplies by some elements of a weight: scattered into a dense one in every use, or its
    product with a mask."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((INNER, WIDTH), index))
        self.back = nn.Parameter(seeded((WIDTH, INNER), index + 50))
        self.register_buffer("places", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight.dim() == 1:
            weight = weight.new_zeros(INNER * WIDTH).index_put((self.places,), weight).view(INNER, WIDTH)
        return hidden + torch.tanh(hidden @ weight.t()) @ self.back.t()

    def load_signal(self) -> float:
        return self.weight.numel() / (INNER * WIDTH)


def pruned_layers(case: Case) -> list[Any]:
    return [LayerSpec(Embedding, 1), *[LayerSpec(Pruned, i) for i in range(case.blocks)], *layers(case)[-2:]]


def places_of(index: int, stage: int) -> torch.Tensor:
    """Return which elements of layer ``index`` stay in the first and in the second pruning."""
    order = torch.randperm(INNER * WIDTH, generator=torch.Generator().manual_seed(index))
    share = [(30, 8), (37, 21), (20, 3)][index % 3]
    return order[: share[stage]].sort().values


def prune(engine: Any, stage: int, layers: Sequence[int], *, shrinks: bool) -> None:
    """Prune by making parameters shorter, or by zeros that stay."""
    here = {index: module for index, module in layers_of(engine).items() if index in layers}
    if shrinks:
        kept = []
        for index, module in here.items():
            places = places_of(index, stage)
            old = module.places
            kept.append((module, "weight", places if old is None else torch.searchsorted(old, places)))
            module.places = places
        engine.keep_elements(kept)
    else:
        for index, module in here.items():
            module.places = places_of(index, stage)
            engine.zero_elements(module.weight, pruned_of(module))
    engine.model_changed("pruned")
    drop_decision(engine)


def pruned_of(module: Pruned) -> torch.Tensor:
    found = torch.ones(INNER * WIDTH, dtype=torch.bool)
    found[module.places] = False
    return found.view(INNER, WIDTH)


def train_pruned(case: Case, *, shrinks: bool, moves: dict[int, list[int]]) -> dict[str, Any]:
    """Train, and prune twice. A second pruning takes from layers that moved."""
    engine = build(case, pruned_layers)
    if not shrinks:
        engine.before_step(
            lambda: engine.zero_gradients(
                (module.weight, pruned_of(module))
                for module in layers_of(engine).values()
                if getattr(module, "places", None) is not None
            )
        )
    data, losses = batches(engine), []
    for step in range(6):
        if step in (2, 4):
            prune(engine, step // 2 - 1, range(1, 4) if step == 2 else range(2, 5), shrinks=shrinks)
        if step in moves:
            engine.rebalance(moves[step])
        losses.append(engine.train_batch(data).item())
    return {**outcome_of(engine, losses), "places": places(engine)}


def places(engine: Any) -> dict[int, list[int]]:
    found = {index: getattr(module, "places", None) for index, module in layers_of(engine).items()}
    return {index: kept.tolist() for index, kept in found.items() if kept is not None}


def shortened(dense: dict[str, Any], places: dict[int, list[int]]) -> dict[str, Any]:
    """Take of every tensor of the pruned weights the elements that stay."""
    found = dict(dense)
    for index, kept in places.items():
        for key, value in dense.items():
            if key.partition("/")[0] == f"{index}.weight" and isinstance(value, bytes) and not key.endswith("/step"):
                size = len(value) // (INNER * WIDTH)
                assert size, key
                found[key] = b"".join(value[size * place :][:size] for place in kept)
    return found


CASES = [
    Case(clip=0.0),
    Case(clip=0.0, optimizer="SGD", groups="two"),
    Case(clip=0.0, precision="bf16", groups="two"),
    Case(clip=0.0, replicas=2, precision="bf16 zero1", groups="two"),
    Case(clip=0.0, replicas=2, precision="fp32 zero1"),
]
MOVES = {2: [0, 2, 8], 3: [0, 4, 8], 4: [0, 6, 8], 5: [0, 3, 8]}


def both(case: Case) -> list[dict[str, Any]]:
    dense = train_pruned(case, shrinks=False, moves={})
    return [dense, train_pruned(case, shrinks=True, moves=MOVES)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_trains_as_a_dense_weight_with_a_mask(replicas: int) -> None:
    cases = [case for case in CASES if case.replicas == replicas]
    for case, ranks in zip(cases, run_each(2 * replicas, both, *((case,) for case in cases))):
        dense, short = ([result[way] for result in ranks] for way in range(2))
        assert short[0]["moved"] > 0, case
        assert [result["losses"] for result in short] == [result["losses"] for result in dense], case
        kept = {index: found for result in short for index, found in result["places"].items()}
        assert sorted(kept) == [1, 2, 3, 4] and whole(short) == shortened(whole(dense), kept), case


# -- what is refused ----------------------------------------------------------------------------------


def tied_at_the_ends(case: Case) -> list[Any]:
    made = pruned_layers(case)
    ends = layers(replace(case, tied=True))
    return [ends[0], *made[1:-1], ends[-1]]


def refused(case: Case) -> list[str]:
    """Pass what cannot be kept, on the rank that has it; return the messages. Nothing changes."""
    engine = build(case, tied_at_the_ends)
    data = batches(engine)
    engine.train_batch(data)
    here, replica = layers_of(engine), engine.grid.get_data_parallel_id()
    first = torch.arange(3)
    wrong: list[tuple[int, str, Any]] = [
        (1, "weight", torch.tensor([0, 40])),
        (1, "weight", torch.tensor([-1, 4])),
        (1, "weight", torch.tensor([4, 4])),
        (4, "weight", torch.tensor([5, 4])),
        (4, "weight", torch.ones(40, dtype=torch.bool)),
        (4, "weight", [0, 1]),
        (1, "weights", first),
        (0, "weight", first),
        (1, "weight", first + replica),
    ]
    given: list[list[Any]] = [[(here[i], name, index)] if i in here else [] for i, name, index in wrong]
    given.append([(nn.Linear(2, 2), "weight", first)] if engine.global_rank == 0 else [])
    given.append([(here[4], "back", first), (here[4], "back", first)] if 4 in here else [])
    before = state(engine)
    found = []
    for kept in given:
        with pytest.raises(ConfigError) as error:
            engine.keep_elements(kept)
        found.append(str(error.value))
    engine.before_step(lambda: engine.keep_elements([]))
    with pytest.raises(ConfigError) as error:
        engine.train_batch(data)
    found.append(str(error.value))
    with pytest.raises(ConfigError) as error:  # that batch has not ended
        engine.keep_elements([])
    found.append(str(error.value))
    assert state(engine) == before
    return found


def test_what_cannot_be_kept_is_refused_by_name_on_every_rank() -> None:
    case = Case(replicas=2, precision="bf16 zero1", micro_batches=1)
    results = run(4, refused, case)
    assert all(result == results[0] for result in results)
    expected = [
        "layer 1: weight: the index goes from 0 to 40; allowed are 0 to 39, places in the flattened parameter of",
        "layer 1: weight: the index goes from -1 to 4; allowed are 0 to 39",
        "layer 1: weight: the index is not in ascending order",
        "layer 4: weight: the index is not in ascending order",
        "layer 4: weight: the index is [40] of torch.bool; allowed is a 1-D tensor of int32 or int64",
        "layer 4: weight: the index is list",
        "layer 1: weights is no parameter; Pruned has ['weight', 'back']",
        "layer 0: weight is tied",
        "ranks 0 and 1 are replicas of stage 0 and would keep different elements",
        "rank 0: 'weight' of a Linear, which is in no layer of this stage",
        "layer 4: back is given twice",
        "was called inside a batch",
        "rank 0: the optimizer's flat buffers hold gradients of a batch",
    ]
    for message, part in zip(results[0], expected, strict=True):
        assert part in message and message.startswith("engine.keep_elements")


def refusals() -> list[Any]:
    found = [build(Case(optimizer=name)).keep_elements_refusal() for name in ("AdamW", "SGD", "Adafactor")]
    engine = build(Case(optimizer="Adafactor"), pruned_layers)
    layer = layers_of(engine).get(1 + 3 * engine.stage_id)
    with pytest.raises(ConfigError) as error:
        engine.keep_elements([(layer, "weight", torch.arange(3))])
    return [*found, str(error.value)]


def test_optimizers_with_state_of_rows_are_refused() -> None:
    for alike, also, reason, message in run(2, refusals):
        assert alike is also is None
        assert reason.startswith("optimizer is Adafactor, which may treat elements by their rows") and reason in message
