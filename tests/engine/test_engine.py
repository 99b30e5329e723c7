"""The engine around a migration: what it guarantees beside bitwise equality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.comm import communicator
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import bottleneck, loads
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import WIDTH, Block, Embedding, Head
from tests.support.training import batches, build, partition_of, reports_of, sleeping_engine, state, use_virtual_clock

pytestmark = pytest.mark.ranks


def test_an_initial_partition_by_each_method() -> None:
    """The module was built with DeepSpeed's method "type:Embedding|Head", which gives blocks no weight.

    A section that is switched off places layers, too.
    """
    expected = {
        ("uniform", True): [0, 3, 6, 8],
        ("type:block", False): [0, 2, 4, 8],
        ("type:embed:100|block:1", True): [0, 1, 3, 8],
        ("parameters", False): [0, 3, 4, 8],
    }
    blocks = [{"interval": 0, "initial_partition": method, "enabled": enabled} for method, enabled in expected]
    cases = [*(Case(stages=3, dynmo=block) for block in blocks), Case(stages=3)]
    switched_off = Case(stages=3, start=(0, 1, 7, 8), dynmo={"enabled": False, "interval": 1})
    *found, as_built, as_told = run_each(3, partition_of, *((case,) for case in (*cases, switched_off)))
    for (method, partition), results in zip(expected.items(), found, strict=True):
        assert results == [([[0, 6, 7, 8]], partition)] * 3, method
    assert as_built == [([], [0, 6, 7, 8])] * 3
    assert as_told == [([[0, 6, 7, 8]], [0, 1, 7, 8])] * 3


def train_sleeping(block: dict[str, Any], milliseconds: Sequence[float], steps: int) -> dict[str, Any]:
    use_virtual_clock()
    engine, data = sleeping_engine(block, [ms / 1000 for ms in milliseconds], torch.distributed.get_world_size())
    for _ in range(steps):
        engine.train_batch(data)
    reports = [
        (r.step, r.reason, r.old_partition, r.new_partition, r.bottleneck_seconds_after) for r in reports_of(engine)
    ]
    return {"partition": engine.partition, "reports": reports}


def test_automatic_rebalance_evens_out_sleeping_layers(tmp_path: Path) -> None:
    """It decides on one profile, so that nothing is averaged and the report follows from it exactly."""
    report = tmp_path / "report.jsonl"
    block = {"interval": 3, "stop_step": 3, "report": str(report), "min_improvement": 0.05}
    block |= {"profile": {"warmup_batches": 2}, "migration": "blocking"}
    results = run(2, train_sleeping, block, [2, 2, 2, 2, 2, 2, 12, 12], 6)
    assert results[0]["partition"] == results[1]["partition"]
    assert results[0]["partition"] in ([0, 7, 8], [0, 6, 8])  # equal except for the loss
    assert results[0]["reports"] == results[1]["reports"]
    everything = [json.loads(line) for line in report.read_text().splitlines()]
    kinds = [(record["kind"], record["step"]) for record in everything]
    decision = [("schedule", 3), ("rebalance", 3)]
    assert kinds == [("measured", 3), *decision, ("profile", 3), ("measured", 6), ("profile", 6)]
    records, profile = [r for r in everything if r["kind"] not in ("profile", "schedule")], everything[3]
    moved = records[1]
    assert everything[1]["orders"] is None
    assert profile["partition"] == moved["old_partition"] and profile["micro_batches"] == 4
    costs = [f + b for f, b in zip(profile["forward_seconds"], profile["backward_seconds"], strict=True)]
    assert bottleneck(costs, moved["new_partition"]) == moved["bottleneck_seconds_after"]
    assert loads(costs, moved["old_partition"]) == moved["stage_seconds_before"]
    assert loads(costs, moved["new_partition"]) == moved["stage_seconds_after"]
    assert moved["reason"] == "interval" and moved["step"] == 3 and moved["layers_moved"] > 0
    assert moved["bottleneck_seconds_after"] < moved["bottleneck_seconds_before"]
    assert records[2]["rebalance_step"] == 3
    assert records[2]["bottleneck_seconds"] < records[0]["bottleneck_seconds"]


def test_diffusion_rebalances_in_the_engine() -> None:
    results = run(2, train_sleeping, {"interval": 3, "balancer": "diffusion"}, [2, 2, 2, 2, 2, 2, 2, 24], 5)
    assert [result["partition"] for result in results] == [[0, 7, 8]] * 2


def rebalance_first(milliseconds: Sequence[float]) -> dict[str, Any]:
    """Rebalance without data for a profile, then with them."""
    seconds = [ms / 1000 for ms in milliseconds]
    engine, data = sleeping_engine({"interval": 0}, seconds, 2)
    with pytest.raises(ds_dynmo.MigrationError) as early:
        engine.rebalance()
    engine.set_dataiterator(data)
    engine.rebalance()
    return {
        "early": str(early.value),
        "steps": engine.global_steps,
        "partition": engine.partition,
        "profile": engine.profile,
        "seconds": seconds,
    }


def test_a_rebalance_by_hand_profiles_every_layer_first_if_necessary() -> None:
    for result in run(2, rebalance_first, [1, 2, 3, 4]):
        assert result["early"].startswith("rebalance: there is no profile yet")
        assert result["steps"] >= 1 and result["partition"] == [0, 3, 4]
        profile, seconds = result["profile"], result["seconds"]
        assert profile.partition == (0, 2, 4) and profile.micro_batches == 4
        for expected, layer in zip(seconds, profile.layers):
            assert layer.forward_seconds >= expected and layer.backward_seconds >= 2 * expected
            assert layer.parameters == layer.trainable_parameters == 4
            assert layer.static_bytes == 4 * 4 * 2 + (2 * 4 * 4 + 4)  # weight, gradient; Adam's two moments, step
            assert layer.activation_bytes > 0 and layer.input_bytes == 2 * 4 * 4
            assert layer.load_signal == 0.5
        assert profile.batch_seconds > 4 * 3 * sum(seconds[2:])


def rebalance_with_little_memory() -> tuple[str, str, list[int], int]:
    """Train over a decision, and ask for another; train on. Return the errors of both."""
    engine = build(Case(dynmo={"interval": 2, "memory_limit": "500B"}))
    data = batches(engine)
    for _ in range(3):
        engine.train_batch(data)
    automatic = repr(engine.rebalancer.failure)
    with pytest.raises(ds_dynmo.PartitionError) as refused:
        engine.rebalance()
    engine.train_batch(data)
    return automatic, str(refused.value), engine.partition, engine.global_steps


def test_a_rebalance_that_does_not_fit_is_refused_and_does_not_end_training() -> None:
    for automatic, by_hand, partition, steps in run(2, rebalance_with_little_memory):
        assert automatic.startswith("PartitionError(")
        for message in (automatic, by_hand):
            assert "stage" in message and "bytes" in message
        assert (partition, steps) == ([0, 4, 8], 4)


INVALID: list[Any] = [[0, 8], [0, 0, 8], [0, 9, 8], [1, 4, 8], [0, 4, 7], "abc"]


def refuse_partitions() -> tuple[list[str], list[str]]:
    """Return the errors of invalid partitions, and where ranks differ, or one has an invalid one; nothing changes."""
    engine = build(Case())
    data = batches(engine)
    engine.train_batch(data)
    before = state(engine)

    def refused(partition: Any, kind: type[Exception]) -> str:
        with pytest.raises(kind) as error:
            engine.rebalance(partition)
        assert state(engine) == before and engine.partition == [0, 4, 8], partition
        return str(error.value)

    invalid = [refused(partition, ds_dynmo.PartitionError) for partition in INVALID]
    differing = refused([0, 2 + engine.stage_id, 8], ds_dynmo.MigrationError)
    on_one = refused([0, 9 * engine.stage_id or 3, 8], ds_dynmo.PartitionError)
    engine.train_batch(data)
    return invalid, [differing, on_one]


def test_if_a_partition_is_invalid_or_ranks_disagree_nothing_moves() -> None:
    for invalid, (differing, on_one) in run(2, refuse_partitions):
        for partition, message in zip(INVALID, invalid, strict=True):
            assert "partition" in message, partition
        moves = "[0, 4, 8] -> [0, 2, 8] on ranks [0], [0, 4, 8] -> [0, 3, 8] on ranks [1]. No layer has moved"
        assert f"ranks differ: {moves}" in differing
        assert "failed on ranks [1], first with PartitionError" in on_one


def rebalance_alone() -> str:
    engine = build(Case(dynmo={"interval": 0, "timeout_seconds": 2.0}))
    communicator.default_timeout = lambda: timedelta(seconds=3)
    message = ""
    store = torch.distributed.distributed_c10d._get_default_store()
    if engine.global_rank == 0:
        with pytest.raises(ds_dynmo.MigrationError) as error:
            engine.rebalance([0, 2, 8])
        message = str(error.value)
        store.set("told", "yes")
    store.wait(["told"])
    return message


def test_a_rebalance_on_some_ranks_raises_an_error_that_names_the_others() -> None:
    message = run(2, rebalance_alone)[0]
    assert "rebalance is collective" in message and "ranks [1] did not call it within 3 s" in message


class Around(nn.Module):
    """A layer around a module or a tensor that the program has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(hidden)


