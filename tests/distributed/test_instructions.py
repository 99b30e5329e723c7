"""Instructions of the user's own are called as often as DeepSpeed calls them; moves change nothing there either."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.engine.profiling.trace import INSTRUCTIONS
from tests.distributed import instruction_workloads as workloads
from tests.distributed.harness import run
from tests.distributed.test_bitwise import whole
from tests.distributed.workloads import Case

MOVES = ([0, 1, 8], [0, 7, 8], [0, 2, 8], [0, 5, 8])
UNCLIPPED = Case(clip=0.0)  # DeepSpeed clips by another norm


def outcomes(results: list[dict[str, Any]], *names: str) -> list[list[Any]]:
    return [[result[name] for name in names] for result in results]


@pytest.mark.parametrize(
    ("how", "early"),
    [("entries", False), ("entries", True), ("map", False), ("map", True), ("engine", False), ("subclass", True)],
)
def test_patched_instructions_are_called_as_often_as_by_deepspeed(how: str, early: bool) -> None:
    stock = run(2, workloads.train_patched, "deepspeed", UNCLIPPED, how, early)
    still = run(2, workloads.train_patched, "ds_dynmo", UNCLIPPED, how, early)
    moved = run(2, workloads.train_patched, "ds_dynmo", UNCLIPPED, how, early, MOVES)
    assert stock[0]["counts"]["ReduceGrads"] == (5 if early else 3)
    assert outcomes(stock, "counts", "losses") == outcomes(still, "counts", "losses")
    assert outcomes(stock, "counts", "losses") == outcomes(moved, "counts", "losses")
    assert whole(still) == whole(moved)


def test_a_patched_run_is_saved_and_loaded_at_another_number_of_stages(tmp_path: Path) -> None:
    saved = run(2, workloads.train_patched, "ds_dynmo", UNCLIPPED, "entries", False, MOVES, str(tmp_path))
    moves = ([0, 1, 2, 8], [0, 5, 7, 8])
    three = Case(stages=3, clip=0.0)
    loaded = run(3, workloads.train_patched, "ds_dynmo", three, "entries", False, moves, None, str(tmp_path))
    assert whole(loaded) == whole(saved)
    assert loaded[0]["losses"] == saved[0]["losses"][2:]
    assert all(result["counts"]["ReduceGrads"] == 3 for result in [*saved, *loaded])


OWN_BACKWARD = {
    "one output": (Case(stages=3), False, 0),
    "several outputs": (Case(stages=3), True, 0),
    "several outputs, checkpointed": (Case(stages=3, checkpoint_interval=1, reentrant=False), True, 0),
    "twins": (Case(stages=3, tied=True), False, 0),
    "twins under bf16": (Case(stages=3, tied=True, precision="bf16"), False, 0),
    "a frozen prefix": (Case(stages=3), False, 4),
    "a frozen prefix under bf16": (Case(stages=3, precision="bf16"), False, 4),
}


def trained(results: list[dict[str, Any]], prefix: int) -> dict[str, Any]:
    """Weights, and optimizer state of layers that are not frozen: of frozen ones a move makes zeros under bf16."""
    state = whole(results)
    return {key: value for key, value in state.items() if "/" not in key or int(key.split(".")[0]) >= prefix}


@pytest.mark.parametrize("what", OWN_BACKWARD)
def test_a_backward_pass_of_ones_own(what: str) -> None:
    """On a stage without anything to train, too, it is called: with something of no elements."""
    case, twofold, prefix = OWN_BACKWARD[what]
    layers = case.blocks + 4 if twofold else case.num_layers
    moves = ([0, 2, 4, layers], [0, 1, layers - 1, layers], [0, 1, 2, layers], [0, 5, layers - 1, layers])
    still = run(3, workloads.train_with_own_backward, case, (), twofold, prefix)
    moved = run(3, workloads.train_with_own_backward, case, moves, twofold, prefix)
    assert outcomes(still, "losses", "counts") == outcomes(moved, "losses", "counts")
    assert trained(still, prefix) == trained(moved, prefix)
    assert still[0]["counts"] == {"BackwardPass": 15, "ReduceTiedGrads": 5, "OptimizerStep": 5}


def test_sends_of_ones_own_are_refused_where_a_stage_is_sent_nothing() -> None:
    for at_once, trained, later in run(2, workloads.own_sends_with_a_frozen_prefix):
        assert "_INSTRUCTION_MAP[SendGrad] = tests.distributed.instruction_workloads.counted" in at_once
        assert "the first 2 layers have nothing to train" in at_once
        assert trained > 0 and later == at_once


def test_a_batch_that_does_not_come_to_the_engines_own_is_refused() -> None:
    assert all("_exec_schedule was replaced" in message for message in run(2, workloads.a_schedule_of_its_own))


def test_a_map_that_is_set_while_a_batch_runs_is_refused() -> None:
    assert all("set it between two batches" in message for message in run(2, workloads.a_map_set_in_a_batch))


def test_profile_and_trace_go_around_instructions_of_ones_own(tmp_path: Path) -> None:
    stock = run(2, workloads.instructions_seen, str(tmp_path / "stock.json"), False)
    own = run(2, workloads.instructions_seen, str(tmp_path / "own.json"), True)
    assert outcomes(stock, "losses", "profiled") == outcomes(own, "losses", "profiled")
    assert all(result["profiled"] and result["counts"]["ForwardPass"] == 6 for result in own)
    kinds = {category for category, _ in INSTRUCTIONS.values()}
    shown = [
        sorted((e["name"], e["tid"]) for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in kinds)
        for path in (tmp_path / "stock.json", tmp_path / "own.json")
    ]
    assert shown[0] == shown[1]


# -- engines of the user's own ------------------------------------------------------------------------

REFERENCE = Case(blocks=6, clip=0.0)


def same_as(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert outcomes(found, "losses", "evaluated") == outcomes(expected, "losses", "evaluated")
    assert whole(found) == whole(expected)


def test_an_engine_in_the_manner_of_qlora_pipes() -> None:
    still = run(2, workloads.train_with_reference, "ds_dynmo", REFERENCE)
    moved = run(2, workloads.train_with_reference, "ds_dynmo", REFERENCE, MOVES)
    same_as(moved, still)
    assert outcomes(moved, "called") == outcomes(still, "called")
    assert all(result["kinds"] == (True, True, "DynMoReferenceEngine") for result in still)
    assert all(result["called"]["reference"] == result["called"]["load"] == 15 for result in still)
    assert all(result["called"]["train_batch"] == 5 and result["called"]["eval_batch"] == 1 for result in still)


@pytest.mark.parametrize("dynmo", [None, {"interval": 0}])
def test_without_draws_it_is_the_users_engine_on_deepspeed(dynmo: dict[str, Any] | None) -> None:
    case = Case(clip=0.0, dynmo=dynmo)
    stock = run(2, workloads.train_with_reference, "deepspeed", case, (), None, None, workloads.layers)
    ours = run(2, workloads.train_with_reference, "ds_dynmo", case, (), None, None, workloads.layers)
    assert outcomes(stock, "losses", "evaluated", "called") == outcomes(ours, "losses", "evaluated", "called")


def test_recomputation_repeats_the_draws_of_each_kind_of_pass() -> None:
    still = run(2, workloads.train_with_reference, "ds_dynmo", REFERENCE)
    case = Case(blocks=6, clip=0.0, checkpoint_interval=1, reentrant=False)
    same_as(run(2, workloads.train_with_reference, "ds_dynmo", case, MOVES), still)


def test_a_trace_shows_instructions_of_its_own_kinds(tmp_path: Path) -> None:
    """In a profiled batch too: all of them together change nothing."""
    block = {
        "profile": {"batches": 99, "warmup_batches": 0},
        "trace": {"path": str(tmp_path / "trace"), "steps": [2, 2]},
    }
    traced = run(2, workloads.train_with_reference, "ds_dynmo", Case(blocks=6, clip=0.0, dynmo=block))
    same_as(traced, run(2, workloads.train_with_reference, "ds_dynmo", REFERENCE))
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    own = Counter(e["name"] for e in events if e.get("cat") == "instruction")
    assert own == {f"{kind} {number}": 2 for kind in ("LoadBoth", "ReferencePass") for number in range(3)}


def test_it_is_saved_and_loaded_at_another_number_of_stages(tmp_path: Path) -> None:
    case = Case(blocks=6, clip=1.0)
    saved = run(2, workloads.train_with_reference, "ds_dynmo", case, MOVES, str(tmp_path))
    loaded = run(
        *(3, workloads.train_with_reference, "ds_dynmo", Case(stages=3, blocks=6, clip=1.0)),
        *([[0, 1, 2, 8], [0, 5, 7, 8]], None, str(tmp_path)),
    )
    assert whole(loaded) == whole(saved)
    assert loaded[0]["losses"] == saved[0]["losses"][2:]
    assert all(result["called"]["load_checkpoint"] == 1 and result["called"]["clip"] == 3 for result in loaded)
    assert all(result["called"]["save_checkpoint"] == 1 and result["called"]["clip"] == 5 for result in saved)


def test_an_engine_class_whose_constructor_sets_what_is_ours_is_refused() -> None:
    for message in run(2, workloads.an_attribute_of_the_same_name):
        assert "TheirEngine: its constructor sets _controller, _reporter, which ds_dynmo's engine uses" in message


def test_an_engine_class_put_into_deepspeed_is_built_upon() -> None:
    assert run(2, workloads.patched_engine_class_of_deepspeed) == [(True, True)] * 2
