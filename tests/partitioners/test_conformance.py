"""What every registered balancer guarantees."""

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.config import read_dynmo_config
from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.partitioners import (
    PipelineModel,
    balanced,
    bottleneck,
    check_signature,
    diffusion,
    get,
    makespan,
    names,
    propose,
    register,
    registry,
)
from ds_dynmo.plan import check_partition
from tests.partitioners.instances import KINDS, overshoot, random_costs, random_memory, random_start
from tests.support.pages import code_blocks


@pytest.fixture(params=names())
def balancer(request: pytest.FixtureRequest) -> Any:
    return get(request.param)


def check_result(balancer: Any, costs: list[float], start: list[int], memory: Any) -> None:
    num_stages = len(start) - 1
    given = [*costs], [*start]
    partition = balancer(costs, num_stages, start=start, memory=memory)
    assert (costs, start) == given  # arguments are read only
    assert all(type(boundary) is int for boundary in partition)
    check_partition(partition, len(costs), num_stages)
    assert bottleneck(costs, partition) <= bottleneck(costs, start)
    assert partition == balancer(tuple(costs), num_stages, start=tuple(start), memory=memory)
    if memory is not None:
        assert overshoot(memory, partition) <= 0


def test_results_are_valid_never_worse_reproducible_and_within_memory(balancer: Any) -> None:
    rng = random.Random(11)
    limited = 0
    for case in range(120):
        num_layers = rng.randint(1, 12)
        num_stages = rng.randint(1, num_layers)
        costs, start = random_costs(rng, num_layers, KINDS[case % 6]), random_start(rng, num_layers, num_stages)
        check_result(balancer, costs, start, None)
        memory = random_memory(rng, num_layers, num_stages)
        if overshoot(memory, start) <= 0:
            limited += 1
            check_result(balancer, costs, start, memory)
    assert limited > 40


def test_what_is_refused(balancer: Any) -> None:
    refusals: list[tuple[list[Any], list[int], str]] = [
        *(([1.0, bad, 1.0], [0, 1, 3], "layer 1 costs") for bad in (math.nan, math.inf, -1.0, None)),
        ([1.0, 1.0], [0, 1, 2, 3], "2 layers cannot fill 3 stages"),
        ([1.0, 1.0, 1.0], [0, 2, 4], "from 0 to 3, for 2 stages and 3 layers"),
    ]
    for costs, start, words in refusals:
        with pytest.raises(PartitionError, match=words):
            pytest.fail(f"{costs}: {balancer(costs, len(start) - 1, start=start, memory=None)}")


def test_names() -> None:
    assert (get("makespan"), get("partition"), get("diffusion")) == (makespan, balanced, diffusion)
    with pytest.raises(ConfigError, match=r'no balancer is named "partitoin", did you mean "partition"\?.*diffusion'):
        get("partitoin")
    with pytest.raises(ConfigError, match=r'"zzz"; registered: diffusion, makespan, partition'):
        get("zzz")


def test_users_register_a_balancer_under_a_free_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BALANCERS", dict(registry._BALANCERS))

    @register("as it was")
    def keep(costs: Any, num_stages: int, *, start: Any, memory: Any) -> list[int]:
        return list(start)

    assert get("as it was") is keep
    assert names() == ["as it was", "diffusion", "makespan", "partition"]
    with pytest.raises(ConfigError, match='"partition" is registered already'):
        register("partition")(keep)


def test_a_balancer_gets_the_arguments_that_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BALANCERS", dict(registry._BALANCERS))
    given: dict[str, Any] = {}

    @register("plain")
    def plain(costs: Any, num_stages: int, *, start: Any, memory: Any) -> list[int]:
        given["plain"] = ()
        return list(start)

    @register("any")
    def anything(costs: Any, num_stages: int, **options: Any) -> list[int]:
        given["any"] = sorted(options)
        return list(options["start"])

    @register("planner")
    class Planner:
        def __new__(cls, costs: Any, num_stages: int, start: Any, memory: Any, pipeline: Any = None) -> Any:
            given["planner"] = pipeline
            return list(start)

    @register("both")
    def both(costs: Any, num_stages: int, *, start: Any, memory: Any, pipeline: Any, speeds: Any) -> list[int]:
        given["both"] = (pipeline, speeds)
        return list(start)

    @register("sizes")
    def sizes(costs: Any, num_stages: int, *, start: Any, memory: Any, layer_bytes: Any) -> list[int]:
        given["sizes"] = layer_bytes
        return list(start)

    pipeline = PipelineModel((1.0, 1.0), (1.0, 1.0), 2, (1.0, 0.5))
    for name in ("plain", "any", "planner", "both", "sizes"):
        options: dict[str, Any] = {"pipeline": pipeline, "speeds": pipeline.speeds, "layer_bytes": [7, 9]}
        assert propose(name, [2.0, 2.0], 2, start=[0, 1, 2], memory=None, **options) == [0, 1, 2]
    assert given == {
        "plain": (),
        "any": ["memory", "start"],
        "planner": pipeline,
        "both": (pipeline, pipeline.speeds),
        "sizes": [7, 9],
    }