class AroundWeight(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden @ self.weight


OF_THE_PROGRAM = nn.Linear(WIDTH, WIDTH)


class AroundGlobal(Around):
    def __init__(self) -> None:
        super().__init__(OF_THE_PROGRAM)


def two_layers(how: str) -> list[Any]:
    """Make two layers that share a parameter, if they do."""
    linear, weights = nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH, WIDTH)
    return {
        "one module": lambda: [linear, linear],
        "a part": lambda: [linear, nn.Sequential(linear)],
        "an argument": lambda: [LayerSpec(Around, linear), LayerSpec(Around, linear)],
        "a module and an argument": lambda: [linear, LayerSpec(Around, nn.Sequential(linear))],
        "one tensor": lambda: [LayerSpec(AroundWeight, weights[0]), LayerSpec(AroundWeight, weights[0])],
        "overlapping views": lambda: [AroundWeight(weights[0]), AroundWeight(weights.view(-1)[9:73].view(8, 8))],
        "a global": lambda: [LayerSpec(AroundGlobal), LayerSpec(AroundGlobal)],
        "nothing but memory": lambda: [LayerSpec(AroundWeight, weights[0]), LayerSpec(AroundWeight, weights[1])],
        "a module without parameters": lambda: [dropout := nn.Dropout(), dropout],
    }[how]()


