"""Layers that have to be on one stage: no cut between them, wherever a partition comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from ds_dynmo.partitioners import balanced, uniform
from tests.distributed import checkpoint_workloads, joining_workloads, keep_together_workloads
from tests.distributed.harness import RankError, run, run_each
from tests.distributed.keep_together_workloads import BLOCKS, HEAD_WIDTH
from tests.distributed.test_bitwise import whole
from tests.distributed.test_joining import BY_HAND as JOINABLE
from tests.distributed.test_joining import together
from tests.distributed.workloads import VOCABULARY, WIDTH, Case

PAIR = {"keep_together": [[6, 7]]}
BY_HAND = {"interval": 0, **PAIR}
BY_PARAMETERS = {"interval": 2, "balance_by": "parameters", "min_improvement": 0.0, **PAIR}
WEIGHTS = [VOCABULARY * WIDTH, *[WIDTH * WIDTH] * BLOCKS, 2 * WIDTH, HEAD_WIDTH * (WIDTH + VOCABULARY)]


# -- a miniature of transpeeder -----------------------------------------------------------------------


def test_without_the_key_the_cut_that_a_balancer_would_make_ends_the_run() -> None:
    assert balanced(WEIGHTS, 2) == [0, 7, 8]
    with pytest.raises(RankError, match="'tuple' and 'Parameter'"):  # the head gets the tensor cut along its batch
        run(2, keep_together_workloads.train_masked, Case(), [[0, 7, 8]], 2)


@pytest.mark.parametrize(
    "balancer",
    [{}, {"balancer": "diffusion"}, {"balancer": "diffusion", "decentralized": True}],
    ids=["partition", "diffusion", "decentralized"],
)
def test_automatic_moves_cut_where_they_may(balancer: dict[str, Any]) -> None:
    still, moved = run_each(
        2,
        keep_together_workloads.train_masked,
        (Case(dynmo=BY_HAND), [], 5),
        (Case(dynmo={**BY_PARAMETERS, **balancer}), [], 5),
    )
    assert [still[0]["partition"], moved[0]["partition"]] == [[0, 4, 8], [0, 6, 8]]
    check_same(still, moved)


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_moves_by_hand_change_nothing(precision: str) -> None:
    case = Case(stages=3, dynmo=BY_HAND, precision=precision)
    moves = [[0, 1, 6, 8], [0, 5, 6, 8], [0, 2, 4, 8]]
    still, moved = run_each(3, keep_together_workloads.train_masked, (case, [], 5), (case, moves, 5))
    assert moved[0]["partitions"] == moves
    check_same(still, moved)


@pytest.mark.parametrize("stages", [2, 4])
def test_saved_and_loaded_at_another_number_of_stages(tmp_path: Path, stages: int) -> None:
    case = Case(stages=3, dynmo=BY_HAND)
    saved = run(3, keep_together_workloads.save_masked, case, str(tmp_path), [0, 5, 6, 8], 2)
    loaded = run(stages, keep_together_workloads.load_masked, replace(case, stages=stages), str(tmp_path), 2)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


def check_same(still: list[dict[str, Any]], moved: list[dict[str, Any]]) -> None:
    for what in ("losses", "evaluation"):
        assert [result[what] for result in moved] == [result[what] for result in still]
    assert whole(moved) == whole(still)


def test_neighbours_land_where_diffusion_does() -> None:
    ranks = run(3, keep_together_workloads.neighbours_and_all_at_once, 3, 1)
    among_neighbours, at_once = ranks[0]
    assert among_neighbours == at_once and sum(landed is not None for landed in at_once) > 5
    assert all(rank == ranks[0] for rank in ranks)


# -- where training begins ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "first"),
    [
        ({"keep_together": [[3, 4]]}, [0, 3, 8]),  # DeepSpeed's own is [0, 4, 8]
        ({"keep_together": [[3, 4]], "enabled": False}, [0, 3, 8]),
        ({"keep_together": [[0, 1]]}, [0, 4, 8]),
        ({"keep_together": ["type:^block", [3, 4]]}, [0, 6, 8]),  # layers 1 to 5 are blocks
        ({"keep_together": [[3, 4]], "initial_partition": "uniform"}, [0, 3, 6, 8]),
        # Below, the best that is allowed is not the allowed one that is nearest to the best.
        ({"keep_together": [[1, 2, 3, 4]], "initial_partition": "uniform"}, [0, 1, 5, 8]),
        ({"keep_together": [[4, 5]], "initial_partition": "type:block|head:4"}, [0, 6, 8]),
        ({"keep_together": [[3, 4, 5]], "initial_partition": "parameters"}, [0, 3, 6, 8]),
    ],
)
def test_the_first_partition_is_allowed(block: dict[str, Any], first: list[int]) -> None:
    stages = len(first) - 1
    found = run(stages, keep_together_workloads.begins_at, Case(stages=stages, dynmo={"interval": 0, **block}))
    assert all(rank["first"] == rank["then"] == first for rank in found)
    assert found[0]["reasons"] == ([] if first == uniform(8, stages) else ["initial"])


def test_rules_that_do_not_suit_are_refused_before_anything_begins() -> None:
    blocks: list[tuple[dict[str, Any], str, str]] = [
        ({"keep_together": [[6, 7, 8]]}, "ConfigError", "keep_together[0] = [6, 7, 8]: there is no layer 8"),
        ({"keep_together": ["type:Attention"]}, "ConfigError", "no layer's name matches 'Attention'"),
        ({"keep_together": ["type:("]}, "ConfigError", "is no regular expression"),
        (
            {"keep_together": [[0, 1, 2, 3, 4, 5, 6, 7]]},
            "ConfigError",
            "makes 1 groups of the model's 8 layers, which cannot fill 2 stages",
        ),
        (
            {**PAIR, "initial_partition": [0, 7, 8]},
            "PartitionError",
            "cuts before layer 7: layers 6 (scale) and 7 (Head) stay together, dynmo.keep_together has [6, 7]",
        ),
    ]
    calls = [(Case(dynmo={"interval": 0, **block}),) for block, _, _ in blocks]
    found = run_each(2, keep_together_workloads.refused_at_the_start, *calls)
    for (_, kind, words), ranks in zip(blocks, found):
        assert ranks[0] == ranks[1]
        assert ranks[0][0] == kind and words in ranks[0][1], ranks[0]


# -- moves, re-packing, joining -----------------------------------------------------------------------


def test_a_cut_asked_for_by_hand_is_refused_and_training_goes_on() -> None:
    case = Case(dynmo=BY_HAND)
    refused, plain = run_each(
        2, keep_together_workloads.refused_moves, (case, [0, 7, 8]), (Case(dynmo=BY_HAND), [0, 4, 8])
    )
    for rank in refused:
        assert len(rank["errors"]) == 2
        assert all("cuts before layer 7" in error and "has [6, 7]" in error for error in rank["errors"])
    assert refused[0]["losses"] == plain[0]["losses"]


def test_re_packing_and_growing_cut_where_they_may() -> None:
    rules = {"keep_together": [[0, 1, 2], [3, 4], [5, 6, 7]]}
    case = Case(stages=3, dynmo={"interval": 0, "repack": {"release": "park"}, **rules}, start=(0, 3, 5, 8))
    sizes = [2, [0, 4, 8], 3, 1, 4, 3]
    ranks = run(3, keep_together_workloads.repack_by_hand, case, sizes)
    found = ranks[0]
    assert [len(partition) - 1 for partition in found["partitions"]] == [2, 2, 3, 1, 1, 3]
    assert all(set(partition) <= {0, 3, 5, 8} for partition in found["partitions"])
    assert "cuts before layer 4" in found["errors"][0]
    assert found["errors"][1].startswith(
        "repack: 4 stages, there are 1 to 3 to go on with: dynmo.keep_together makes 3"
    )
    alone = run(3, keep_together_workloads.repack_by_hand, case, [3] * len(sizes))
    assert found["most"] == [3] * len(sizes)
    assert found["losses"] == alone[0]["losses"]


def test_re_packing_expects_no_speed_that_no_allowed_partition_has() -> None:
    """One partition is allowed, [0, 1, 8], and a balanced one would be faster."""
    case = Case(dynmo={"interval": 0, "keep_together": [[1, 2, 3, 4, 5, 6, 7]]})
    first_seconds, as_it_is = run(2, keep_together_workloads.start_of_the_run, case)[0]
    assert first_seconds == as_it_is


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def test_a_job_does_not_take_more_joiners_than_it_has_groups(store: TCPStore) -> None:
    """Two join a job of one stage that has two groups."""
    case = Case(stages=1, dynmo={**JOINABLE, "keep_together": [[0, 1, 2, 3], [4, 5, 6, 7]]})
    address = f"localhost:{store.port}"
    job, joined = together(
        lambda: run(1, joining_workloads.job, case, {2: 2}, {2: [1, 2]}, 5, port=store.port, seconds=60.0),
        lambda: run(2, joining_workloads.newcomer, replace(case, stages=2), address, {}, 5, seconds=60.0),
    )
    assert job[0]["most"] == 2
    assert [list(report.new_partition) for report in job[0]["reports"]] == [[0, 4, 8]]
    assert sorted(rank["called"] for rank in joined) == [False, True]


# -- loading ------------------------------------------------------------------------------------------


def test_what_was_saved_at_a_cut_that_is_not_allowed_any_more(tmp_path: Path) -> None:
    """Layers go to the nearest partition that is; nothing else differs."""
    case = Case(dynmo={"interval": 0})
    saved = run(2, checkpoint_workloads.save_and_go_on, case, str(tmp_path), [0, 7, 8])
    loaded = run(2, checkpoint_workloads.load_and_go_on, replace(case, dynmo=BY_HAND), str(tmp_path))
    assert [saved[0]["partition"], loaded[0]["partition"]] == [[0, 7, 8], [0, 6, 8]]
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


def test_what_stock_deepspeed_saved_at_such_a_cut(tmp_path: Path) -> None:
    """It is read where it was written, [0, 4, 8]; then layers go on."""
    rules = {"interval": 0, "keep_together": [[3, 4]]}
    case = Case(dynmo=rules, clip=0.0)
    saved = run(2, keep_together_workloads.stock_checkpoint, case, str(tmp_path), True)
    loaded = run(2, keep_together_workloads.stock_checkpoint, case, str(tmp_path), False)
    assert loaded[0]["partition"] == [0, 3, 8]
    assert loaded[0]["losses"] == saved[0]["losses"]
