"""Two chunks of layers per stage, in a V and in a loop: training equals that of a chain, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule

from ds_dynmo.engine.comm.neighbour_links import NeighbourLinks
from ds_dynmo.errors import ConfigError, PartitionError
from tests.support.configs import PRECISIONS, SHAPES, Case
from tests.support.elastic import losses, merged, train_alone, train_and_repack
from tests.support.harness import run, run_each
from tests.support.models import layers
from tests.support.sliced_layers import sliced_layers
from tests.support.training import (
    PROFILED,
    batches,
    build,
    outcome_of,
    train,
    train_and_move,
    train_feature,
    train_frozen,
    whole,
)

pytestmark = pytest.mark.ranks


def under(kind: str, case: Case) -> Case:
    return replace(case, dynmo={"interval": 0, "schedule": {"kind": kind}, **(case.dynmo or {})})


def check_equal(still: list[Any], moved: list[Any]) -> None:
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert [r.get("evaluations") for r in moved] == [r.get("evaluations") for r in still]
    assert whole(moved) == whole(still)


def check_same(case: Case, *kinds: str, moves: list[list[int]] | None = None, background: bool = False) -> None:
    """Compare with a chain under 1F1B."""
    ours = [(under(kind, case), moves or [], 5, 1, background) for kind in kinds]
    still, *moved = run_each(case.ranks, train, (case, [], 5, 1), *ours)
    for each in moved:
        check_equal(still, each)
        assert not moves or each[0]["partition"] == moves[-1]


@pytest.mark.parametrize(
    ("precision", "shape"),
    [
        pytest.param(precision, shape, marks=() if (number + turn) % 4 == 0 else pytest.mark.nightly)
        for number, precision in enumerate(PRECISIONS)
        for turn, shape in enumerate(SHAPES)
    ],
)
def test_training_equals_a_chain(precision: str, shape: str) -> None:
    check_same(Case(precision=precision, micro_batches=5, **SHAPES[shape]), "v", "loop")


V_TO_CHAIN = [[0, 2, 3, 4, 8], [0, 5, 8], [0, 1, 5, 6, 8], [0, 1, 3, 6, 8]]  # in the end a V turns earlier


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1", "bf16", "fp32 zero1"])
def test_moves_also_to_a_chain_and_back_change_nothing(precision: str) -> None:
    check_same(Case(precision=precision, micro_batches=4, groups="two"), "v", "loop", moves=V_TO_CHAIN)


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_moves_in_the_background_change_nothing(precision: str) -> None:
    check_same(Case(precision=precision, micro_batches=4, tied=True), "v", moves=V_TO_CHAIN, background=True)


def train_on_an_iterator_per_batch(case: Case, moves: dict[int, list[int]]) -> list[float]:
    engine, losses = build(case), []
    data = batches(engine)
    for step in range(4):
        losses.append(engine.train_batch(iter([next(data) for _ in range(case.micro_batches)])).item())
        if step in moves:
            engine.rebalance(moves[step])
    return losses


def test_the_last_stage_has_its_data_when_the_loss_comes_back() -> None:
    case = Case(micro_batches=3)
    still, moved = run_each(
        2, train_on_an_iterator_per_batch, (case, {}), (under("v", case), {1: [0, 3, 8], 2: [0, 1, 3, 6, 8]})
    )
    assert moved == still


def train_a_dual_pipe_v_module(case: Case) -> dict[str, Any]:
    with mock.patch("tests.support.models.PipelineModule", DualPipeVModule):
        return train(case, [[0, 1, 4, 6, 8], [0, 3, 8]], 4, 1)


def test_a_dual_pipe_v_module_is_a_v() -> None:
    case = Case(stages=2, micro_batches=4, tied=True)
    (still,), moved = run_each(2, train, (case, [], 4, 1)), run(2, train_a_dual_pipe_v_module, under("v", case))
    check_equal(still, moved)


def refusal_of_a_dual_pipe_v_module(case: Case) -> str:
    try:
        train_a_dual_pipe_v_module(case)
    except ConfigError as error:
        return str(error)
    return "it was not refused"


def test_a_dual_pipe_v_module_needs_a_schedule_of_two_chunks() -> None:
    for message in run(2, refusal_of_a_dual_pipe_v_module, Case(stages=2)):
        assert message.startswith('dynmo.schedule.kind = "1f1b": the model is a DualPipeVModule') and '"v"' in message


@pytest.mark.parametrize(("kind", "precision"), [("v", "fp32"), ("loop", "bf16 zero1")])
def test_repackings_change_nothing(kind: str, precision: str) -> None:
    """From three stages to two, where layers stay in a V or a loop, and to one, which is a chain."""
    case = Case(stages=3, precision=precision, tied=True, groups="two", dropout=True, clip=0.0, micro_batches=4)
    case = replace(case, dynmo=PROFILED)
    stayed = run(3, train_alone, case, 6)
    fewer = run(3, train_and_repack, under(kind, case), {2: 2, 3: [0, 1, 3, 6, 8], 4: 1}, 6)
    assert losses(fewer) == losses(stayed)
    assert merged(fewer) == merged(stayed)
    assert fewer[0]["evaluation"] == stayed[0]["evaluation"] and fewer[0]["partition"] == [0, 8]
    reports = fewer[0]["reports"]
    assert [report.new_placement.shape for report in reports] == [kind, kind, "chain"]
    assert [report.released_ranks for report in reports] == [(1,), (), (2,)]
    assert all(report.iteration_seconds_after is not None for report in reports)


@pytest.mark.nightly
def test_repackings_between_saves_change_nothing_and_resume_on_any_number_of_stages(tmp_path: Path) -> None:
    """Saves are under way in the background while ranks part."""
    case = Case(stages=3, tied=True, groups="two", precision="bf16 zero1", clip=0.0, micro_batches=4)
    saving = replace(case, dynmo={**PROFILED, "checkpoint": "background"})
    folder = str(tmp_path)
    stayed = run(3, train_alone, case, 6)
    fewer = run(3, train_saving, under("v", saving), folder)
    assert losses(fewer) == losses(stayed) and merged(fewer) == merged(stayed)
    for stages, kind, steps in ((3, "v", (2, 5)), (2, "auto", (3,)), (1, "loop", (4,))):
        smaller = under(kind, replace(case, stages=stages, dynmo=PROFILED))
        for step, resumed in zip(steps, run_each(stages, resume, *((smaller, folder, step) for step in steps))):
            assert losses(resumed) == {number: loss for number, loss in losses(stayed).items() if number > step}
            assert merged(resumed) == merged(stayed)


def train_saving(case: Case, folder: str) -> dict[str, Any]:
    return train_and_repack(case, {2: 2, 4: 1}, 6, folder=folder)


def resume(case: Case, folder: str, step: int) -> dict[str, Any]:
    return train_and_repack(case, {}, 6, folder=folder, first=step)


def test_repackings_without_a_profile_and_to_a_chain_change_nothing() -> None:
    """The number of boundaries tells a chain from the present shape; without a profile parameters are spread."""
    case = Case(stages=3, micro_batches=4)
    late = {"interval": 0, "profile": {"batches": 1, "warmup_batches": 9}}
    stayed = run(3, train_alone, case, 4)
    fewer = run(3, train_and_repack, under("v", replace(case, dynmo=late)), {1: 2, 2: [0, 5, 8]}, 4)
    assert losses(fewer) == losses(stayed) and merged(fewer) == merged(stayed)
    reports = fewer[0]["reports"]
    assert [report.new_placement.shape for report in reports] == ["v", "chain"]
    assert reports[0].verdict == "by parameters: there is no profile yet"


def test_one_micro_batch() -> None:
    check_same(Case(stages=3, micro_batches=1), "v", "loop")


def test_a_prefix_that_freezes_and_thaws() -> None:
    case, frozen = Case(stages=3, micro_batches=4), {1: 3, 3: 5, 5: 0}
    still, *moved = run_each(
        3, train_frozen, (case, frozen, {}), *((under(k, case), frozen, {}) for k in ("v", "loop"))
    )
    for each in moved:
        check_equal(still, each)


def train_with_features(kind: str, moves: list[list[int]], folder: str | None = None) -> dict[str, Any]:
    """Train with DeepSpeed's seeds of layers, timers and monitor; ``folder``: of the monitor."""
    dynmo = {**PROFILED, "randomness": {"per_layer": False}, "schedule": {"kind": kind}}
    monitor = {"enabled": folder is not None, "output_path": folder or "", "job_name": "job"}
    settings = {"dynmo": dynmo, "wall_clock_breakdown": True, "steps_per_print": 1, "csv_monitor": monitor}
    return train_feature(settings, {"seed_layers": True, "layers": layers(Case(dropout=True))}, moves)