def refusal_to_share(how: str, apart: bool) -> str:
    """Build an engine, on whose two stages the two layers are apart or on the first. Return the error of this rank."""
    first, second = two_layers(how)
    blocks = [LayerSpec(Block, index) for index in range(3)]
    between, behind = (blocks, []) if apart else ([], blocks)
    try:
        build(Case(), lambda case: [LayerSpec(Embedding, 1), first, *between, second, *behind, LayerSpec(Head, 2)])
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


APART = {  # whether two layers that share so are on two stages
    "one module": True,
    "a part": False,
    "an argument": True,
    "a module and an argument": False,
    "one tensor": True,
    "overlapping views": False,
    "a global": True,
    "nothing but memory": True,
    "a module without parameters": False,
}
NOT_SHARED = ["nothing but memory", "a module without parameters"]


def test_layers_that_share_a_parameter_are_refused_on_every_rank() -> None:
    for (how, apart), messages in zip(APART.items(), run_each(2, refusal_to_share, *APART.items()), strict=True):
        assert len({*messages}) == 1
        if how in NOT_SHARED:
            assert messages[0] == "nothing was raised", how
        else:
            assert f"layers [1, {5 if apart else 2}] share parameters" in messages[0], how
            assert "TiedLayerSpec" in messages[0], how
