"""The first promise: a run that moves layers equals one that does not, to the bit.

Each row of the table is a run, of which one without moves is compared with one per kind of schedule, in which layers
move once between two batches and once while one trains. Other files have one test per feature: variants are here.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.configs import PRECISIONS, Case
from tests.support.harness import run, run_each
from tests.support.models import layers, scale
from tests.support.sliced_layers import sliced_layers
from tests.support.training import (
    batches,
    build,
    check_moves_changed_nothing,
    outcome_of,
    partitions,
    reports_of,
    train,
    train_frozen,
    under_a_random_schedule,
    whole,
)

pytestmark = pytest.mark.ranks


TABLE = """
fp32                | 4 stages | apart | 0.05 | two    | none       | Adafactor    | dropout | warmup | 1f1b loop
fp32                | replicas | tied  | 0.0  | one    | interval 2 | AdamW        | scale   | warmup | v
fp32                | slices   | tied  | 0.05 | sparse | reentrant  | SGD          | scale   | fixed  | zero_bubble
fp32 zero1          | 3 stages | tied  | 0.05 | two    | none       | AdamW        | dropout | fixed  | v zero_bubble
fp32 zero1          | replicas | apart | 0.05 | one    | reentrant  | AdamW        | scale   | warmup | 1f1b
fp32 zero1          | slices   | tied  | 0.0  | sparse | interval 2 | SGD          | scale   | warmup | loop
bf16                | 4 stages | apart | 0.0  | sparse | interval 2 | AdamW        | scale   | warmup | zero_bubble v
bf16                | replicas | apart | 0.05 | two    | none       | AdamW        | dropout | fixed  | loop
bf16                | slices   | tied  | 0.05 | one    | reentrant  | SGD          | scale   | fixed  | 1f1b
bf16 buffers        | 3 stages | tied  | 0.0  | one    | reentrant  | AdamW        | dropout | warmup | v zero_bubble
bf16 buffers        | replicas | tied  | 0.05 | sparse | interval 2 | SGD          | scale   | warmup | loop
bf16 buffers        | slices   | apart | 0.0  | two    | none       | AdamW        | scale   | fixed  | 1f1b
bf16 immediate      | 4 stages | tied  | 0.0  | two    | reentrant  | SGD          | dropout | fixed  | v loop
bf16 immediate      | replicas | apart | 0.05 | sparse | none       | AdamW        | scale   | warmup | zero_bubble
bf16 immediate      | slices   | apart | 0.05 | one    | interval 2 | Adam         | scale   | fixed  | 1f1b
bf16 zero1          | 3 stages | apart | 0.0  | two    | interval 2 | AdamW        | dropout | warmup | v 1f1b
bf16 zero1          | replicas | tied  | 0.0  | sparse | reentrant  | AdamW        | scale   | warmup | zero_bubble
bf16 zero1          | slices   | apart | 0.05 | one    | none       | SGD          | scale   | fixed  | loop
bf16 zero1 fp32sums | 4 stages | tied  | 0.0  | one    | reentrant  | AdamW        | scale   | warmup | loop zero_bubble
bf16 zero1 fp32sums | replicas | tied  | 0.0  | sparse | interval 2 | client AdamW | dropout | fixed  | 1f1b
bf16 zero1 fp32sums | slices   | apart | 0.05 | two    | none       | SGD          | scale   | fixed  | v
fp16 zero1          | 3 stages | apart | 0.0  | sparse | interval 2 | SGD          | scale   | warmup | loop zero_bubble
fp16 zero1          | replicas | tied  | 0.0  | one    | reentrant  | client AdamW | dropout | fixed  | v
fp16 zero1          | slices   | apart | 0.05 | two    | none       | AdamW        | scale   | warmup | 1f1b
"""
COLUMNS = ["precision", "topology", "tied", "clip", "groups", "checkpointing", "optimizer", "middle", "rate", "kinds"]
ROWS = [dict(zip(COLUMNS, map(str.strip, line.split("|")), strict=True)) for line in TABLE.strip().splitlines()]
TOPOLOGIES: dict[str, dict[str, int]] = {
    "3 stages": {"stages": 3},
    "4 stages": {"stages": 4, "blocks": 7},
    "replicas": {"stages": 2, "replicas": 2},
    "slices": {"stages": 2, "slices": 2},
}
CHECKPOINTING = {"none": (0, True), "reentrant": (1, True), "interval 2": (2, False)}


PAIRED_OPTIMIZERS = {"AdamW", "SGD"}


def is_left_out(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Return whether no row needs two values, each with its column, at once."""
    pair = {one, other}
    return (
        {one[0], other[0]} == {"precision", "topology"}  # see below
        or pair == {("topology", "slices"), ("middle", "dropout")}  # slices would drop different elements
        or any(column == "optimizer" and value not in PAIRED_OPTIMIZERS for column, value in pair)
    )


