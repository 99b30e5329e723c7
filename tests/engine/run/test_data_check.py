"""What the first and the last stage read is compared, and stand-ins for labels are never trained in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from ds_dynmo.engine.run.data_check import _are_apart
from ds_dynmo.engine.run.readings import NOTHING, SAMPLED, MicroBatchDigest, Readings, half_of
from ds_dynmo.errors import ConfigError
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.training import Warnings, batches, build

# -- digests, without processes -----------------------------------------------------------------------------

VALUES, OTHERS = torch.arange(6.0).reshape(2, 3), torch.arange(1.0, 7.0).reshape(2, 3)


def test_the_digest_of_a_half_is_of_its_values() -> None:
    assert half_of(VALUES) == half_of(VALUES.clone().t().contiguous().t()) != half_of(OTHERS)
    assert half_of(VALUES) != half_of(VALUES.reshape(3, 2)) and half_of(VALUES) != half_of(VALUES.double())
    assert half_of((VALUES, OTHERS)) == half_of([VALUES, OTHERS]) != half_of((OTHERS, VALUES))
    assert half_of(VALUES).shown == "[0, 1, 2, 3, ...]" and not half_of((VALUES, torch.zeros(3))).is_blank
    large = torch.arange(4 * SAMPLED)
    assert half_of(large) == half_of(large.clone()) != half_of(large.flip(0))
    assert half_of(VALUES.bfloat16()) != half_of(OTHERS.bfloat16())
    assert half_of(torch.tensor([True, False])) != half_of(torch.tensor([False, True]))


def test_nothing_and_one_number_throughout_are_blank_in_any_shape() -> None:
    assert half_of(torch.zeros(2, 3)) == half_of(torch.zeros(4)) != half_of(torch.ones(4))
    for value in (torch.zeros(2), torch.full((3,), -100), (torch.zeros(2), torch.ones(2)), {"a": torch.zeros(1)}):
        assert half_of(value).is_blank
    for value in (None, (), {}, "text", 3, object(), torch.empty(0), [None]):
        assert half_of(value) == NOTHING


def test_a_micro_batch_that_lacks_a_half_is_read() -> None:
    readings = Readings()
    readings.saw((VALUES, OTHERS))
    with readings.recorded() as seen:
        for batch in ((VALUES, OTHERS), (VALUES,), (torch.zeros(2).to_sparse(), VALUES), {0: VALUES}):
            readings.saw(batch)
    readings.saw((VALUES, OTHERS))
    assert [half == NOTHING for both in seen for half in both] == [False, False, False, True, True, False, False, True]


def test_stages_are_apart_if_no_half_is_the_same_and_one_has_values_on_both() -> None:
    """Not where each stage draws its own noise for inputs, as a diffusion model may."""
    for first, last, apart in (
        ((VALUES, OTHERS), (VALUES, OTHERS), False),
        ((VALUES, None), (None, OTHERS), False),
        ((VALUES, VALUES * 0), (OTHERS * 0, OTHERS), False),
        ((VALUES, OTHERS), (OTHERS, OTHERS), False),
        ((VALUES, VALUES), (VALUES, OTHERS), False),
        ((VALUES, VALUES), (OTHERS, OTHERS), True),
        ((VALUES, None), (OTHERS, OTHERS), True),
        ((VALUES, VALUES), (None, OTHERS), True),
    ):
        digests = (MicroBatchDigest(*map(half_of, each)) for each in (first, last))
        assert _are_apart(*digests) == apart, (first, last)


# -- programs -----------------------------------------------------------------------------------------------

Program = Callable[[Any], Iterator[Any]]
CHAIN, V = [0, 4, 8], [0, 2, 4, 6, 8]


def whole(engine: Any) -> Iterator[Any]:
    """Read whole micro-batches on every rank."""
    return batches(engine)


def given(inputs: torch.Tensor, labels: torch.Tensor, first: bool, last: bool) -> Any:
    return inputs if first else 0 * inputs, labels if last else None


def asks_each_time(engine: Any) -> Iterator[Any]:
    return (given(*batch, engine.is_first_stage(), engine.is_last_stage()) for batch in batches(engine))


def asked_once(engine: Any) -> Iterator[Any]:
    first, last = engine.is_first_stage(), engine.is_last_stage()
    return (given(*batch, first, last) for batch in batches(engine))


def by_rank(engine: Any) -> Iterator[Any]:
    """Give each end of a chain what it uses, and nothing but zeros to the rest of an end."""
    last = engine.stage_id == engine.num_stages - 1
    return ((x * (engine.stage_id == 0), y * last) for x, y in batches(engine))


def shuffles_apart(engine: Any) -> Iterator[Any]:
    """Let replica 0's stages read one order, those of the last replica an order each."""
    replica = engine.grid.get_data_parallel_id()
    seed = engine.stage_id if replica == engine.grid.data_parallel_size - 1 else 0
    return batches(engine, seed=seed)


def labels_of_inputs(engine: Any) -> Iterator[Any]:
    """Give inputs in place of labels to the first stage."""
    return ((x, y if engine.stage_id else x) for x, y in batches(engine))


