"""The memory that stages hold while layers move is as predicted, and a move that does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tests.support.harness import run, run_each
from tests.support.memory import BESIDE, TensorBytes, held_now
from tests.support.models import WIDTH, Embedding, Head, project
from tests.support.training import batches, build, move_in_phases, state

pytestmark = pytest.mark.ranks

THERE_AND_BACK = [[0, 3, 12], [0, 9, 12], [0, 6, 12]]
OTHERS = [pytest.param(name, marks=pytest.mark.nightly) for name in ("fp32", "bf16", "fp32 zero1")]


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
        engine.train_batch(data)
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
    engine.train_batch(data)
    for new in moves:
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
    "case",
    [
        Case(blocks=9, micro_batches=2, precision="bf16 zero1", stages=3, tied=True),
        *[
            pytest.param(case, marks=pytest.mark.nightly)
            for case in (
                *(Case(blocks=9, micro_batches=2, precision=name) for name in ("fp32", "bf16 zero1", "fp32 zero1")),
                Case(blocks=9, micro_batches=2, precision="bf16 zero1", replicas=2, groups="two"),
                Case(blocks=9, micro_batches=2, precision="fp32", stages=3, tied=True, groups="two"),
            )
        ],
    ],
    ids=lambda case: f"{case.precision}-{case.stages}x{case.replicas}",
)
def test_the_peak_of_a_move_is_as_predicted(case: Case) -> None:
    moves = THERE_AND_BACK if case.stages == 2 else [[0, 2, 5, 12], [0, 6, 10, 12]]
    check_peaks(run(case.ranks, peaks, case, moves))


@pytest.mark.nightly
def test_the_peak_of_a_move_is_as_predicted_where_replicas_differ() -> None:
    case = Case(blocks=9, micro_batches=2, precision="bf16 zero1", replicas=2)
    check_peaks(run(case.ranks, peaks, case, THERE_AND_BACK, own_layers))


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.nightly), "bf16 zero1 fp32sums"])
def test_gradients_make_room_for_weights_and_shards(precision: str) -> None:
    case = Case(blocks=9, micro_batches=2, precision=precision)
    ranks = run(case.ranks, peaks, case, THERE_AND_BACK)
    check_peaks(ranks)
    for rank in ranks:
        before = [resting for _, _, resting, _ in rank]
        for (_, peak, _, _), old, new in zip(rank, before, before[1:]):
            assert peak <= 1.05 * max(old, new) + BESIDE  # at most what a stage holds before or after the move


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


def check_peaks(ranks: Sequence[Sequence[tuple[int, int, int, int]]]) -> None:
    for rank in ranks:
        for began, peak, resting, said in rank:
            assert resting <= began <= resting + BESIDE  # the layers, and what the batch left
            held = peak - (began - resting)
            assert held - BESIDE <= said <= 1.05 * held


@pytest.mark.parametrize("precision", ["bf16 zero1", *OTHERS])
def test_the_peak_of_a_move_during_a_batch_is_as_predicted(precision: str) -> None:
    case = Case(blocks=9, micro_batches=2, precision=precision)
    for rank in run(case.ranks, peaks_in_training, case, THERE_AND_BACK[:2]):
        for peak, said in rank:
            assert 0.95 * peak - BESIDE <= said <= 1.05 * peak  # a batch leaves more or less beside its layers


def with_limit(engine: Any, limit: int | None) -> None:
    engine.rebalancer.decider.memory.limit = limit


def refusal(ask: Callable[[], Any]) -> tuple[str, bool]:
    """Return the message of the error that a move raises, and whether it is harmless."""
    try:
        ask()
    except ds_dynmo.MigrationError as error:
        return str(error), error.harmless
    return "", False


def asked(case: Case, asks: bool) -> dict[str, Any]:
    """Ask in three ways for a move that needs one byte too many, train on, and ask again with that byte."""
    engine, end = build(case, wide_layers), case.num_layers
    data, uses = batches(engine), engine.stage.layers.first_uses
    check = engine.rebalancer.decider.memory.check
    ways: list[tuple[Any, Callable[[], Any]]] = [
        ([0, 3, end], lambda: engine.rebalance([0, 3, end])),
        ([0, 9, end], lambda: move_in_phases(engine, [0, 9, end], overlapped=True, check=check)),
        (Placement.chain([0, end, end], empty=[1]), lambda: engine.repack(partition=[0, end])),
    ]
    result: dict[str, Any] = {"losses": [engine.train_batch(data).item() for _ in range(2)], "refused": [], "went": []}
    for number, (new, ask) in enumerate(ways):
        if asks:
            held, in_training = held_now(engine)
            plan = MigrationPlan.between(engine.partition, new)
            needed = max(migration_peaks(plan, held, uses(), training_bytes=in_training if number == 1 else None))
            before = state(engine), engine.partition
            with_limit(engine, needed - 1)
            message, harmless = refusal(ask)
            assert message, f"layers moved to {new}"
            result["refused"].append((needed, message, harmless, (state(engine), engine.partition) == before))
        result["losses"].append(engine.train_batch(data).item())
        if asks:
            with_limit(engine, needed)
            ask()
            if engine.released:
                return result
            result["went"].append(engine.partition)
        if asks and number == 1:
            with_limit(engine, 1)
            result["differ"], _ = refusal(lambda: engine.rebalance([0, 9 + engine.stage_id, end]))
    with_limit(engine, None)
    result["losses"].append(engine.train_batch(data).item())
    return result


def test_a_move_that_does_not_fit_is_refused_before_a_byte_moves() -> None:
    """By hand, during a batch, and onto fewer stages; that ranks disagree is said before memory."""
    case = Case(blocks=9, micro_batches=2, precision="bf16 zero1", clip=0.0)
    still, ranks = run_each(2, asked, (case, False), (case, True))
    for result, other in zip(ranks, still):
        for needed, message, harmless, same in result["refused"]:
            assert harmless and same and "No layer has moved" in message, message
            assert str(needed) in message and str(needed - 1) in message, message
        assert result["refused"] == ranks[0]["refused"] and len(result["refused"]) == 3
        both = "[0, 9, 12] -> [0, 9, 12] on ranks [0], [0, 9, 12] -> [0, 10, 12] on ranks [1]. No layer has moved"
        assert f"ranks differ: {both}" in result["differ"]
        assert result["losses"] == other["losses"][: len(result["losses"])]
    assert ranks[0]["went"] == [[0, 3, 12], [0, 9, 12], [0, 12]] and ranks[1]["went"] == [[0, 3, 12], [0, 9, 12]]


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
    losses, found = train_on(engine, STEPS, 2), []
    for missing in (1, 0):
        engine.rebalance(here)
        plan, held = MigrationPlan.between(here, there), held_now(engine)[0]
        with_limit(engine, max(migration_peaks(plan, held, engine.stage.layers.first_uses())) - missing)
        engine.load_checkpoint(folder)
        with_limit(engine, None)
        found.append((engine.partition, train_on(engine, STEPS, 2)))
    return losses, found


def test_a_checkpoint_loads_where_layers_are_if_they_cannot_move(tmp_path: Path) -> None:
    case = Case(blocks=9, micro_batches=2, precision="bf16 zero1", clip=0.0)
    for losses, (stayed, moved) in run(2, load_with_limits, case, str(tmp_path)):
        assert stayed == ([0, 6, 12], losses) and moved == ([0, 3, 12], losses)
