"""Layers that have to be on one stage: no cut between them, wherever a partition comes from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.distributed import TCPStore

import ds_dynmo
from ds_dynmo.engine.balancing.decentralized import decide_among_neighbours
from ds_dynmo.engine.balancing.policy import DecisionInput
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import MemoryModel, balanced, propose, uniform
from tests.distributed.harness import RankError, run, run_each
from tests.distributed.support.checkpoints import STEPS, load_and_go_on, save_and_go_on, train_on
from tests.distributed.support.configs import Case, config
from tests.distributed.support.elastic import ACCEPTS_JOINS, job, joining_launch, together
from tests.distributed.support.models import VOCABULARY, WIDTH, Embedding, loss, seeded
from tests.distributed.support.training import batches, build, outcome_of, state, train_and_move, whole

BLOCKS = 5
HEAD_WIDTH = 400  # makes the head heavier than all other layers
PAIR = {"keep_together": [[6, 7]]}
BY_HAND = {"interval": 0, **PAIR}
BY_PARAMETERS = {"interval": 2, "balance_by": "parameters", "min_improvement": 0.0, **PAIR}
WEIGHTS = [VOCABULARY * WIDTH, *[WIDTH * WIDTH] * BLOCKS, 2 * WIDTH, HEAD_WIDTH * (WIDTH + VOCABULARY)]


class GPT2ModelPipe(PipelineModule):
    """Named as in transpeeder: by this name DeepSpeed 0.19.8 takes the last tensor of a message for a mask."""


class MaskedEmbedding(Embedding):
    """Hidden states, and which position attends to which."""

    def forward(self, tokens: torch.Tensor) -> Any:
        length = tokens.shape[1]
        mask = torch.ones(len(tokens), length, length, dtype=torch.bool).tril()
        return super().forward(tokens), mask


class MaskedBlock(nn.Module):
    """Mixes each position with those that it attends to, and hands the mask on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(seeded((WIDTH, WIDTH), 10 * index))

    def forward(self, inputs: Any) -> Any:
        hidden, mask = inputs
        assert mask.dtype == torch.bool
        weights = mask.to(hidden.dtype)
        mixed = (weights / weights.sum(-1, keepdim=True)) @ hidden
        return hidden + torch.tanh(mixed @ self.mix), mask


