"""The memory that stages hold while layers move is as predicted, and a move that does not fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.partitioners import migration_peaks
from ds_dynmo.placement import Placement
from ds_dynmo.plan import HeldBytes, MigrationPlan
from tests.support.checkpoints import STEPS, train_on
from tests.support.configs import PRECISIONS, Case
from tests.support.harness import run
from tests.support.memory import BESIDE, TensorBytes, held_now
from tests.support.models import WIDTH, Embedding, Head, project
from tests.support.training import batches, build, move_in_phases, state

pytestmark = pytest.mark.ranks

THERE_AND_BACK = [[0, 3, 12], [0, 9, 12], [0, 6, 12]]


class Wide(nn.Module):
    """A layer that is large compared with all other tensors; sizes differ."""

    def __init__(self, index: int) -> None:
        super().__init__()
        inner = 4096 * (2 + index % 3)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.register_buffer("mask", torch.ones(inner))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))) * self.mask.to(hidden.dtype))


class OwnWide(Wide):
    """The same layer, of which every replica has others."""

    def use_replicas(self, group: Any) -> None:
        for parameter in (*self.up.parameters(), *self.down.parameters()):
            parameter.replica_own = True  # type: ignore[attr-defined]


def own_layers(case: Case) -> list[Any]:
    first, *_, flat, last = wide_layers(case)
    return [first, *[LayerSpec(OwnWide, index) for index in range(case.blocks)], flat, last]


class OpaqueWide(Wide):
    """The same layer, which cannot be pickled, and counts how many of it this rank has built."""

    built = 0

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.activation = lambda hidden: hidden
        OpaqueWide.built += 1


def opaque_layers(case: Case) -> list[Any]:
    first, *_, flat, last = wide_layers(case)
    return [first, *[LayerSpec(OpaqueWide, index) for index in range(case.blocks)], flat, last]


def wide_layers(case: Case) -> list[Any]:
    ends: list[Any] = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    if case.tied:
        ends = [TiedLayerSpec("tied", Embedding, 1), TiedLayerSpec("tied", Embedding, 1, forward_fn=project)]
    return [ends[0], *[LayerSpec(Wide, index) for index in range(case.blocks)], nn.Identity(), ends[1]]


def peaks(
    case: Case, moves: Sequence[Sequence[int]], make_layers: Any = wide_layers
) -> list[tuple[int, int, int, int]]:
    """Return, per move, the bytes that this rank held before, the peak, and the predictions of both."""
    engine = build(case, make_layers)
    data, found = batches(engine), []
    for new in moves:
        engine.train_batch(data), engine.train_batch(data)
        held, uses = held_now(engine)[0], engine.stage.layers.first_uses()
        plan = MigrationPlan.between(engine.partition, new)
        said = migration_peaks(plan, held, uses)[engine.stage_id]
        with TensorBytes() as tensors:
            engine.rebalance(new)
        resting = sum((held[layer] for layer in plan.old.layers_of(engine.stage_id)), start=HeldBytes()).total
        found.append((tensors.began, tensors.peak, resting, said))
    return found


def peaks_in_training(case: Case, moves: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return, per move while a batch trains, the peak of this rank and its prediction."""
    for settings in PRECISIONS.values():  # else ZeRO allocates gigabytes that hide all else
        settings.get("zero_optimization", {})["reduce_bucket_size"] = 1000
    engine = build(case, wide_layers)
    data, found = batches(engine), []
    take_step = engine._take_model_step

    def take_uncounted_step(*args: Any, **kwargs: Any) -> None:
        TensorBytes.in_step = True
        take_step(*args, **kwargs)
        TensorBytes.in_step = False

    engine._take_model_step = take_uncounted_step
    for new in moves:
        engine.train_batch(data), engine.train_batch(data)
        with TensorBytes() as tensors:
            engine.train_batch(data)
        (held, in_training), uses = held_now(engine), engine.stage.layers.first_uses()
        plan = MigrationPlan.between(engine.partition, new)
        activations = tensors.peak - sum(in_training[layer] for layer in plan.old.layers_of(engine.stage_id))
        both = {"training_bytes": in_training, "activation_bytes": [activations] * engine.num_stages}
        said = migration_peaks(plan, held, uses, **both)[engine.stage_id]
        engine.rebalance(new, background=True)
        with TensorBytes() as tensors:
            engine.train_batch(data)
        assert engine.partition == list(new)
        found.append((tensors.peak, said))
    return found


