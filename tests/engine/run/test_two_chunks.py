"""Two chunks of layers per stage, in a V and in a loop: re-packing, features and where they begin."""

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
from tests.support.configs import Case
from tests.support.elastic import losses, merged, train_alone, train_and_repack
from tests.support.harness import run, run_each
from tests.support.models import layers
from tests.support.sliced_layers import sliced_layers
from tests.support.training import PROFILED, batches, build, outcome_of, train_and_move, train_feature, whole

pytestmark = pytest.mark.ranks


def under(kind: str, case: Case) -> Case:
    return replace(case, dynmo={"interval": 0, "schedule": {"kind": kind}, **(case.dynmo or {})})


def check_equal(still: list[Any], moved: list[Any]) -> None:
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert whole(moved) == whole(still)


# -- re-packing ------------------------------------------------------------------------------------------

REPACKED = Case(
    stages=3, precision="bf16 zero1", tied=True, groups="two", dropout=True, clip=0.0, micro_batches=4, dynmo=PROFILED
)


def test_repackings_change_nothing() -> None:
    """A loop goes to two stages, where layers stay in a loop, and to one, which is a chain; a V at two becomes a chain.

    The V has no profile yet: parameters are spread. The number of boundaries tells a chain from the present shape.
    """
    late = {"interval": 0, "profile": {"batches": 1, "warmup_batches": 9}}
    sizes = {2: 2, 3: [0, 1, 3, 6, 8], 4: 1}
    stayed = run(3, train_alone, REPACKED, 5)
    loop = run(3, train_and_repack, under("loop", REPACKED), sizes, 5)
    without_profile = run(3, train_and_repack, under("v", replace(REPACKED, dynmo=late)), {1: 2, 2: [0, 5, 8]}, 5)
    for fewer in (loop, without_profile):
        assert losses(fewer) == losses(stayed) and merged(fewer) == merged(stayed)
        assert fewer[0]["evaluation"] == stayed[0]["evaluation"]
    assert [report.new_placement.shape for report in loop[0]["reports"]] == ["loop", "loop", "chain"]
    assert [report.released_ranks for report in loop[0]["reports"]] == [(1,), (), (2,)]
    assert all(report.iteration_seconds_after is not None for report in loop[0]["reports"])
    assert loop[0]["partition"] == [0, 8] and without_profile[0]["partition"] == [0, 5, 8]
    reports = without_profile[0]["reports"]
    assert [report.new_placement.shape for report in reports] == ["v", "chain"]
    assert reports[0].verdict == "by parameters: there is no profile yet"


@pytest.mark.nightly
def test_repackings_between_saves_change_nothing_and_resume_on_any_number_of_stages(tmp_path: Path) -> None:
    """Saves are under way in the background while ranks part."""
    saving = replace(REPACKED, dynmo={**PROFILED, "checkpoint": "background"})
    folder = str(tmp_path)
    stayed = run(3, train_alone, REPACKED, 6)
    fewer = run(3, train_saving, under("v", saving), folder)
    assert losses(fewer) == losses(stayed) and merged(fewer) == merged(stayed)
    for stages, kind, steps in ((3, "v", (2, 5)), (2, "auto", (3,)), (1, "loop", (4,))):
        smaller = under(kind, replace(REPACKED, stages=stages))
        for step, resumed in zip(steps, run_each(stages, resume, *((smaller, folder, step) for step in steps))):
            assert losses(resumed) == {number: loss for number, loss in losses(stayed).items() if number > step}
            assert merged(resumed) == merged(stayed)


def train_saving(case: Case, folder: str) -> dict[str, Any]:
    return train_and_repack(case, {2: 2, 4: 1}, 6, folder=folder)


def resume(case: Case, folder: str, step: int) -> dict[str, Any]:
    return train_and_repack(case, {}, 6, folder=folder, first=step)


# -- features --------------------------------------------------------------------------------------------


def train_with_features(kind: str, moves: list[list[int]], folder: str | None = None) -> dict[str, Any]:
    """Train with DeepSpeed's seeds of layers, timers and monitor; ``folder``: of the monitor."""
    dynmo = {**PROFILED, "randomness": {"per_layer": False}, "schedule": {"kind": kind}}
    monitor = {"enabled": folder is not None, "output_path": folder or "", "job_name": "job"}
    settings = {"dynmo": dynmo, "wall_clock_breakdown": True, "steps_per_print": 1, "csv_monitor": monitor}
    return train_feature(settings, {"seed_layers": True, "layers": layers(Case(dropout=True))}, moves)


def test_seeds_of_layers_timers_and_a_monitor(tmp_path: Path) -> None:
    ours = "v", [[0, 1, 3, 5, 8], [0, 3, 8], [0, 2, 3, 4, 8]], str(tmp_path)
    check_equal(*run_each(2, train_with_features, ("1f1b", []), ours))
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
    losses = train_and_move(engine, batches(engine) if has_data else None, moves, 3)
    return {**outcome_of(engine, losses), "norm": float(engine.get_global_grad_norm() or 0.0)}


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("bf16 zero1", "v"),
        *(
            pytest.param(precision, kind, marks=pytest.mark.nightly)
            for precision, kind in (("bf16 zero1", "loop"), ("fp32", "v"), ("bf16", "loop"), ("fp16 zero1", "v"))
        ),
    ],
)
def test_tensor_parallel_slices_of_messages(precision: str, kind: str) -> None:
    case = Case(slices=2, blocks=4, tied=True, clip=0.05, groups="two", precision=precision)
    moves = [[0, 4, 6], [0, 1, 2, 5, 6]]
    still, moved = run_each(4, train_slices, (case, []), (under(kind, case), moves))
    check_equal(still, moved)
    assert [r["norm"] for r in moved] == [r["norm"] for r in still]


# -- where runs begin, and what is refused ---------------------------------------------------------------


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


def refusals() -> tuple[str, str]:
    """Return the errors of a partition of two chunks, and of DeepSpeed's own V, under 1F1B."""
    engine = build(Case())
    with pytest.raises(PartitionError) as of_partition:
        engine.rebalance([0, 2, 4, 6, 8])
    with mock.patch("tests.support.models.PipelineModule", DualPipeVModule), pytest.raises(ConfigError) as of_module:
        build(Case())
    return str(of_partition.value), str(of_module.value)


def test_two_chunks_need_another_order_than_1f1b() -> None:
    for of_partition, of_module in run(2, refusals):
        assert "v" in of_partition and "1f1b" in of_partition
        assert of_module.startswith('dynmo.schedule.kind = "1f1b": the model is a DualPipeVModule')
        assert '"v"' in of_module


def test_a_stage_of_a_loop_meets_each_neighbour_in_a_group_of_its_own() -> None:
    for stages in (2, 3, 4, 5):
        links = [NeighbourLinks(stage, stages, int, torch.device("cpu"), 1.0) for stage in range(stages)]
        pairs = {tuple(sorted((stage, (stage + 1) % stages))) for stage in range(stages)}
        groups = [(stage, links[stage]._group_with(sum(pair) - stage)) for pair in pairs for stage in pair]
        assert len({*groups}) == len(groups), stages
        assert all(links[one]._group_with(other) == links[other]._group_with(one) for one, other in pairs), stages
