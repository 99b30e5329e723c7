"""The first promise: a run that moves layers equals one that does not, to the bit."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from tests.support.configs import PRECISIONS, Case
from tests.support.harness import run, run_each
from tests.support.training import partitions, train, train_frozen, under_a_random_schedule, whole

pytestmark = pytest.mark.ranks


def check_same(case: Case, moves: list[list[int]], steps: int = 7, every: int = 2) -> None:
    still, moved = run_each(case.ranks, train, (case, [], steps, every), (case, moves, steps, every))
    assert moved[0]["moved"] > 0 and still[0]["moved"] == 0
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert [r["evaluations"] for r in moved] == [r["evaluations"] for r in still]
    assert whole(moved) == whole(still)


CORE = [  # every other one is always tested; all are in the nightly form
    pytest.param(
        *(stages, tied, clip, replicas),
        id=f"{stages}stages-{'tied' if tied else 'untied'}-clip{clip}-dp{replicas}",
        marks=() if (stages + tied + number) % 2 else pytest.mark.nightly,
    )
    for stages in (2, 3, 4)
    for tied in (False, True)
    for number, (clip, replicas) in enumerate(((0.0, 1), (0.05, 1), (0.05, 2)))
    if stages * replicas <= 6
]


@pytest.mark.parametrize(("stages", "tied", "clip", "replicas"), CORE)
def test_random_rebalances_change_nothing(stages: int, tied: bool, clip: float, replicas: int) -> None:
    case = Case(stages=stages, tied=tied, clip=clip, replicas=replicas)
    check_same(case, partitions(case, seed=stages * 10 + replicas + tied, count=3))


WRAPPED = [
    pytest.param(
        *(precision, stages, tied, replicas),
        id=f"{precision}-{stages}stages-{tied}-dp{replicas}",
        marks=() if number == turn % 2 else pytest.mark.nightly,
    )
    for turn, precision in enumerate(PRECISIONS)
    if precision != "fp32"
    for number, (stages, tied, replicas) in enumerate(((2, True, 2), (3, False, 1), (3, True, 1), (4, False, 1)))
]


@pytest.mark.parametrize(("precision", "stages", "tied", "replicas"), WRAPPED)
def test_rebalances_change_nothing_under_wrappers(precision: str, stages: int, tied: bool, replicas: int) -> None:
    case = Case(stages=stages, tied=tied, replicas=replicas, precision=precision, groups="two")
    check_same(case, partitions(case, seed=3 + stages, count=3))


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "Adafactor", "client AdamW"])
def test_rebalances_change_nothing_under_torch_optimizers(optimizer: str) -> None:
    case = Case(stages=3, optimizer=optimizer)
    check_same(case, partitions(case, seed=5, count=3))


@pytest.mark.compiled
@pytest.mark.parametrize("optimizer", ["FusedAdam", "CPUAdam"])
def test_rebalances_change_nothing_under_deepspeeds_adam(optimizer: str) -> None:
    case = Case(stages=3, optimizer=optimizer, groups="two")
    check_same(case, partitions(case, seed=8, count=3))


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


@pytest.mark.parametrize("groups", ["two", "sparse"])
def test_rebalances_change_nothing_with_parameter_groups_and_a_scheduler(groups: str) -> None:
    case = Case(stages=4, groups=groups, scheduler=True)
    check_same(case, partitions(case, seed=6, count=3))


@pytest.mark.parametrize(
    ("reentrant", "interval"),
    [(True, 1), (False, 2), *(pytest.param(*both, marks=pytest.mark.nightly) for both in ((False, 1), (True, 2)))],
)
def test_rebalances_change_nothing_under_activation_checkpointing(reentrant: bool, interval: int) -> None:
    case = Case(stages=3, checkpoint_interval=interval, reentrant=reentrant)
    check_same(case, partitions(case, seed=7, count=3))


def test_tied_uses_on_one_stage_equal_two_stages() -> None:
    alone = Case(stages=1, tied=True, blocks=2)
    apart = Case(stages=2, tied=True, blocks=2)
    one = run(1, train, alone, [], 4, 2)
    two = run(2, train, apart, [], 4, 2)
    assert one[0]["losses"] == two[0]["losses"]
    assert whole(one) == whole(two)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(int(os.environ.get("DS_DYNMO_FUZZ_CASES", "10"))))
def test_random_cases_change_nothing(seed: int) -> None:
    """Compare four random sequences of rebalances of a random case, also between shapes, with a chain under 1F1B."""
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
    calls = [(each, partitions(each, 10 * seed + number, count=5), 10, every) for number, each in enumerate(moving)]
    still, *moved = run_each(case.ranks, train, (case, [], 10, every), *calls)
    for (_, moves, *_), each in zip(calls, moved, strict=True):
        assert each[0]["partition"] == moves[-1]
        assert each[0]["moved"] > 0
        assert [r["losses"] for r in each] == [r["losses"] for r in still]
        assert [r["evaluations"] for r in each] == [r["evaluations"] for r in still]
        assert whole(each) == whole(still)