def test_each_pair_of_values_is_in_a_row_of_the_table() -> None:
    """The other optimizers are in a row each, and beside the precisions three stages and four are one value."""
    rows = [{*row.items(), ("kind", kind)} - {("kinds", row["kinds"])} for row in ROWS for kind in row["kinds"].split()]
    values = sorted(set().union(*rows))
    missing = [
        (one, other)
        for one, other in itertools.combinations(values, 2)
        if one[0] != other[0] and not is_left_out(one, other) and not any({one, other} <= row for row in rows)
    ]
    assert not missing
    beside = {(row["precision"], row["topology"].lstrip("34 ")) for row in ROWS}
    assert beside == {*itertools.product(PRECISIONS, ("stages", "replicas", "slices"))}
    assert {value for column, value in values if column == "kind"} == {"1f1b", "zero_bubble", "v", "loop"}
    others = {row["optimizer"] for row in ROWS} - PAIRED_OPTIMIZERS
    assert others == {"Adam", "Adafactor", "client AdamW"}


def case_of(row: dict[str, str]) -> Case:
    interval, reentrant = CHECKPOINTING[row["checkpointing"]]
    return Case(
        precision=row["precision"],
        tied=row["tied"] == "tied",
        clip=float(row["clip"]),
        groups=row["groups"],
        checkpoint_interval=interval,
        reentrant=reentrant,
        optimizer=row["optimizer"],
        dropout=row["middle"] == "dropout",
        scheduler=row["rate"] == "warmup",
        **TOPOLOGIES[row["topology"]],  # type: ignore[arg-type]
    )


