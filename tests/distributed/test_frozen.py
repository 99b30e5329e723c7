"""A frozen prefix: nothing of it is computed backward, sent, reduced or stepped, and training goes on bitwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed import workloads
from tests.distributed.harness import RankError, run, run_each
from tests.distributed.test_bitwise import whole
from tests.distributed.workloads import Case


@pytest.mark.parametrize(
    ("interval", "reentrant", "replicas"),
    [
        *((0, True, 2), (1, True, 1), (2, True, 1), (2, False, 1)),
        *(pytest.param(*case, marks=pytest.mark.fuzz) for case in ((0, True, 1), (1, True, 2), (2, True, 2))),
        pytest.param(2, False, 2, marks=pytest.mark.fuzz),
    ],
)
def test_freezing_equals_one_process(interval: int, reentrant: bool, replicas: int) -> None:
    """Against a plain one-stage run, whose autograd prunes the frozen prefix by itself."""
    case = Case(stages=3, checkpoint_interval=interval, reentrant=reentrant, replicas=replicas)
    alone = Case(stages=1, replicas=replicas)
    frozen = {2: 3, 4: 6, 5: 0}  # before which batch, how many leading layers
    moves = {1: [0, 1, 5, 8], 3: [0, 5, 7, 8], 4: [0, 2, 3, 8]}
    reference = run(replicas, workloads.train_frozen, alone, frozen, {})
    still, moved = run_each(case.ranks, workloads.train_frozen, (case, frozen, {}), (case, frozen, moves))
    for results in (still, moved):
        assert results[0]["losses"] == reference[0]["losses"]
        assert all(result["thawed"] == [] for result in results)
        assert whole(results) == whole(reference)


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        *(("bf16 immediate", 1), ("bf16 zero1", 2), ("fp32 zero1", 1), ("bf16 zero1 fp32sums", 1)),
        *(pytest.param(precision, 1, marks=pytest.mark.fuzz) for precision in ("bf16", "bf16 zero1")),
        *(pytest.param(precision, 2, marks=pytest.mark.fuzz) for precision in ("bf16", "fp32 zero1")),
        pytest.param("bf16 zero1 fp32sums", 2, marks=pytest.mark.fuzz),
    ],
)
def test_freezing_takes_effect_under_every_wrapper(precision: str, replicas: int) -> None:
    case = Case(stages=3, precision=precision, replicas=replicas, groups="two", clip=0.05)
    alone = replace(case, stages=1)
    frozen = {2: 3, 4: 6, 5: 0}
    moves = {1: [0, 1, 5, 8], 3: [0, 5, 7, 8], 4: [0, 2, 3, 8]}
    reference = run(replicas, workloads.train_frozen, alone, frozen, {})
    still, moved = run_each(case.ranks, workloads.train_frozen, (case, frozen, {}), (case, frozen, moves))
    for results in (still, moved):
        assert results[0]["losses"] == reference[0]["losses"]
        assert all(result["thawed"] == [] for result in results)
        assert whole(results) == whole(reference)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
def test_single_parameters_can_be_frozen(precision: str) -> None:
    results = [run(2, workloads.freeze_biases, precision, moves) for moves in ([], [[0, 2, 8], [0, 6, 8]])]
    assert results[0] == results[1]
    assert results[0][0]["changed"] == {"while frozen": False, "afterwards": True}


@pytest.mark.parametrize("precision", ["bf16", "fp32 zero1"])
def test_frozen_from_the_start(precision: str) -> None:
    """What initialize finds frozen trains once it is unfrozen, though DeepSpeed's wrappers never saw it."""
    still, moved = (run(2, workloads.unfreeze_later, precision, moves) for moves in ([], [[0, 2, 8], [0, 6, 8]]))
    assert [r["losses"] for r in still] == [r["losses"] for r in moved]
    assert whole(still) == whole(moved)
    assert still[0]["moved while frozen"] is False and still[0]["trained"] is True


def test_a_frozen_stage_does_no_backward_and_is_sent_nothing() -> None:
    counts = run(3, workloads.count_backward_work, 4)
    assert [c["backward"] for c in counts] == [0, 1, 1]
    assert [c["gradients sent"] for c in counts] == [0, 0, 1]
    assert counts[0]["gradients"] == 0 and counts[0]["reduced"] == 0


def test_everything_frozen_still_runs() -> None:
    for result in run(2, workloads.train_all_frozen):
        assert result["steps"] == 3 and result["state"] == result["state when frozen"]


def test_freezing_without_a_word_is_an_error_that_says_what_to_call() -> None:
    with pytest.raises(RankError, match="model_changed"):
        run(2, workloads.freeze_silently)


def test_half_a_tie_cannot_be_frozen() -> None:
    with pytest.raises(RankError, match="tied by the key 'embedding'"):
        run(2, workloads.freeze_half_a_tie)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
def test_a_tie_is_frozen_and_thawed(precision: str) -> None:
    together, apart = [0, 7, 8], [0, 3, 8]
    still, moved = (run(2, workloads.freeze_tie, precision, moves) for moves in ([], [apart, together, apart, apart]))
    assert [r["losses"] for r in still] == [r["losses"] for r in moved]
    assert whole(still) == whole(moved)
    assert all(r["changed"] == [True, False, True] for r in [*still, *moved])


def test_a_model_that_changed_is_profiled_and_rebalanced() -> None:
    result = run(2, workloads.freeze_sleeping, 8)[0]
    assert result["reason"] == "half is frozen"
    assert result["before"] == [0, 4, 8] and result["partition"] in ([0, 5, 8], [0, 6, 8])
