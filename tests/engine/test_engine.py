"""The engine around a migration: what it guarantees beside bitwise equality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.comm import communicator
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import bottleneck, loads
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.models import WIDTH, Block, Embedding, Head, module_of
from tests.support.training import batches, build, partition_of, reports_of, sleeping_engine, state, use_virtual_clock

pytestmark = pytest.mark.ranks


def test_an_initial_partition_by_each_method() -> None:
    """The module was built with DeepSpeed's method "type:Embedding|Head", which gives blocks no weight."""
    expected = {
        "uniform": [0, 3, 6, 8],
        "type:block": [0, 2, 4, 8],
        "type:embed:100|block:1": [0, 1, 3, 8],
        "parameters": [0, 3, 4, 8],
    }
    methods = [(method, enabled) for method in expected for enabled in (True, False)]
    blocks = [{"interval": 0, "initial_partition": method, "enabled": enabled} for method, enabled in methods]
    cases = [*(Case(stages=3, dynmo=block) for block in blocks), Case(stages=3), Case(stages=3, start=(0, 1, 7, 8))]
    *found, as_built, as_told = run_each(3, partition_of, *((case,) for case in cases))
    for (method, enabled), results in zip(methods, found, strict=True):
        assert results == [([[0, 6, 7, 8]], expected[method])] * 3, (method, enabled)
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
    results = run(3, train_sleeping, {"interval": 3, "balancer": "diffusion"}, [4, 4, 4, 4, 4, 4, 24, 24], 5)
    assert all(result["partition"] == results[0]["partition"] for result in results)
    assert results[0]["partition"][-2] == 7


def profile_sleeping(milliseconds: Sequence[float]) -> tuple[list[float], Any]:
    seconds = [ms / 1000 for ms in milliseconds]
    engine, data = sleeping_engine({"interval": 0}, seconds, 2)
    for _ in range(3):
        engine.train_batch(data)
    return seconds, engine.profile


def test_a_profile_has_every_layer() -> None:
    for seconds, profile in run(2, profile_sleeping, [1, 2, 3, 4]):
        assert profile.partition == (0, 2, 4) and profile.micro_batches == 4
        for expected, layer in zip(seconds, profile.layers):
            assert layer.forward_seconds >= expected and layer.backward_seconds >= 2 * expected
            assert layer.parameters == layer.trainable_parameters == 4
            assert layer.static_bytes == 4 * 4 * 2 + (2 * 4 * 4 + 4)  # weight, gradient; Adam's two moments, step
            assert layer.activation_bytes > 0 and layer.input_bytes == 2 * 4 * 4
            assert layer.load_signal == 0.5
        assert profile.batch_seconds > 4 * 3 * sum(seconds[2:])


def rebalance_first() -> dict[str, Any]:
    engine, data = sleeping_engine({"interval": 0}, [0.001, 0.001, 0.001, 0.006], 2)
    try:
        engine.rebalance()
        early = ""
    except ds_dynmo.MigrationError as error:
        early = str(error)
    engine.set_dataiterator(data)
    engine.rebalance()
    return {"early": early, "steps": engine.global_steps, "partition": engine.partition}


def test_a_rebalance_by_hand_profiles_first_if_necessary() -> None:
    for result in run(2, rebalance_first):
        assert result["early"].startswith("rebalance: there is no profile yet")
        assert result["steps"] >= 1 and result["partition"] == [0, 3, 4]


def rebalance_with_little_memory() -> tuple[str, list[int]]:
    engine = build(Case(dynmo={"interval": 0, "memory_limit": "500B"}))
    data = batches(engine)
    engine.train_batch(data), engine.train_batch(data)
    try:
        engine.rebalance()
    except ds_dynmo.PartitionError as error:
        engine.train_batch(data)
        return str(error), engine.partition
    return "", engine.partition


def test_a_rebalance_that_does_not_fit_is_refused() -> None:
    for message, partition in run(2, rebalance_with_little_memory):
        assert "stage" in message and "bytes" in message
        assert partition == [0, 4, 8]


def train_with_little_memory() -> tuple[list[int], int]:
    engine = build(Case(dynmo={"interval": 2, "memory_limit": "500B"}))
    data = batches(engine)
    for _ in range(5):
        engine.train_batch(data)
    return engine.partition, engine.global_steps


