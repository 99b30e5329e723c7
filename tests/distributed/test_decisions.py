"""Decisions of the running engine: by the schedule, among uneven stages, under jitter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import decision_workloads as work
from tests.distributed.harness import run


def weights(results: list[dict[str, Any]]) -> dict[int, list[float]]:
    return {number: values for result in results for number, values in result["weights"].items()}


def test_the_schedule_moves_layers_and_training_is_untouched() -> None:
    # No partition has a smaller bottleneck than [0, 2, 4, 6], but stages that are busy forward and back in turn wait.
    milliseconds = [(4.0, 0.0), (4.0, 2.0), (8.0, 0.0), (2.0, 16.0), (16.0, 0.0), (16.0, 2.0)]
    block = {"interval": 3, "balancer": "schedule"}
    moved = run(3, work.train_unsteady, block, milliseconds, 5, [1.0] * 3)
    still = run(3, work.train_unsteady, {"enabled": False}, milliseconds, 5, [1.0] * 3)
    report = moved[0]["reports"][0]
    assert report.moved and report.step == 3 and report.verdict == "worth it"
    assert report.iteration_seconds_after < 0.9 * report.iteration_seconds_before
    assert all(result["partition"] == [0, 4, 5, 6] for result in moved)
    assert [result["losses"] for result in moved] == [result["losses"] for result in still]
    assert weights(moved) == weights(still)


def test_a_slow_stage_gets_less_and_is_remembered(tmp_path: Path) -> None:
    results = run(
        3,
        work.train_unsteady,
        {"interval": 3, "balancer": "schedule"},
        [(2.0, 4.0)] * 15,
        10,
        [1.0, 2.5, 1.0],
        0.0,
        str(tmp_path),
    )
    for result in results:
        _, first, last, _ = result["partition"]
        assert last - first <= 3, result["partition"]
        assert result["speeds"][1] == pytest.approx(0.4 * result["speeds"][0], rel=0.01)
        assert result["loaded"] == (result["partition"], result["speeds"])
        assert result["state"][0] == result["state"][1] == results[0]["state"][0]
        learnt = result["state"][0]
        assert len(learnt["moves"]) + (learnt["moved_bytes"] is not None) == sum(r.moved for r in result["reports"])


def test_neighbours_take_the_decisions_that_diffusion_takes_of_a_slow_stage() -> None:
    starts, went = [[0, 4, 11, 15], [0, 8, 12, 15], [0, 5, 10, 15]], []
    for decentralized in (False, True):
        block = {"balancer": "diffusion", "decentralized": decentralized}
        result, *others = run(3, work.decide_by_hand, block, [1.0, 2.5, 1.0], starts)
        assert all(other == result for other in others)
        assert result["speeds"][1] == pytest.approx(0.4 * result["speeds"][0], rel=0.01)
        went.append(result["went"])
    assert went[0] == went[1]
    assert all(last - first <= 3 for _, first, last, _ in went[0])


@pytest.mark.parametrize("block", [{"interval": 0}, {"interval": 1}, {"interval": 0, "profile": {"batches": 2}}])
def test_a_rebalance_without_a_profile_decides_once(block: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    for result in run(2, work.decide_first, {**block, "report": str(path)}, "rebalance"):
        assert result["rebalances"] == [result["returned"]]
        report = result["returned"]
        assert (report.reason, report.old_partition, report.new_partition) == ("by hand", (0, 3, 6), (0, 5, 6))
        assert report.layers_moved == 2 and report.bytes_moved > 0 and report.profile_seconds > 0
        assert result["partition"] == [0, 5, 6] and result["steps"] == block.get("profile", {}).get("batches", 1)
        assert [later.reason for later in result["rebalances later"]] in ([], ["interval"])
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds[:3] == ["measured", "rebalance", "profile"]


def test_a_repack_without_a_profile_moves_layers_once() -> None:
    block = {"interval": 1, "repack": {"max_slowdown": 0.5, "enabled": True}}
    stays, leaves = run(2, work.decide_first, block, "repack")
    (report,) = stays["repacks"]
    assert stays["rebalances"] == leaves["rebalances"] == [] and leaves["released"]
    assert report.reason == "by hand" and report == stays["returned"]
    assert report.old_partition == (0, 3, 6) and report.new_partition == (0, 6) and report.layers_moved == 3


def test_a_first_rebalance_that_finds_no_room_leaves_nothing_to_decide() -> None:
    for result in run(2, work.decide_first, {"interval": 0, "memory_limit": 50}, "rebalance"):
        assert "bytes" in result["returned"] and result["partition"] == [0, 3, 6]
        assert result["rebalances"] == result["rebalances later"] == [] and result["profile"] is not None


@pytest.mark.parametrize("interval", [0, 1])
def test_a_layer_that_did_not_run_ends_no_training(interval: int) -> None:
    missing = "layer 1 has no measured forward seconds"
    for result in run(2, work.skip_a_layer, {"interval": interval, "profile": {"warmup_batches": 0}}, 1, 4):
        assert len(result["losses"]) == 3 and result["profile"] is None and result["partition"] == [0, 2, 4]
        assert all(missing in text for text in result["warned"]) and len(result["warned"]) == 4
        assert missing in result["refused"] and result["steps"] == 4
        assert result["partition later"] == [0, 3, 4]


def test_jitter_moves_nothing() -> None:
    # The small layer between the stages may as well be on either side: 10% decide which looks better.
    milliseconds = [*[(3.0, 6.0)] * 3, (0.5, 1.0), *[(3.0, 6.0)] * 3]
    results = run(2, work.train_unsteady, {"interval": 2}, milliseconds, 16, [1.0] * 2, 0.1)
    assert len(results[0]["reports"]) == 8
    assert all(result["partition"] == [0, 4, 7] for result in results)