class LastNorm(nn.LayerNorm):
    """Hands on one tensor, and no mask."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, inputs: Any) -> torch.Tensor:
        return super().forward(inputs[0])


class WideHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(seeded((WIDTH, HEAD_WIDTH), 1))
        self.down = nn.Parameter(seeded((HEAD_WIDTH, VOCABULARY), 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ self.up) @ self.down


def masked_layers() -> list[Any]:
    blocks = [LayerSpec(MaskedBlock, index) for index in range(BLOCKS)]
    return [LayerSpec(MaskedEmbedding, 1), *blocks, LayerSpec(LastNorm), LayerSpec(WideHead)]


def masked_engine(case: Case) -> Any:
    torch.manual_seed(0)
    module = GPT2ModelPipe(
        layers=masked_layers(), num_stages=case.stages, loss_fn=loss, partition_method="type:maskedblock"
    )
    return ds_dynmo.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config=config(case),
    )[0]


def train_masked(case: Case, moves: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
    """Train ``steps`` batches, going to the next of ``moves`` after each."""
    engine = masked_engine(case)
    losses = train_and_move(engine, batches(engine), moves, steps)
    return {
        **outcome_of(engine, losses),
        "evaluation": engine.eval_batch(batches(engine, seed=7)).item(),
        "partitions": [list(report.new_partition) for report in engine.reports],
    }


# -- a miniature of transpeeder -----------------------------------------------------------------------


def test_without_the_key_the_cut_that_a_balancer_would_make_ends_the_run() -> None:
    assert balanced(WEIGHTS, 2) == [0, 7, 8]
    with pytest.raises(RankError, match="'tuple' and 'Parameter'"):  # the head gets the tensor cut along its batch
        run(2, train_masked, Case(), [[0, 7, 8]], 2)


def check_same(still: list[dict[str, Any]], moved: list[dict[str, Any]]) -> None:
    for what in ("losses", "evaluation"):
        assert [result[what] for result in moved] == [result[what] for result in still]
    assert whole(moved) == whole(still)


@pytest.mark.parametrize(
    "balancer",
    [{}, {"balancer": "diffusion"}, {"balancer": "diffusion", "decentralized": True}],
    ids=["partition", "diffusion", "decentralized"],
)
def test_automatic_moves_cut_where_they_may(balancer: dict[str, Any]) -> None:
    still, moved = run_each(
        2,
        train_masked,
        (Case(dynmo=BY_HAND), [], 5),
        (Case(dynmo={**BY_PARAMETERS, **balancer}), [], 5),
    )
    assert [still[0]["partition"], moved[0]["partition"]] == [[0, 4, 8], [0, 6, 8]]
    check_same(still, moved)


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_moves_by_hand_change_nothing(precision: str) -> None:
    case = Case(stages=3, dynmo=BY_HAND, precision=precision)
    moves = [[0, 1, 6, 8], [0, 5, 6, 8], [0, 2, 4, 8]]
    still, moved = run_each(3, train_masked, (case, [], 5), (case, moves, 5))
    assert moved[0]["partitions"] == moves
    check_same(still, moved)


def _go_on(engine: Any, data: Iterator[Any], steps: int) -> dict[str, Any]:
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    replica = engine.grid.get_data_parallel_id()
    return {"losses": losses, "state": state(engine), "partition": engine.partition, "replica": replica}


def save_masked(case: Case, folder: str, move: Sequence[int], steps: int) -> dict[str, Any]:
    """Train, move, save, and train as much again."""
    engine = masked_engine(case)
    data = batches(engine)
    for _ in range(steps):
        engine.train_batch(data)
    engine.rebalance(move)
    engine.save_checkpoint(folder)
    return _go_on(engine, data, steps)


def load_masked(case: Case, folder: str, steps: int) -> dict[str, Any]:
    engine = masked_engine(case)
    engine.load_checkpoint(folder)
    return _go_on(engine, islice(batches(engine), steps * engine.micro_batches, None), steps)


@pytest.mark.parametrize("stages", [2, 4])
def test_saved_and_loaded_at_another_number_of_stages(tmp_path: Path, stages: int) -> None:
    case = Case(stages=3, dynmo=BY_HAND)
    saved = run(3, save_masked, case, str(tmp_path), [0, 5, 6, 8], 2)
    loaded = run(stages, load_masked, replace(case, stages=stages), str(tmp_path), 2)
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


def _landed(decide: Callable[..., Any], *args: Any, **options: Any) -> list[int] | None:
    try:
        return list(decide(*args, **options))
    except PartitionError:
        return None


def neighbours_and_all_at_once(stages: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Where diffusion lands between ranks, and in memory; None: where nothing fits."""
    chooser = random.Random(seed)
    module = PipelineModule(layers=masked_layers(), num_stages=stages, loss_fn=loss, partition_method="uniform")
    comm, stage = Communicator(module.mpu(), torch.device("cpu"), 30.0), module.stage_id
    among_neighbours, at_once = [], []
    for _ in range(12):
        groups = LayerGroups((0, *sorted(chooser.sample(range(1, 13), 7)), 13))
        start = groups.nearest([0, *sorted(chooser.sample(range(1, 13), stages - 1)), 13])
        costs = [chooser.choice([0.0, 1.0, chooser.random()]) for _ in range(13)]
        static, activation, inputs = (tuple(chooser.randrange(most) for _ in range(13)) for most in (9, 9, 4))
        memory = MemoryModel(static, activation, inputs, (70,) * stages, 4, chooser.choice([0, 2, 3]))
        own = costs[start[stage] : start[stage + 1]]
        among_neighbours.append(
            _landed(decide_among_neighbours, own, start, memory, stage, comm, groups=groups),
        )
        given: dict[str, Any] = {"memory": memory, "pipeline": None, "speeds": None, "groups": groups}
        at_once.append(_landed(propose, "diffusion", costs, stages, start=start, **given))
    return among_neighbours, at_once