@pytest.mark.parametrize(
    ("case", "moves"),
    [
        *[(Case(blocks=9, precision=name), THERE_AND_BACK) for name in ("fp32", "bf16", "bf16 zero1", "fp32 zero1")],
        (Case(blocks=9, precision="bf16 zero1", replicas=2, groups="two"), THERE_AND_BACK),
        (Case(blocks=9, precision="bf16 zero1 fp32sums"), THERE_AND_BACK),
        (Case(blocks=9, precision="fp32", stages=3, tied=True, groups="two"), [[0, 2, 5, 12], [0, 6, 10, 12]]),
        (Case(blocks=9, precision="bf16 zero1", stages=3, tied=True), [[0, 2, 5, 12], [0, 6, 10, 12]]),
    ],
    ids=lambda value: f"{value.precision}-{value.stages}x{value.replicas}" if isinstance(value, Case) else "",
)
def test_the_peak_of_a_move_is_as_predicted(case: Case, moves: Sequence[Sequence[int]]) -> None:
    check_peaks(run(case.ranks, peaks, case, moves))


@pytest.mark.nightly
def test_the_peak_of_a_move_is_as_predicted_where_replicas_differ() -> None:
    case = Case(blocks=9, precision="bf16 zero1", replicas=2)
    check_peaks(run(case.ranks, peaks, case, THERE_AND_BACK, own_layers))


def opaque_peaks(case: Case, moves: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int, int, int]], int]:
    """Return :func:`peaks`, and how many such layers this rank has built."""
    found = peaks(case, moves, opaque_layers)
    return found, OpaqueWide.built


def test_a_layer_that_cannot_be_pickled_is_built_once_beside_nothing_else() -> None:
    """Its receiver builds it before there is memory for what arrives."""
    case, moves = Case(blocks=2), [[0, 1, 5], [0, 3, 5]]
    ranks = run(case.ranks, opaque_peaks, case, moves)
    check_peaks([found for found, _ in ranks])
    assert [built for _, built in ranks] == [2 + 2, 0 + 2]  # of the first stage, and arriving


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1", "fp32 zero1"])
def test_the_peak_of_a_move_during_a_batch_is_as_predicted(precision: str) -> None:
    case = Case(blocks=9, precision=precision)
    for rank in run(case.ranks, peaks_in_training, case, THERE_AND_BACK):
        for peak, said in rank:
            assert 0.95 * peak - BESIDE <= said <= 1.05 * peak  # a batch leaves more or less beside its layers


def check_peaks(ranks: Sequence[Sequence[tuple[int, int, int, int]]]) -> None:
    for rank in ranks:
        for began, peak, resting, said in rank:
            assert resting <= began <= resting + BESIDE  # the layers, and what the batch left
            held = peak - (began - resting)
            assert held - BESIDE <= said <= 1.05 * held


@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1 fp32sums"])
def test_gradients_make_room_for_weights_and_shards(precision: str) -> None:
    case = Case(blocks=9, precision=precision)
    for rank in run(case.ranks, peaks, case, THERE_AND_BACK):
        before = [resting for _, _, resting, _ in rank]
        for (_, peak, _, _), old, new in zip(rank, before, before[1:]):
            assert peak <= 1.05 * max(old, new) + BESIDE  # at most what a stage holds before or after the move


def with_limit(engine: Any, limit: int | None) -> None:
    engine.rebalancer.decider.memory.limit = limit


