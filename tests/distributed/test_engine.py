"""The engine around a migration: what it promises besides bitwise equality."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.partitioners import bottleneck
from tests.distributed import workloads
from tests.distributed.harness import RankError, run
from tests.distributed.workloads import Case


def test_an_initial_partition_by_each_method() -> None:
    """DeepSpeed had put as many ends as possible on a stage: embedding and head count, the blocks do not."""
    expected = {
        "uniform": [0, 3, 6, 8],
        "type:block": [0, 2, 4, 8],
        "type:embed:100|block:1": [0, 1, 3, 8],
        "parameters": [0, 3, 4, 8],
    }
    for method, partition in expected.items():
        for enabled in (True, False):
            case = Case(stages=3, dynmo={"interval": 0, "initial_partition": method, "enabled": enabled})
            assert run(3, workloads.partition_of, case) == [([[0, 6, 7, 8]], partition)] * 3, case.dynmo
    assert run(3, workloads.partition_of, Case(stages=3)) == [([], [0, 6, 7, 8])] * 3
    assert run(3, workloads.partition_of, Case(stages=3, start=(0, 1, 7, 8))) == [([[0, 6, 7, 8]], [0, 1, 7, 8])] * 3


def test_without_a_block_the_engine_is_deepspeeds() -> None:
    stock, ours = (run(2, workloads.train_stock, Case(dynmo=None), which) for which in ("deepspeed", "ds_dynmo"))
    assert stock == ours


DRAWS_AS_DEEPSPEED = {"interval": 0, "randomness": {"per_layer": False}}


@pytest.mark.parametrize(
    "case",
    [
        Case(clip=0.0, tied=True),
        Case(clip=0.0, tied=True, replicas=2, dropout=True, dynmo=DRAWS_AS_DEEPSPEED),
        Case(clip=0.0, tied=True, precision="bf16"),
        Case(clip=0.0, tied=True, precision="bf16 zero1", replicas=2),
    ],
)
def test_an_unclipped_run_is_bitwise_deepspeeds(case: Case) -> None:
    stock, ours = (run(case.ranks, workloads.train_stock, case, which) for which in ("deepspeed", "ds_dynmo"))
    assert stock == ours


@pytest.mark.parametrize(
    ("case", "make_layers"),
    [
        (Case(clip=0.0, dropout=True), workloads.layers),
        (Case(clip=0.0, tied=True, stages=1), workloads.layers),
        (Case(clip=0.0, stages=3), workloads.layers_of_many_widths),
    ],
    ids=["draws", "tied on one stage", "several tensors"],
)
def test_where_the_readme_says_that_an_unclipped_run_differs_it_does(case: Case, make_layers: Any) -> None:
    stock, ours = (
        run(case.ranks, workloads.train_stock, case, which, make_layers) for which in ("deepspeed", "ds_dynmo")
    )
    assert stock != ours


def test_deepspeed_clips_by_its_first_stage_unless_told_not_to() -> None:
    """So that runs without the key differ, and are those with 1.0."""
    told_nothing = replace(Case(), clip=math.nan)
    (stock, _), (ours, _), (at_one, _) = (
        run(2, workloads.train_stock, case, which)[0]
        for case, which in ((told_nothing, "deepspeed"), (told_nothing, "ds_dynmo"), (Case(clip=1.0), "ds_dynmo"))
    )
    assert stock[0] == ours[0] and stock[1] != ours[1]
    assert ours == at_one


def test_a_batch_that_is_not_profiled_runs_deepspeeds_code() -> None:
    case = Case(dynmo={"interval": 0, "randomness": {"per_layer": False}})
    for result in run(2, workloads.code_that_runs, case):
        assert result == {"changed instructions": {"BackwardPass"}, "bare layers": True, "profiled": [2]}
    for result in run(2, workloads.code_that_runs, Case()):
        changed = {"ForwardPass", "BackwardPass"}
        assert result == {"changed instructions": changed, "bare layers": False, "profiled": [2]}


def test_automatic_rebalance_evens_out_sleeping_layers(tmp_path: Path) -> None:
    """Decided on one profile, so that nothing is averaged and what is reported follows from it exactly."""
    report = tmp_path / "report.jsonl"
    block = {"interval": 3, "stop_step": 3, "report": str(report), "min_improvement": 0.05}
    block["profile"] = {"warmup_batches": 2}
    results = run(2, workloads.train_sleeping, block, [2, 2, 2, 2, 2, 2, 12, 12], 6)
    assert results[0]["partition"] == results[1]["partition"]
    assert results[0]["partition"] in ([0, 7, 8], [0, 6, 8])  # equal but for the loss
    assert results[0]["reports"] == results[1]["reports"]
    everything = [json.loads(line) for line in report.read_text().splitlines()]
    kinds = [(record["kind"], record["step"]) for record in everything]
    assert kinds == [("measured", 3), ("rebalance", 3), ("profile", 3), ("measured", 6), ("profile", 6)]
    records, profile = [r for r in everything if r["kind"] != "profile"], everything[2]
    moved = records[1]
    assert profile["partition"] == moved["old_partition"] and profile["micro_batches"] == 4
    costs = [f + b for f, b in zip(profile["forward_seconds"], profile["backward_seconds"], strict=True)]
    assert bottleneck(costs, moved["new_partition"]) == moved["bottleneck_seconds_after"]
    assert moved["reason"] == "interval" and moved["step"] == 3 and moved["layers_moved"] > 0
    assert moved["bottleneck_seconds_after"] < moved["bottleneck_seconds_before"]
    assert records[2]["rebalance_step"] == 3
    assert records[2]["bottleneck_seconds"] < records[0]["bottleneck_seconds"]


@pytest.mark.parametrize("block", [{"balancer": "diffusion"}, {"balancer": "diffusion", "decentralized": True}])
def test_diffusion_in_the_engine(block: dict[str, Any]) -> None:
    results = run(3, workloads.train_sleeping, {"interval": 3, **block}, [1, 1, 1, 1, 1, 1, 6, 6], 4)
    assert all(result["partition"] == results[0]["partition"] for result in results)
    assert results[0]["partition"][-2] == 7


@pytest.mark.parametrize("seed", range(4))
def test_decentralized_diffusion_lands_where_the_pure_function_does(seed: int) -> None:
    for stages in (2, 4):
        for decentralized, pure, reduced in run(stages, workloads.diffusion_both_ways, stages, seed):
            assert decentralized == pure
            assert reduced == [stages + 1] * 5  # the outcome alone


def test_a_profile_has_every_layer() -> None:
    for seconds, profile in run(2, workloads.profile_sleeping, [1, 2, 3, 4]):
        assert profile.partition == (0, 2, 4) and profile.micro_batches == 4
        for expected, layer in zip(seconds, profile.layers):
            assert layer.forward_seconds >= expected and layer.backward_seconds >= 2 * expected
            assert layer.parameters == layer.trainable_parameters == 4
            assert layer.static_bytes == 4 * 4 * 2 + (2 * 4 * 4 + 4)  # weight, gradient, Adam's two moments, its step
            assert layer.activation_bytes > 0 and layer.input_bytes == 2 * 4 * 4
            assert layer.load_signal == 0.5
        assert profile.batch_seconds > 4 * 3 * sum(seconds[2:])


def test_rebalance_by_hand_profiles_first_if_it_must() -> None:
    for result in run(2, workloads.rebalance_first):
        assert result["early"].startswith("rebalance: there is no profile yet")
        assert result["steps"] >= 1 and result["partition"] == [0, 3, 4]


def test_memory_limit() -> None:
    for message, partition in run(2, workloads.rebalance_with_little_memory):
        assert "stage" in message and "bytes" in message
        assert partition == [0, 4, 8]


def test_an_automatic_rebalance_that_cannot_fit_does_not_end_training() -> None:
    assert run(2, workloads.train_with_little_memory) == [([0, 4, 8], 5)] * 2


@pytest.mark.parametrize("partition", [[0, 8], [0, 0, 8], [0, 9, 8], [1, 4, 8], [0, 4, 7], "abc"])
def test_a_partition_that_is_none_leaves_everything_as_it_was(partition: Any) -> None:
    for before, after, message in run(2, workloads.refuse_partition, partition):
        assert "partition" in message and before == after


def test_ranks_that_disagree_are_told_and_nothing_moves() -> None:
    for message, partition, losses in run(2, workloads.disagree):
        assert "every rank has to ask for the same partition" in message
        assert partition == [0, 4, 8] and len(losses) == 2


def test_a_rebalance_on_some_ranks_ends_in_an_error_that_names_the_others() -> None:
    message = run(3, workloads.rebalance_alone)[0]
    assert "rebalance is collective" in message and "ranks [1, 2] did not call it within 2 s" in message


def test_a_layer_that_cannot_be_packed_stops_nothing() -> None:
    for message, losses in run(2, workloads.unpackable):
        assert "No layer has moved" in message and len(losses) == 2


def test_what_fails_while_layers_move_is_fatal_and_says_so() -> None:
    with pytest.raises(RankError, match=r"Layers had begun to move: resume the job from its last checkpoint"):
        run(2, workloads.fail_while_moving)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 immediate", "bf16 zero1", "fp32 zero1"])
def test_departed_parameters_are_freed(precision: str) -> None:
    assert run(2, workloads.departed_parameters, precision) == [0, 0]


def test_layers_stream_and_what_was_sent_is_freed_before_the_next() -> None:
    middle = run(3, workloads.stream, "fp32")[1]["rounds"]
    assert [(sends, receives) for sends, receives, _ in middle] == [(True, True), (True, True), (True, False)]
    assert [len(alive) for _, _, alive in middle] == [3, 2, 1]


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        *(("bf16", 1), ("bf16 zero1", 2), ("fp32 zero1", 1)),
        *(pytest.param(*case, marks=pytest.mark.fuzz) for case in (("bf16", 2), ("bf16 zero1", 1), ("fp32 zero1", 2))),
    ],
)
def test_deepspeed_finds_the_full_state_right_after_a_move(precision: str, replicas: int) -> None:
    case = Case(stages=2, tied=True, precision=precision, replicas=replicas, groups="two")
    still = run(case.ranks, workloads.full_state, case, {})
    moved = run(case.ranks, workloads.full_state, case, {0: [0, 2, 8], 2: [0, 7, 8], 3: [0, 1, 8]})
    for before, after in zip(zip(*still), zip(*moved)):  # step by step
        assert {k: v for rank in before for k, v in rank.items()} == {k: v for rank in after for k, v in rank.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
def test_a_rebalance_to_the_same_place_changes_nothing(precision: str) -> None:
    for moved, same in run(2, workloads.stay, precision):
        assert moved == 0 and same


def check_same_layers(still: list[dict[str, Any]], moved: list[dict[str, Any]], last: list[int]) -> None:
    """Same losses and state; ``last`` is where the run that moved ends."""
    assert [r["partition"] == last for r in [*still, *moved]] == [False] * len(still) + [True] * len(moved)
    assert [r["losses"] for r in still] == [r["losses"] for r in moved]
    assert {k: v for r in still for k, v in r["state"].items()} == {k: v for r in moved for k, v in r["state"].items()}


def test_layers_given_as_modules_and_unpicklable_ones() -> None:
    case = Case(stages=3)
    still = run(3, workloads.train_layers, workloads.odd_layers, case, [])
    moved = run(3, workloads.train_layers, workloads.odd_layers, case, [[0, 1, 2, 5], [0, 3, 4, 5], [0, 2, 3, 5]])
    check_same_layers(still, moved, [0, 2, 3, 5])


def test_tuples_and_shapes_that_differ_at_every_boundary() -> None:
    make, case = workloads.layers_of_many_widths, Case(stages=3)
    still = run(3, workloads.train_layers, make, case, [])
    moved = run(3, workloads.train_layers, make, case, [[0, 1, 2, 6], [0, 3, 5, 6], [0, 2, 3, 6]])
    check_same_layers(still, moved, [0, 2, 3, 6])


def test_tied_layers_meet_and_part() -> None:
    make, case = workloads.layers_tied_in_the_middle, Case(stages=3)
    still = run(3, workloads.train_layers, make, case, [])
    moves = [[0, 1, 5, 6], [0, 3, 4, 6], [0, 1, 2, 6], [0, 4, 5, 6]]
    moved = run(3, workloads.train_layers, make, case, moves)
    check_same_layers(still, moved, moves[-1])


def test_a_clients_scheduler_of_lambdas_and_an_empty_group() -> None:
    still = run(4, workloads.train_with_client_scheduler, [])
    moved = run(4, workloads.train_with_client_scheduler, [[0, 1, 2, 3, 8], [0, 5, 6, 7, 8], [0, 3, 5, 7, 8]])
    assert still == moved
    for result in still:
        assert result["lr"] == pytest.approx([0.03 * 0.1**6, 0.03 * 0.9**6, 0.02 * 0.5**6])


def test_clip_norm_is_that_of_the_whole_model() -> None:
    norms = {tuple(result) for result in run(2, workloads.norms, Case(clip=1.0, stages=2))}
    alone = {tuple(result) for result in run(1, workloads.norms, Case(clip=1.0, stages=1))}
    assert norms == alone and len(norms) == 1


def test_layers_that_share_a_parameter_are_refused_on_every_rank() -> None:
    for message in run(2, workloads.share_a_parameter):
        assert "layers [1, 2] share parameters" in message and "TiedLayerSpec" in message