def test_neighbours_land_where_diffusion_does() -> None:
    ranks = run(3, neighbours_and_all_at_once, 3, 1)
    among_neighbours, at_once = ranks[0]
    assert among_neighbours == at_once and sum(landed is not None for landed in at_once) > 5
    assert all(rank == ranks[0] for rank in ranks)


def begins_at(case: Case) -> dict[str, Any]:
    """Where an engine begins, and where it is after a batch."""
    engine = build(case)
    first = engine.partition
    engine.train_batch(batches(engine))
    return {"first": first, "then": engine.partition, "reasons": [report.reason for report in engine.reports]}


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
    found = run(stages, begins_at, Case(stages=stages, dynmo={"interval": 0, **block}))
    assert all(rank["first"] == rank["then"] == first for rank in found)
    assert found[0]["reasons"] == ([] if first == uniform(8, stages) else ["initial"])


def refused_at_the_start(case: Case) -> tuple[str, str]:
    try:
        build(case)
    except (ConfigError, PartitionError) as error:
        return type(error).__name__, str(error)
    return "built", ""


def test_rules_that_do_not_suit_are_refused_before_anything_begins() -> None:
    blocks: list[tuple[dict[str, Any], str, str]] = [
        ({"keep_together": [[6, 7, 8]]}, "ConfigError", "keep_together[0] = [6, 7, 8]: there is no layer 8"),
        ({"keep_together": ["type:Attention"]}, "ConfigError", "no layer's name matches 'Attention'"),
        ({"keep_together": ["type:("]}, "ConfigError", "is not a regular expression"),
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
    found = run_each(2, refused_at_the_start, *calls)
    for (_, kind, words), ranks in zip(blocks, found):
        assert ranks[0] == ranks[1]
        assert ranks[0][0] == kind and words in ranks[0][1], ranks[0]


def refused_moves(case: Case, partition: Sequence[int]) -> dict[str, Any]:
    """Go where it may not, by a rebalance and by a re-packing; train on."""
    engine = build(case)
    data, errors = batches(engine), []
    losses = [engine.train_batch(data).item()]
    before = engine.partition
    for move in (engine.rebalance, lambda to: engine.repack(partition=to), lambda to: engine.repack(engine.num_stages)):
        try:
            move(partition)
        except PartitionError as error:
            errors.append(str(error))
    assert engine.partition == before
    losses.append(engine.train_batch(data).item())
    return {"losses": losses, "errors": errors}


# -- moves, re-packing, joining -----------------------------------------------------------------------


def test_a_cut_asked_for_by_hand_is_refused_and_training_goes_on() -> None:
    case = Case(dynmo=BY_HAND)
    refused, plain = run_each(2, refused_moves, (case, [0, 7, 8]), (Case(dynmo=BY_HAND), [0, 4, 8]))
    for rank in refused:
        assert len(rank["errors"]) == 2
        assert all("cuts before layer 7" in error and "has [6, 7]" in error for error in rank["errors"])
    assert refused[0]["losses"] == plain[0]["losses"]


def repack_by_hand(case: Case, sizes: Sequence[Any]) -> dict[str, Any]:
    """After each batch go on with the next of ``sizes``, numbers of stages or partitions; and train one more."""
    engine = build(case)
    data = batches(engine)
    found: dict[str, Any] = {"losses": [], "partitions": [], "errors": [], "most": []}
    while engine.global_steps <= len(sizes):
        found["losses"].append(engine.train_batch(data).item())
        if engine.global_steps > len(sizes):
            break
        size = sizes[engine.global_steps - 1]
        found["most"].append(engine.most_stages())
        try:
            engine.repack(partition=size) if isinstance(size, list) else engine.repack(size)
        except PartitionError as error:
            found["errors"].append(str(error))
        if engine.released and not engine.wait_for_recall():
            return found
        found["partitions"].append(engine.partition)
    engine.dismiss_parked()
    return found


def test_re_packing_and_growing_cut_where_they_may() -> None:
    rules = {"keep_together": [[0, 1, 2], [3, 4], [5, 6, 7]]}
    case = Case(stages=3, dynmo={"interval": 0, "repack": {"release": "park"}, **rules}, start=(0, 3, 5, 8))
    sizes = [2, [0, 4, 8], 3, 1, 4, 3]
    ranks = run(3, repack_by_hand, case, sizes)
    found = ranks[0]
    assert [len(partition) - 1 for partition in found["partitions"]] == [2, 2, 3, 1, 1, 3]
    assert all(set(partition) <= {0, 3, 5, 8} for partition in found["partitions"])
    assert "cuts before layer 4" in found["errors"][0]
    assert found["errors"][1].startswith(
        "repack: 4 stages, there are 1 to 3 to go on with: dynmo.keep_together makes 3"
    )
    alone = run(3, repack_by_hand, case, [3] * len(sizes))
    assert found["most"] == [3] * len(sizes)
    assert found["losses"] == alone[0]["losses"]


def start_of_the_run(case: Case) -> tuple[float, float]:
    """What an iteration counts as having taken at the start, and what it is predicted to take as layers are."""
    engine = build(case)
    data = batches(engine)
    while engine.profile is None:
        engine.train_batch(data)
    return engine._cost_model.first_seconds, DecisionInput.of(engine.profile).pipeline.iteration_seconds(
        engine.partition
    )


def test_re_packing_expects_no_speed_that_no_allowed_partition_has() -> None:
    """One partition is allowed, [0, 1, 8], and a balanced one would be faster."""
    case = Case(dynmo={"interval": 0, "keep_together": [[1, 2, 3, 4, 5, 6, 7]]})
    first_seconds, as_it_is = run(2, start_of_the_run, case)[0]
    assert first_seconds == as_it_is


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def test_a_job_does_not_take_more_joiners_than_it_has_groups(store: TCPStore) -> None:
    """Two join a job of one stage that has two groups."""
    case = Case(stages=1, dynmo={**ACCEPTS_JOINS, "keep_together": [[0, 1, 2, 3], [4, 5, 6, 7]]})
    address = f"localhost:{store.port}"
    at_work, joined = together(
        lambda: run(1, job, case, {2: 2}, {2: [1, 2]}, 5, port=store.port, seconds=60.0),
        lambda: run(2, joining_launch, replace(case, stages=2), address, {}, 5, seconds=60.0),
    )
    assert at_work[0]["most"] == 2
    assert [list(report.new_partition) for report in at_work[0]["reports"]] == [[0, 4, 8]]
    assert sorted(rank["called"] for rank in joined) == [False, True]


# -- loading ------------------------------------------------------------------------------------------


def test_what_was_saved_at_a_cut_that_is_not_allowed_any_more(tmp_path: Path) -> None:
    """Layers go to the nearest partition that is; nothing else differs."""
    case = Case(dynmo={"interval": 0})
    saved = run(2, save_and_go_on, case, str(tmp_path), [0, 7, 8])
    loaded = run(2, load_and_go_on, replace(case, dynmo=BY_HAND), str(tmp_path))
    assert [saved[0]["partition"], loaded[0]["partition"]] == [[0, 7, 8], [0, 6, 8]]
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


def stock_checkpoint(case: Case, folder: str, write: bool) -> dict[str, Any]:
    """Written without a "dynmo" block, or loaded with one; what three more batches come to."""
    if write:
        engine = build(replace(case, dynmo=None, start=None))
        data = batches(engine)
        for _ in range(STEPS):
            engine.train_batch(data)
        engine.save_checkpoint(folder)
        return {"losses": [engine.train_batch(data).item() for _ in range(STEPS)]}
    engine = build(case)
    engine.load_checkpoint(folder)
    found = {"partition": engine.partition}
    return {**found, "losses": train_on(engine, STEPS)}


def test_what_stock_deepspeed_saved_at_such_a_cut(tmp_path: Path) -> None:
    """It is read where it was written, [0, 4, 8]; then layers go on."""
    rules = {"interval": 0, "keep_together": [[3, 4]]}
    case = Case(dynmo=rules, clip=0.0)
    saved = run(2, stock_checkpoint, case, str(tmp_path), True)
    loaded = run(2, stock_checkpoint, case, str(tmp_path), False)
    assert loaded[0]["partition"] == [0, 3, 8]
    assert loaded[0]["losses"] == saved[0]["losses"]