def moves_of(case: Case, number: int) -> list[tuple[list[int], bool]]:
    """Return two moves, one of them while a batch trains. In a V and a loop one goes to a chain."""
    chooser, stages, last = random.Random(number), case.stages, case.num_layers
    has_pairs = (case.dynmo or {}).get("schedule") in ("v", "loop")
    seen = [[last * stage // stages for stage in range(stages + 1)]]
    for turn in range(2):
        chunks = 2 * stages if has_pairs and turn == number % 2 else stages
        while (partition := [0, *sorted(chooser.sample(range(1, last), chunks - 1)), last]) in seen:
            pass
        seen.append(partition)
    return [(partition, turn == number // 2 % 2) for turn, partition in enumerate(seen[1:])]


def with_slices(case: Case) -> list[Any]:
    """Return as many layers as without slices."""
    sliced = sliced_layers(case)
    return [*sliced[:-1], scale, sliced[-1]]


def train_row(case: Case, moves: list[tuple[list[int], bool]]) -> dict[str, Any]:
    """Train a batch before each of ``moves``, and one after the last. Return also which moved in the background."""
    engine = build(case, with_slices if case.slices else layers)
    data, losses = batches(engine), []
    overflows = 2 if case.precision.startswith("fp16") else 0
    for step in range(-overflows, 3):
        losses.append(engine.train_batch(data).item())
        if 0 <= step < len(moves):
            partition, background = moves[step]
            engine.rebalance(partition, background=background)
        if step == 1:
            losses.append(engine.eval_batch(batches(engine, seed=7)).item())
    assert engine.skipped_steps == overflows
    by_hand = [report for report in reports_of(engine) if report.reason == "explicit"]
    ways = [(report.moved, report.background_seconds is not None) for report in by_hand]
    return {**outcome_of(engine, losses), "ways": ways}


IDS = [f"{row['precision']}-{row['topology']}".replace(" ", "-") for row in ROWS]


@pytest.mark.parametrize("number", range(len(ROWS)), ids=IDS)
def test_moves_change_nothing(number: int) -> None:
    """Compare a row with a chain under 1F1B whose layers stay."""
    case = case_of(ROWS[number])
    moving = [replace(case, dynmo={"interval": 0, "schedule": kind}) for kind in ROWS[number]["kinds"].split()]
    calls = [(each, moves_of(each, number + turn)) for turn, each in enumerate(moving)]
    still, *moved = run_each(case.ranks, train_row, (case, []), *calls)
    for (each, moves), found in zip(calls, moved, strict=True):
        assert (found[0]["partition"], found[0]["ways"]) == (moves[-1][0], [(True, way) for _, way in moves]), each
        check_moves_changed_nothing(still, found)


@pytest.mark.compiled
@pytest.mark.parametrize("optimizer", ["FusedAdam", "CPUAdam"])
def test_rebalances_change_nothing_under_deepspeeds_adam(optimizer: str) -> None:
    case = Case(stages=3, optimizer=optimizer, groups="two")
    check_moves_changed_nothing(*run_each(3, train_row, (case, []), (case, moves_of(case, 8))))


@pytest.mark.compiled
@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1", "fp32 zero1"])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "CPUAdam"])
def test_rebalances_keep_deepspeeds_adam_in_flat_buffers_close(optimizer: str, precision: str) -> None:
    """On a CPU it computes the last few elements of a buffer with other instructions, so last bits may differ."""
    case = Case(stages=3, optimizer=optimizer, precision=precision, groups="two")
    still = run(3, train, case, [], 7, 2)
    moved = run(3, train, case, partitions(case, seed=8, count=3), 7, 2)
    np.testing.assert_allclose(moved[0]["losses"], still[0]["losses"], rtol=1e-5)
    before, after = whole(still), whole(moved)
    assert before.keys() == after.keys()
    for key in before:
        if key.endswith(("master", "exp_avg", "exp_avg_sq")):
            there, here = np.frombuffer(before[key], np.float32), np.frombuffer(after[key], np.float32)
            np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-6)
        elif "/" in key:
            assert before[key] == after[key]


@pytest.mark.compiled
def test_fused_adam_counts_steps_through_freezing() -> None:
    """It counts steps on one parameter of a group. It must not matter on which.

    Its CPU kernel multiplies the powers of beta in each process, so last bits depend on the earlier steps there.
    """
    case = Case(stages=3, optimizer="FusedAdam")
    frozen = {2: 3, 4: 6, 5: 0}
    still = run(3, train_frozen, case, frozen, {})
    moved = run(3, train_frozen, case, frozen, {1: [0, 1, 5, 8], 3: [0, 5, 7, 8], 4: [0, 2, 3, 8]})
    np.testing.assert_allclose(moved[0]["losses"], still[0]["losses"], rtol=1e-6)
    before, after = whole(still), whole(moved)
    assert all(after[key] == before[key] for key in before if key.endswith("step"))


def test_tied_uses_on_one_stage_equal_two_stages() -> None:
    alone = Case(stages=1, tied=True, blocks=2)
    apart = Case(stages=2, tied=True, blocks=2)
    one = run(1, train, alone, [], 4, 2)
    two = run(2, train, apart, [], 4, 2)
    assert one[0]["losses"] == two[0]["losses"]
    assert whole(one) == whole(two)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(int(os.environ.get("DS_DYNMO_FUZZ_CASES", "20"))))
def test_random_cases_change_nothing(seed: int) -> None:
    """Compare four random sequences of moves, two in the background, also between shapes, with a chain under 1F1B."""
    chooser = random.Random(seed)
    stages = chooser.choice([2, 3, 4])
    precision = chooser.choice(sorted(PRECISIONS))
    case = Case(
        stages=stages,
        blocks=chooser.choice([2, 5, 8]),
        tied=chooser.random() < 0.5,
        clip=chooser.choice([0.0, 0.05, 1.0]),
        replicas=chooser.choice([1, 2]),
        optimizer=chooser.choice(["AdamW", "SGD", "Adafactor"] if precision == "fp32" else ["AdamW", "SGD"]),
        checkpoint_interval=chooser.choice([0, 0, 1, 2]),
        reentrant=chooser.random() < 0.5,
        micro_batches=chooser.choice([1, 2, 5]),
        groups=chooser.choice(["one", "two", "sparse"]),
        scheduler=chooser.random() < 0.5,
        precision=precision,
        dropout=chooser.random() < 0.5,
    )
    every = chooser.choice([1, 2])
    moving = [under_a_random_schedule(case, chooser) for _ in range(4)]
    calls = [
        (each, partitions(each, 10 * seed + number, count=5), 11, every, number % 2 == 1)
        for number, each in enumerate(moving)
    ]
    still, *moved = run_each(case.ranks, train, (case, [], 11, every), *calls)
    for (_, moves, *_), each in zip(calls, moved, strict=True):
        assert each[0]["partition"] == moves[-1]
        assert [r["evaluations"] for r in each] == [r["evaluations"] for r in still]
        check_moves_changed_nothing(still, each)