def test_seeds_of_layers_timers_and_a_monitor(tmp_path: Path) -> None:
    ours = [(kind, [[0, 1, 3, 5, 8], [0, 3, 8], [0, 2, 3, 4, 8]], str(tmp_path)) for kind in ("v", "loop")]
    still, *moved = run_each(2, train_with_features, ("1f1b", []), *ours)
    for each in moved:
        check_equal(still, each)
    assert {"Train_Samples_train_loss.csv", "Train_Samples_lr.csv"} <= {file.name for file in tmp_path.glob("job/*")}


def train_slices(case: Case, moves: list[list[int]]) -> dict[str, Any]:
    """Train with data on one of the tensor-parallel slices, which tells the others, as Megatron's does."""
    engine = build(case, sliced_layers)
    group = engine.grid.get_slice_parallel_group()
    first = engine.grid.get_slice_parallel_rank() == 0

    def shared(batch: Any) -> Any:
        box = [batch]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]

    engine.set_batch_fn(shared)
    has_data = first and (engine.is_first_stage() or engine.stage_id == case.stages - 1)
    losses = train_and_move(engine, batches(engine) if has_data else None, moves, 5)
    return {**outcome_of(engine, losses), "norm": float(engine.get_global_grad_norm() or 0.0)}


@pytest.mark.parametrize(
    "precision",
    ["bf16 zero1", *(pytest.param(other, marks=pytest.mark.nightly) for other in ("fp32", "bf16", "fp16 zero1"))],
)
def test_tensor_parallel_slices_of_messages(precision: str) -> None:
    case = Case(slices=2, blocks=4, tied=True, clip=0.05, groups="two", precision=precision)
    moves = [[0, 1, 3, 4, 6], [0, 4, 6], [0, 1, 2, 5, 6]]
    still, *moved = run_each(4, train_slices, (case, []), *((under(kind, case), moves) for kind in ("v", "loop")))
    for each in moved:
        check_equal(still, each)
        assert [r["norm"] for r in each] == [r["norm"] for r in still]


