"""Plans validate themselves; plans and reports of a chain and of a V, where every stage has two chunks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ds_dynmo import plan as public
from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import migration_peaks
from ds_dynmo.placement import Placement
from ds_dynmo.plan import (
    HeldBytes,
    LayerCost,
    LayerMove,
    MeasuredReport,
    MigrationPlan,
    Profile,
    RebalanceReport,
    RepackReport,
)

CHAINS = Placement.chain([0, 2, 4, 6]), Placement.chain([0, 3, 5, 6])
VS = Placement.v([0, 1, 3, 5, 6]), Placement.v([0, 2, 3, 4, 6])  # stage 0 owns 0 and 5, then 0, 1, 4 and 5


@pytest.mark.parametrize("placement", [CHAINS[0], VS[0]], ids=["chain", "v"])
def test_a_profile_is_read_from_its_record(placement: Placement) -> None:
    parts = {"input_gradient_seconds": 1.5, "weight_gradient_seconds": 0.5, "deferred_bytes": 7, "workspace_bytes": 8}
    layers = tuple(LayerCost(1.0 + number, 2.0, 1, 2, 3, 4, 5, **parts) for number in range(6))
    written = Profile(3, placement, layers, micro_batches=4, batch_seconds=80.0)
    read = Profile.from_record(json.loads(json.dumps(written.as_record())))
    assert read == written
    assert read.bubble_ratio == written.bubble_ratio == pytest.approx(1 - 4 * 33 / (placement.num_stages * 80))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_seconds": [1.0, float("nan")]}, "to have forward_seconds [1.0, nan]"),
        ({"backward_seconds": [1.0, float("inf")]}, "to have backward_seconds [1.0, inf]"),
        ({"static_bytes": [1, -1]}, "to have static_bytes [1, -1]"),
        ({"static_bytes": [1]}, "argument"),
        ({"partition": [0, 1, 3]}, "2 layers were measured, the partition [0, 1, 3] has another number"),
    ],
)
def test_an_invalid_record_of_a_profile_is_refused(change: dict[str, Any], message: str) -> None:
    record = Profile(3, Placement.chain([0, 1, 2]), (LayerCost(1.0, 2.0, 1, 1, 1, 1, 1),) * 2, 4, 9.0).as_record()
    with pytest.raises(ValueError, match=re.escape(message)):
        Profile.from_record({**record, **change})


def test_moves_of_a_chain() -> None:
    plan = MigrationPlan.between(*CHAINS)
    assert plan.moves == (LayerMove(2, 1, 0), LayerMove(4, 2, 1))
    assert plan == MigrationPlan.between([0, 2, 4, 6], [0, 3, 5, 6])
    assert MigrationPlan.between([0, 2, 4], [0, 2, 4]).moves == ()


def test_moves_of_a_v() -> None:
    plan = MigrationPlan.between(*VS)
    assert plan.moves == (LayerMove(1, 1, 0), LayerMove(4, 1, 0))
    assert plan == MigrationPlan.between(VS[0], VS[1].boundaries)
    within_a_stage = MigrationPlan.between(Placement.v([0, 2, 4, 6, 8]), Placement.v([0, 2, 5, 6, 8]))
    assert within_a_stage.moves == ()  # a layer goes from one chunk of stage 1 to its other


def test_peak_bytes_of_a_move_of_a_v() -> None:
    held = [HeldBytes(separate=10**layer) for layer in range(6)]
    peaks = migration_peaks(MigrationPlan.between(*VS), held, range(6))
    assert peaks == (110011, 11110)  # all that stage 0 has at the end, and all that stage 1 had before


def test_stages_that_leave_and_come_back() -> None:
    released = Placement.chain([0, 0, 6], empty=[0])
    there, back = MigrationPlan.between([0, 2, 6], released), MigrationPlan.between(released, [0, 2, 6])
    assert there.leaving == (0,) and back.leaving == ()
    assert [move.layer for move in there.moves] == [move.layer for move in back.moves] == [0, 1]


@pytest.mark.parametrize(
    ("old", "new", "moves", "message"),
    [
        (*CHAINS, (), "do not lead"),
        (*VS, (LayerMove(1, 1, 0),), "do not lead"),
        (CHAINS[0], VS[0], (), "6 layers on 3 stages cannot lead to 6 on 2"),
        (VS[0], Placement.v([0, 1, 3, 5, 7]), (), "6 layers on 2 stages cannot lead to 7 on 2"),
    ],
)
def test_plans_that_are_refused(old: Placement, new: Placement, moves: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        MigrationPlan(old, new, moves)


# -- reports ------------------------------------------------------------------------------------------


def rebalance_report(old: Placement, new: Placement) -> RebalanceReport:
    return RebalanceReport(7, "interval", old, new, None, None, None, None, 1, 8, 0.0, 0.0, 0.0)


def repack_report(old: Placement, new: Placement) -> RepackReport:
    return RepackReport(7, "by hand", old, new, (1,), None, None, 1, 8, 0.0, 0.0, 0.0)


def test_records_of_a_chain_name_no_owners() -> None:
    record = json.loads(json.dumps(rebalance_report(*CHAINS).as_record()))
    assert (record["old_partition"], record["new_partition"]) == ([0, 2, 4, 6], [0, 3, 5, 6])
    assert not any("placement" in name or "owners" in name for name in record)
    measured = MeasuredReport(7, None, CHAINS[0], 0.1, 0.2, 0.3, 0.4)
    assert measured.as_record()["partition"] == measured.partition == (0, 2, 4, 6)
    profile = Profile(7, CHAINS[0], (), 4, 1.0)
    assert profile.as_record()["partition"] == profile.partition == (0, 2, 4, 6)


@pytest.mark.parametrize(
    "report",
    [
        *(rebalance_report(*CHAINS), repack_report(*CHAINS)),
        *(MeasuredReport(7, None, CHAINS[0], 0.1, 0.2, 0.3, 0.4), Profile(7, CHAINS[0], (), 4, 1.0)),
    ],
    ids=lambda report: type(report).__name__,
)
def test_a_report_prints_the_names_that_it_is_read_by(report: Any) -> None:
    printed = dict(re.findall(r"(\w*partition)=(\[.*?\])", repr(report)))
    assert printed and "placement" not in repr(report)
    assert printed == {name: str(list(getattr(report, name))) for name in printed}


@pytest.mark.parametrize("report", [rebalance_report(*VS), repack_report(*VS)])
def test_records_of_a_v_name_the_owners(report: RebalanceReport | RepackReport) -> None:
    record = json.loads(json.dumps(report.as_record()))
    assert report.old_partition == (0, 1, 3, 5, 6) and report.new_partition == (0, 2, 3, 4, 6)
    for which, placement in zip(("old", "new"), VS):
        read = Placement.of(record[f"{which}_partition"], record[f"{which}_partition_owners"])
        assert read == placement


def test_reports_of_a_v_tell_moves_and_stages() -> None:
    assert rebalance_report(*VS).moved and not rebalance_report(VS[0], VS[0]).moved
    report = repack_report(Placement.v([0, 1, 2, 3, 6]), Placement.v([0, 2, 6]))
    assert (report.old_stages, report.new_stages) == (2, 1)


def test_a_profile_of_a_v() -> None:
    layers = tuple(LayerCost(1.0, 2.0, 4, 4, 16, 8, 8) for _ in range(6))
    profile = Profile(7, VS[0], layers, micro_batches=4, batch_seconds=1.0)
    record = json.loads(json.dumps(profile.as_record()))
    assert Placement.of(record["partition"], record["partition_owners"]) == profile.placement
    assert profile.costs("time") == [3.0] * 6


def test_every_public_name_exists() -> None:
    assert all(getattr(public, name).__doc__ for name in public.__all__)
    assert public.stage_of(4, [0, 3, 8]) == 1
