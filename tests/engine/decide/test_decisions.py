"""Decisions of the running engine: by iteration time, with uneven stages, under jitter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_dynmo.errors import PartitionError
from tests.support.harness import run
from tests.support.told_clock import unsteady_engine
from tests.support.training import Warnings, reports_of

pytestmark = pytest.mark.ranks


def weights(results: list[dict[str, Any]]) -> dict[int, list[float]]:
    return {number: values for result in results for number, values in result["weights"].items()}


def train_unsteady(
    block: dict[str, Any],
    milliseconds: Sequence[tuple[float, float]],
    steps: int,
    slowdowns: Sequence[float],
    jitter: float = 0.0,
    folder: str | None = None,
) -> dict[str, Any]:
    seconds = [(forward / 1e3, backward / 1e3) for forward, backward in milliseconds]
    engine, data = unsteady_engine(block, seconds, slowdowns, jitter)
    losses = []
    for step in range(steps):
        for layer in engine.module.forward_funcs:
            layer.batch = step
        losses.append(engine.train_batch(data).item())
    result = {
        "losses": losses,
        "weights": {layer.number: layer.weight.tolist() for layer in engine.module.forward_funcs},
        "partition": engine.partition,
        "reports": reports_of(engine),
        "speeds": engine.rebalancer.decider.cost_model.history.speeds,  # on rank 0
    }
    if folder is not None:
        engine.save_checkpoint(folder)
        again, _ = unsteady_engine(block, seconds, slowdowns, jitter)
        again.load_checkpoint(folder)
        result["loaded"] = (again.partition, again.rebalancer.decider.cost_model.history.speeds)
        result["state"] = (
            engine.rebalancer.decider.cost_model.state_dict(),
            again.rebalancer.decider.cost_model.state_dict(),
        )
    return result


def test_decisions_by_iteration_time_do_not_change_training() -> None:
    # No partition has a smaller bottleneck than [0, 2, 4, 6], but one stage is busy forward, the next backward.
    milliseconds = [(4.0, 0.0), (4.0, 2.0), (8.0, 0.0), (2.0, 16.0), (16.0, 0.0), (16.0, 2.0)]
    block = {"interval": 3, "balancer": "makespan"}
    moved = run(3, train_unsteady, block, milliseconds, 7, [1.0] * 3)
    still = run(3, train_unsteady, {"enabled": False}, milliseconds, 7, [1.0] * 3)
    report = moved[0]["reports"][0]
    assert report.moved and report.step == 5 and report.verdict == "worth it"
    assert report.iteration_seconds_after < 0.9 * report.iteration_seconds_before
    assert all(result["partition"] == [0, 4, 5, 6] for result in moved)
    assert [result["losses"] for result in moved] == [result["losses"] for result in still]
    assert weights(moved) == weights(still)


def test_a_slow_stage_gets_fewer_layers_also_after_resuming(tmp_path: Path) -> None:
    result, *others = run(
        3,
        train_unsteady,
        {"interval": 3, "balancer": "makespan"},
        [(2.0, 4.0)] * 15,
        10,
        [1.0, 2.5, 1.0],
        0.0,
        str(tmp_path),
    )
    _, first, last, _ = result["partition"]
    assert last - first <= 3, result["partition"]
    assert result["speeds"][1] == pytest.approx(0.4 * result["speeds"][0], rel=0.01)
    assert result["loaded"] == (result["partition"], result["speeds"])
    assert result["state"][0] == result["state"][1]
    learnt = result["state"][0]
    assert len(learnt["moves"]) + (learnt["moved_bytes"] is not None) == sum(r.moved for r in result["reports"])
    assert all(other["partition"] == result["partition"] for other in others)


def decide_by_hand(block: dict[str, Any], slowdowns: Sequence[float], starts: Sequence[list[int]]) -> dict[str, Any]:
    """Return the partition that is decided from each of ``starts``, in turn, ignoring the cost of moves."""
    engine, data = unsteady_engine({"interval": 0, **block}, [(0.002, 0.004)] * 15, slowdowns, 0.0)
    went = []
    for start in starts:
        engine.rebalance(start)
        for _ in range(3):  # includes one to warm up and one to profile the outcome of the move
            engine.train_batch(data)
        went.append(engine.rebalance().new_partition)
    return {"went": went, "speeds": engine.rebalancer.decider.cost_model.history.speeds}


def test_diffusion_gives_a_slow_stage_less() -> None:
    starts = [[0, 4, 11, 15], [0, 8, 12, 15], [0, 5, 10, 15]]
    result, *others = run(3, decide_by_hand, {"balancer": "diffusion"}, [1.0, 2.5, 1.0], starts)
    assert all(other["went"] == result["went"] for other in others)
    assert result["speeds"][1] == pytest.approx(0.4 * result["speeds"][0], rel=0.01)
    assert all(last - first <= 3 for _, first, last, _ in result["went"])


def decide_first(block: dict[str, Any], call: str) -> dict[str, Any]:
    """Call ``engine.rebalance()`` or ``engine.repack()`` before any batch is trained."""
    milliseconds = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    engine, data = unsteady_engine(block, [(ms / 1e3, 2 * ms / 1e3) for ms in milliseconds], [1.0] * 2, 0.0)
    engine.set_dataiterator(data)
    try:
        returned = getattr(engine, call)()
    except PartitionError as error:
        returned = str(error)
    result = {"returned": returned, "rebalances": engine.reports, "repacks": engine.repacks}
    result.update(steps=engine.global_steps, released=engine.released, partition=None, profile=engine.profile)
    if not engine.released:
        result["partition"] = engine.partition
        engine.train_batch(data)
        result["rebalances later"] = engine.reports[len(result["rebalances"]) :]
    return result


@pytest.mark.parametrize("block", [{"interval": 0}, {"interval": 1}, {"interval": 0, "profile": {"batches": 2}}])
def test_a_rebalance_without_a_profile_decides_once(block: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    for rank, result in enumerate(run(2, decide_first, {**block, "report": str(path)}, "rebalance")):
        assert result["rebalances"] == ([] if rank else [result["returned"]])
        report = result["returned"]
        assert (report.reason, report.old_partition, report.new_partition) == ("by hand", (0, 3, 6), (0, 5, 6))
        assert report.layers_moved == 2 and report.bytes_moved > 0 and report.profile_seconds > 0
        assert result["partition"] == [0, 5, 6] and result["steps"] == block.get("profile", {}).get("batches", 1)
        assert [later.reason for later in result["rebalances later"]] in ([], ["interval"])
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds[:4] == ["measured", "schedule", "rebalance", "profile"]


def test_a_repack_without_a_profile_moves_layers_once() -> None:
    block = {"interval": 1, "repack": {"max_slowdown": 0.5, "enabled": True}}
    stays, leaves = run(2, decide_first, block, "repack")
    (report,) = stays["repacks"]
    assert stays["rebalances"] == leaves["rebalances"] == leaves["repacks"] == [] and leaves["released"]
    assert report.reason == "by hand" and report == stays["returned"]
    assert report.old_partition == (0, 3, 6) and report.new_partition == (0, 6) and report.layers_moved == 3


def test_a_first_rebalance_without_memory_leaves_no_pending_decision() -> None:
    for result in run(2, decide_first, {"interval": 0, "memory_limit": "50B"}, "rebalance"):
        assert "bytes" in result["returned"] and result["partition"] == [0, 3, 6]
        assert result["rebalances"] == result["rebalances later"] == [] and result["profile"] is not None


def skip_a_layer(block: dict[str, Any], skipped: int, steps: int) -> dict[str, Any]:
    """Train a module that skips a layer in the first batches, as stochastic depth may, and rebalance."""
    engine, data = unsteady_engine(block, [(0.001, 0.002)] * 3 + [(0.005, 0.01)], [1.0] * 2, 0.0)
    module = engine.module

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        leaves_out = engine.global_steps < steps
        for position, layer in enumerate(module.forward_funcs):
            if not (leaves_out and engine.stage.layers.indices[position] == skipped):
                hidden = layer(hidden)
        return hidden

    module.forward = forward
    engine.set_dataiterator(data)
    warnings = Warnings()
    losses = [engine.train_batch(data).item() for _ in range(steps - 1)]
    found = {"losses": losses, "warned": warnings.messages, "profile": engine.profile, "partition": engine.partition}
    try:
        engine.rebalance()
    except PartitionError as error:
        found["refused"] = str(error)
    found["steps"] = engine.global_steps
    engine.rebalance()
    return {**found, "partition later": engine.partition}


@pytest.mark.parametrize(("interval", "migration"), [(0, "blocking"), (1, "blocking"), (0, "background")])
def test_a_layer_that_did_not_run_does_not_end_training(interval: int, migration: str) -> None:
    missing = "layer 1 has no measured forward seconds"
    block = {"interval": interval, "migration": migration, "profile": {"warmup_batches": 0}}
    results = run(2, skip_a_layer, block, 1, 4)
    assert len(results[0]["warned"]) == {"blocking": 4, "background": 3}[migration] and not results[1]["warned"]
    assert all(missing in text for text in results[0]["warned"])
    for result in results:
        assert len(result["losses"]) == 3 and result["profile"] is None and result["partition"] == [0, 2, 4]
        assert missing in result["refused"] and result["steps"] == 4
        assert result["partition later"] == [0, 3, 4]


def test_jitter_moves_nothing() -> None:
    # The small layer between the stages may be on either side: jitter of 10% decides which looks better.
    milliseconds = [*[(3.0, 6.0)] * 3, (0.5, 1.0), *[(3.0, 6.0)] * 3]
    results = run(2, train_unsteady, {"interval": 2}, milliseconds, 17, [1.0] * 2, 0.1)
    assert len(results[0]["reports"]) == 8
    assert all(result["partition"] == [0, 4, 7] for result in results)