def test_a_balancer_that_cannot_be_called_is_refused_with_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BALANCERS", dict(registry._BALANCERS))
    register("old style")(lambda costs, num_stages, start: start)
    with pytest.raises(ConfigError) as refused:
        check_signature("old style")
    assert str(refused.value) == (
        'dynmo.balancer = "old style": is called as balancer(costs, num_stages, start=..., memory=...), and its '
        "signature is (costs, num_stages, start): got an unexpected keyword argument 'memory'"
    )
    register("newer")(lambda costs, num_stages, *, speeds, **rest: rest["start"])
    for name in ("newer", *names()[:1]):
        check_signature(name)


PRINTED, CONFIGURATION = (
    code_blocks("balancers.md", "Write a balancer", language)[0] for language in ("python", "json")
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Enter an empty folder. What is registered or imported there is forgotten afterwards."""
    monkeypatch.setattr(registry, "_BALANCERS", dict(registry._BALANCERS))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


def test_the_printed_balancer_runs_by_the_printed_name(folder: Path) -> None:
    (folder / "my_balancers.py").write_text(PRINTED)
    path = list(sys.path)
    section = read_dynmo_config(json.loads(CONFIGURATION))
    assert section is not None and section.balancer == "my_balancers:one_step" and sys.path == path
    given = {"start": [0, 1, 2, 8], "memory": None, "pipeline": None, "speeds": None}
    assert propose(section.balancer, [1.0] * 8, 3, **given) == [0, 2, 3, 8]  # balanced goes to [0, 2, 5, 8] at once
    rng = random.Random(13)
    for case in range(60):
        num_layers = rng.randint(1, 12)
        start = random_start(rng, num_layers, rng.randint(1, num_layers))
        costs = random_costs(rng, num_layers, KINDS[case % len(KINDS)])
        partition = propose(section.balancer, costs, len(start) - 1, **{**given, "start": start})
        check_partition(partition, num_layers, len(start) - 1)
        assert all(abs(here - there) <= 1 for here, there in zip(start, partition))


def test_the_printed_balancer_that_simulates_runs_by_its_name(folder: Path) -> None:
    (folder / "my_balancers.py").write_text(code_blocks("balancers.md", "Simulate partitions", "python")[0])
    read_dynmo_config({"dynmo": {"balancer": "my_balancers:shortest_nearby"}})
    pipeline = PipelineModel((1.0,) * 8, (2.0,) * 8, 4, (1.0,) * 3)
    steps = [[0, 1, 2, 8]]
    for _ in range(6):
        given = {"start": steps[-1], "memory": None, "pipeline": pipeline, "speeds": None}
        steps.append(propose("my_balancers:shortest_nearby", [3.0] * 8, 3, **given))
    seconds = [pipeline.seconds_under_1f1b(step) for step in steps]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0] and steps[-1] == [0, 2, 5, 8]


def test_a_balancer_that_cannot_be_imported_is_refused(folder: Path) -> None:
    for module, text in (("broken", "def ("), ("fails", "{}[3]"), ("fine", "limit = 3")):
        (folder / f"{module}.py").write_text(text)
    refusals = {
        "absent:one_step": r'module "absent" cannot be imported from .*: ModuleNotFoundError: No module named',
        "broken:one_step": r"SyntaxError: .*broken\.py, line 1",
        "fails:one_step": r'module "fails" cannot be imported from .*: KeyError: 3$',
        "fine:one_setp": r"<module 'fine' from '.*fine\.py'> has no function \"one_setp\"$",
        "fine:limit": r'has no function "limit"$',
        "sys:limit": r'has no function "limit"$',
        ":one_step": r'module "" cannot be imported',
    }
    for name, says in refusals.items():
        with pytest.raises(ConfigError, match=rf'^dynmo\.balancer = "{name}": .*{says}'):
            pytest.fail(f"{name}: {read_dynmo_config({'dynmo': {'balancer': name}})}")