def began(cases: list[Case]) -> list[Any]:
    """Return where each run begins, or why it does not."""
    found: list[Any] = []
    for case in cases:
        try:
            found.append(build(case).partition)
        except ConfigError as error:
            found.append(str(error))
    return found


def test_a_run_begins_at_its_initial_partition() -> None:
    def asked(kind: str, first: Any = None, **more: Any) -> Case:
        return under(kind, Case(dynmo={"interval": 0, "initial_partition": first, **more}))

    cases = [
        (asked("v"), [0, 2, 4, 6, 8]),
        (asked("loop", "uniform"), [0, 2, 4, 6, 8]),
        (asked("v", "type:Embedding|Head"), [0, 1, 2, 3, 8]),
        (asked("v", "parameters"), [0, 3, 4, 5, 8]),
        (asked("v", "profile", keep_together=[[1, 2, 3]]), [0, 1, 4, 5, 8]),
        (asked("loop", keep_together=[[0, 1, 2, 3, 4, 5]]), "cannot fill 4 chunks"),
    ]
    (found, *_) = run(2, began, [case for case, _ in cases])
    for begins, (_, expected) in zip(found, cases, strict=True):
        assert begins == expected or (isinstance(expected, str) and expected in begins), found


def test_two_chunks_need_another_order_than_1f1b() -> None:
    assert all("v" in each and "1f1b" in each for each in run(2, refused, Case()))


def refused(case: Case) -> str:
    engine = build(case)
    with pytest.raises(PartitionError) as error:
        engine.rebalance([0, 2, 4, 6, 8])
    return str(error.value)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_a_stage_of_a_loop_meets_each_neighbour_in_a_group_of_its_own(stages: int) -> None:
    links = [NeighbourLinks(stage, stages, int, torch.device("cpu"), 1.0) for stage in range(stages)]
    pairs = {tuple(sorted((stage, (stage + 1) % stages))) for stage in range(stages)}
    groups = [(stage, links[stage]._group_with(sum(pair) - stage)) for pair in pairs for stage in pair]
    assert len({*groups}) == len(groups)
    assert all(links[one]._group_with(other) == links[other]._group_with(one) for one, other in pairs)