def train(engine: Any, program: Program, moves: dict[int, list[int]], steps: int = 4) -> dict[str, Any]:
    """Train, and move after batches; say what came of it, up to a refusal."""
    log, data, losses = Warnings(), program(engine), []
    refused = ""
    for step in range(1, steps + 1):
        try:
            losses.append(engine.train_batch(data).item())
        except ConfigError as error:
            refused = str(error)
            break
        if step in moves:
            engine.rebalance(moves[step])
    return {"losses": losses, "refused": refused, "warned": [*log.messages], "steps": engine.global_steps}


AUTO = {"interval": 0, "log": False, "schedule": {"kind": "auto"}}


def of_two_stages() -> dict[str, Any]:
    case = Case(micro_batches=2, dynmo=AUTO)
    in_v = replace(case, dynmo={**AUTO, "schedule": {"kind": "v"}, "initial_partition": V})
    to_v_and_back = {2: V, 3: CHAIN}
    found: dict[str, Any] = {}
    for program in (whole, asks_each_time, asked_once, by_rank, labels_of_inputs):
        found[f"{program.__name__} moves"] = train(engine := build(case), program, to_v_and_back)
        if program == by_rank:
            found["goes on"] = train(engine, asks_each_time, {}, 1)
    for program in (asked_once, by_rank):
        found[f"{program.__name__} in a V"] = train(engine := build(in_v), program, {}, 2)
    engine.rebalance(CHAIN)
    data = islice(whole(engine), case.micro_batches)
    engine.train_batch(data)
    engine.rebalance(V)
    with pytest.raises(StopIteration):  # as where layers stay
        engine.train_batch(data)
    engine = build(case)
    found["evaluations"] = [engine.eval_batch(by_rank(engine)).item(), train(engine, by_rank, {}, 1)["warned"]]
    engine.repack(1)
    if not engine.released:
        for attempt in (engine.eval_batch, engine.train_batch):
            with pytest.raises(ConfigError, match="until now it has read all 0 as labels"):
                attempt(by_rank_of_two(engine))
    return found


def by_rank_of_two(engine: Any) -> Iterator[Any]:
    """Go on as :func:`by_rank` did on the first of two stages."""
    return ((x, 0 * y) for x, y in batches(engine))


@pytest.mark.ranks
def test_stand_ins_for_labels_are_refused_once_they_would_be_trained() -> None:
    for rank, found in enumerate(run(2, of_two_stages)):
        right = found["whole moves"]["losses"]
        assert found["asks_each_time moves"] == found["whole moves"] and len(right) == 4
        assert not found["whole moves"]["warned"]
        for name, shown in (("asked_once moves", "nothing"), ("by_rank moves", "all 0")):
            refused = found[name]
            assert (refused["losses"], refused["steps"], refused["warned"]) == (right[:2], 2, [])
            assert refused["refused"].startswith("rank 0: rank 0 (") and "from batch 3 on" in refused["refused"]
            assert f"until now it has read {shown} as labels" in refused["refused"]
        assert found["goes on"]["steps"] == 3 and not found["goes on"]["refused"]
        assert not found["evaluations"][1]
        assert found["asked_once in a V"]["losses"] == right[:2] and not found["asked_once in a V"]["warned"]
        if rank == 0:  # which warns for its pipeline
            (blank,), (changing,) = found["by_rank in a V"]["warned"], found["labels_of_inputs moves"]["warned"]
            assert "rank 0 (" in blank and "computes the loss, and reads all 0 as labels; rank 1 (" in blank
            assert "computes the loss from batch 3 on" in changing and "other labels than were trained" in changing


def of_three_stages() -> dict[str, Any]:
    """Go from a V to a chain, whose last stage reads stand-ins."""
    case = Case(stages=3, micro_batches=2, dynmo={**AUTO, "schedule": {"kind": "v"}})
    return train(build(case), asked_once, {1: [0, 3, 6, 8]}, 3)


@pytest.mark.ranks
def test_the_last_of_three_stages_reads_stand_ins() -> None:
    for refused in run(3, of_three_stages):
        assert len(refused["losses"]) == refused["steps"] == 1
        assert "rank 2 (" in refused["refused"] and "from batch 2 on" in refused["refused"]


def of_replicas_and_slices(case: Case) -> list[str]:
    return train(build(case), shuffles_apart, {}, 1)["warned"]


@pytest.mark.ranks
def test_the_first_stage_of_each_replica_warns_and_one_of_its_slices() -> None:
    of_replicas, of_slices = run_each(4, of_replicas_and_slices, (Case(replicas=2),), (Case(slices=2),))
    assert [len(warned) for warned in of_replicas] == [0, 1, 0, 0]
    assert "As micro-batch 0 rank 1 (" in of_replicas[1][0] and ", rank 3 (" in of_replicas[1][0]
    assert "seed samplers" in of_replicas[1][0]
    assert [len(warned) for warned in of_slices] == [1, 0, 0, 0]