def refused(case: Case, how: str) -> dict[str, Any]:
    """Ask for a move that needs one byte too many, train on, and ask again with that byte."""
    engine, overlapped = build(case, wide_layers), how == "overlapped"
    data, new = batches(engine), [0, 3, case.num_layers]
    losses = [engine.train_batch(data).item() for _ in range(2)]
    if how == "shrink":
        plan = MigrationPlan.between(
            engine.partition, Placement.chain([0, case.num_layers, case.num_layers], empty=[1])
        )
    else:
        plan = MigrationPlan.between(engine.partition, new)
    held, in_training = held_now(engine)
    uses, meanwhile = engine.stage.layers.first_uses(), in_training if overlapped else None
    needed = max(migration_peaks(plan, held, uses, training_bytes=meanwhile))
    ask = {
        "rebalance": lambda: engine.rebalance(new),
        "overlapped": lambda: move_in_phases(
            engine, new, overlapped=True, check=engine.rebalancer.decider.memory.check
        ),
        "shrink": lambda: engine.repack(partition=[0, case.num_layers]),
    }[how]
    before, message, harmless = state(engine), "", False
    with_limit(engine, needed - 1)
    try:
        ask()
    except ds_dynmo.MigrationError as error:
        message, harmless = str(error), error.harmless
    same = state(engine) == before
    losses += [engine.train_batch(data).item() for _ in range(2)]
    with_limit(engine, needed)
    ask()
    if not engine.released:
        losses += [engine.train_batch(data).item() for _ in range(2)]
    where = None if engine.released else engine.partition
    return {
        "message": message,
        "harmless": harmless,
        "numbers": (needed, needed - 1),
        "same": same,
        "losses": losses,
        "partition": where,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
@pytest.mark.parametrize("how", ["rebalance", "overlapped", "shrink"])
def test_a_move_that_does_not_fit_is_refused_before_a_byte_moves(how: str, precision: str) -> None:
    case = Case(blocks=9, precision=precision, clip=0.0)
    results = run(2, refused, case, how)
    untouched = run(2, refused, case, "rebalance") if how == "shrink" else results
    for result, other in zip(results, untouched):
        assert result["harmless"] and result["same"]
        assert all(str(number) in result["message"] for number in result["numbers"])
        assert "No layer has moved" in result["message"]
        assert result["losses"][:4] == other["losses"][:4]
    assert results[0]["message"] == results[1]["message"]
    assert results[0]["partition"] == ([0, 12] if how == "shrink" else [0, 3, 12])


def load_with_limits(case: Case, folder: str) -> tuple[list[float], list[tuple[list[int], list[float]]]]:
    """Save, and load where the move to the saved partition needs one byte too many, and where it fits.

    Returns:
        Losses after the save, and per load the partition and losses afterwards.
    """
    engine = build(case, wide_layers)
    here, there = engine.partition, [0, 3, case.num_layers]
    train_on(engine, 0)
    engine.rebalance(there)
    engine.save_checkpoint(folder)
    losses, found = train_on(engine, STEPS), []
    for missing in (1, 0):
        engine.rebalance(here)
        peaks = migration_peaks(
            MigrationPlan.between(here, there), held_now(engine)[0], engine.stage.layers.first_uses()
        )
        with_limit(engine, max(peaks) - missing)
        engine.load_checkpoint(folder)
        with_limit(engine, None)
        found.append((engine.partition, train_on(engine, STEPS)))
    return losses, found


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_a_checkpoint_loads_where_layers_are_if_they_cannot_move(precision: str, tmp_path: Path) -> None:
    case = Case(blocks=9, precision=precision, clip=0.0)
    for losses, (stayed, moved) in run(2, load_with_limits, case, str(tmp_path)):
        assert stayed == ([0, 6, 12], losses) and moved == ([0, 3, 12], losses)


def disagree(limit: int) -> str:
    """One rank asks for the present partition, the other for another one."""
    engine = build(Case(dynmo={"interval": 0, "memory_limit": f"{limit}B"}))
    engine.train_batch(batches(engine))
    try:
        engine.rebalance([0, 4 + engine.stage_id, 8])
    except ds_dynmo.MigrationError as error:
        return str(error)
    return ""


def test_disagreement_of_ranks_is_reported_before_memory() -> None:
    for message in run(2, disagree, 1):
        assert (
            "ranks differ: [0, 4, 8] -> [0, 4, 8] on ranks [0], [0, 4, 8] -> [0, 5, 8] on ranks [1]. No layer has moved"
            in message
        )