def test_an_automatic_rebalance_that_cannot_fit_does_not_end_training() -> None:
    assert run(2, train_with_little_memory) == [([0, 4, 8], 5)] * 2


def refuse_partitions(partitions: list[Any]) -> list[Any]:
    """Return the state before any of them, and for each the state after it and the error."""
    engine = build(Case())
    engine.train_batch(batches(engine))
    found: list[Any] = [state(engine)]
    for partition in partitions:
        message = ""
        try:
            engine.rebalance(partition)
        except ds_dynmo.PartitionError as error:
            message = str(error)
        found.append((state(engine), message))
    return found


def test_an_invalid_partition_changes_nothing() -> None:
    for before, *refused in run(2, refuse_partitions, [[0, 8], [0, 0, 8], [0, 9, 8], [1, 4, 8], [0, 4, 7], "abc"]):
        assert len(refused) == 6
        for after, message in refused:
            assert "partition" in message and before == after


def disagree() -> tuple[list[str], list[int], list[float]]:
    engine = build(Case())
    data, messages = batches(engine), []
    losses = [engine.train_batch(data).item()]
    for partition in ([0, 2 + engine.stage_id, 8], [0, 9 * engine.stage_id or 3, 8]):
        try:
            engine.rebalance(partition)
        except (ds_dynmo.MigrationError, ds_dynmo.PartitionError) as error:
            messages.append(str(error))
    return messages, engine.partition, [*losses, engine.train_batch(data).item()]


def test_if_ranks_disagree_nothing_moves() -> None:
    for (differing, invalid), partition, losses in run(2, disagree):
        assert (
            "ranks differ: [0, 4, 8] -> [0, 2, 8] on ranks [0], [0, 4, 8] -> [0, 3, 8] on ranks [1]. No layer has moved"
            in differing
        )
        assert partition == [0, 4, 8] and len(losses) == 2
        assert "failed on ranks [1], first with PartitionError" in invalid


def rebalance_alone() -> str:
    engine = build(Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 2.0}))
    communicator.default_timeout = lambda: timedelta(seconds=3)
    message = ""
    store = torch.distributed.distributed_c10d._get_default_store()
    if engine.global_rank == 0:
        try:
            engine.rebalance([0, 2, 4, 8])
        except ds_dynmo.MigrationError as error:
            message = str(error)
        store.set("told", "yes")
    store.wait(["told"])
    return message


def test_a_rebalance_on_some_ranks_raises_an_error_that_names_the_others() -> None:
    message = run(3, rebalance_alone)[0]
    assert "rebalance is collective" in message and "ranks [1, 2] did not call it within 3 s" in message


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


SHARED = [
    "one module",
    "a part",
    "an argument",
    "a module and an argument",
    "one tensor",
    "overlapping views",
    "a global",
]
NOT_SHARED = ["nothing but memory", "a module without parameters"]


def test_layers_that_share_a_parameter_are_refused_on_every_rank() -> None:
    calls = [(how, apart) for how in (*SHARED, *NOT_SHARED) for apart in (True, False)]
    for (how, apart), messages in zip(calls, run_each(2, refusal_to_share, *calls), strict=True):
        assert len({*messages}) == 1
        if how in NOT_SHARED:
            assert messages[0] == "nothing was raised", how
        else:
            assert f"layers [1, {5 if apart else 2}] share parameters" in messages[0] and "TiedLayerSpec" in messages[0]


def gathered() -> list[Any]:
    """Gather nothing, and values of different lengths beside none."""
    from ds_dynmo.engine.comm.communicator import Communicator

    comm, rank = Communicator(module_of(Case(stages=3)).mpu(), torch.device("cpu"), 30.0), dist.get_rank()
    found: list[Any] = []
    for value in (None, [None, 0, "three" * 99][rank]):
        values, mine = comm.agree_and_gather("a test", lambda value=value: (value, rank))  # type: ignore[misc]
        found.append((list(values().values()), mine))
    return found


def test_a_value_of_each_rank_is_gathered_with_the_agreement() -> None:
    for rank, found in enumerate(run(3, gathered)):
        assert found == [([None] * 3, rank), ([None, 0, "three" * 99], rank)]
