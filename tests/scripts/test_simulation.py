"""scripts/simulate_runs.py: runs with known loads, which moves pay, and the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import simulate_runs
from ds_dynmo.placement import Placement, Shape, owners_of
from ds_dynmo.schedules import PassBytes, PassCosts, best_schedule, one_f_one_b_limit
from ds_dynmo.schedules import replay as replay_order
from simulation import LOAD_MODELS, LoadModel, Phase, Recorded
from simulation.runs import (
    DYNAMIC,
    FORMS,
    HALVES,
    STATIC,
    STATICS,
    V_HALVES,
    PhaseCosts,
    Setting,
    V,
    compare,
    dense_costs,
    figures_of,
    iteration,
    known_statics,
    move_seconds,
    pipeline_of,
    replay,
    timed_iteration,
    worth_it,
)
from simulation.statics import PARAMETERS, label
from simulation.zero_bubble import Orders, iterations_seconds
from tests.support.recordings import write_recording

LAST_HALF = (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
HALF_FROZEN = Phase(1000, LAST_HALF, LAST_HALF, LAST_HALF, announced=True)


def setting(**changes: float) -> Setting:
    """8 layers of 1 + 2 seconds on 2 stages; messages and moves take no time."""
    sizes = {"layers": 8, "stages": 2, "replicas": 1, "micro_batches": 8, "interval": 100}
    free = {"forward_seconds": 1.0, "layer_bytes": 0, "message_bytes": 0}
    return Setting(**{**sizes, **free, **changes})  # type: ignore[arg-type]


def steps(*phases: Phase) -> list[PhaseCosts]:
    return [PhaseCosts.of([phase], 1.0) for phase in phases]


def chain(*boundaries: int) -> Placement:
    return Placement.chain(boundaries)


def zero_bubble(phase: PhaseCosts, placement: Placement, on: Setting) -> float:
    return timed_iteration(phase, placement, on, Orders())[-1]


def test_pieces_are_compared_with_static_partitions_of_whole_layers(tmp_path: Path) -> None:
    pieces = [[1, 1, 2, 2, 2, 2]] * 8  # the last four are one layer
    path = write_recording(tmp_path / "a.jsonl", pieces, interval=4, whole_layers=[0, 1, 2, 6])
    case, on = Recorded.read(path), setting(layers=6, interval=4, micro_batches=100)
    outcomes = compare(case, on, [*STATICS, "dense", "makespan"], count=2, seeds=1)
    found = figures_of("makespan", outcomes)
    assert found["moves"] == 1  # after half of the iterations, from loads of 4 and 8 to 6 and 6
    assert found["speedup_over_static_1f1b"] == pytest.approx(2 / (1 + 6 / 8), rel=0.01)
    undivided, on = case.undivided(), setting(layers=3, interval=4, micro_batches=100)
    outcomes = compare(undivided, on, [*STATICS, "dense", "makespan"], count=2, seeds=1)
    assert figures_of("makespan", outcomes)["speedup_over_static_1f1b"] == 1


def test_seconds_and_imbalance_of_an_iteration() -> None:
    dense = dense_costs(LOAD_MODELS["moe"], setting())[0]
    assert iteration(dense, chain(0, 4, 8), setting()) == (8 * 12, (8 + 1) * 12, 8 * 12, 0, 8 * 12)
    full, _, work, imbalance, bound = iteration(steps(HALF_FROZEN)[0], chain(0, 4, 8), setting())
    assert (full, work, imbalance, bound) == (8 * 12, 8 * 6, 2.0, 8 * 6)


def test_a_stage_of_a_v_has_two_chunks() -> None:
    full, under_1f1b, work, imbalance, _ = iteration(steps(HALF_FROZEN)[0], Placement.v([0, 2, 4, 6, 8]), setting())
    assert (full, work, imbalance) == (8 * 6, 8 * 6, 0) and np.isnan(under_1f1b)


@pytest.mark.parametrize("arm", DYNAMIC)
def test_a_half_frozen_model_is_twice_as_fast_when_balanced(arm: str) -> None:
    run = steps(HALF_FROZEN)
    static, dynamic = replay(run, STATIC, setting(announced=True)), replay(run, arm, setting(announced=True))
    assert static.busiest_stage_seconds == 96 and static.busiest_stage_ratio == 0.5 and static.moves == 0
    assert dynamic.moves == 1
    assert dynamic.busiest_stage_seconds == pytest.approx((96 + 999 * 48) / 1000)  # the first iteration is profiled


def test_an_unannounced_change_is_seen_at_the_next_interval() -> None:
    run = steps(Phase.of([1] * 8, 250), HALF_FROZEN)
    seconds = replay(run, "partition_time", setting()).busiest_stage_seconds
    assert seconds == pytest.approx((300 * 96 + 950 * 48) / 1250)  # from 250 to the multiple of 100 after it
    drifting = steps(replace(HALF_FROZEN, announced=False))
    later = replay(drifting, "partition_time", setting(announced=True)).busiest_stage_seconds
    assert later == pytest.approx((100 * 96 + 900 * 48) / 1000)  # others of the same run may be announced
    rare = replay(run, "partition_time", setting(interval=5000))
    assert rare.busiest_stage_seconds == 96 and rare.moves == 0


def test_the_oracle_is_one_iteration_late_only_if_loads_always_change() -> None:
    assert replay(steps(HALF_FROZEN), "oracle", setting()).busiest_stage_seconds == 48
    one = Phase(1, HALF_FROZEN.forward, HALF_FROZEN.backward, HALF_FROZEN.trainable)
    assert replay(steps(one, one), "oracle", setting(interval=1)).busiest_stage_seconds == (96 + 48) / 2


def test_a_move_must_be_repaid_before_the_next_rebalance() -> None:
    # Two layers move. An iteration gets 54 s shorter, because the bottleneck falls and the pipeline fills faster.
    saved = iteration(steps(HALF_FROZEN)[0], chain(0, 4, 8), setting())[1]
    saved -= iteration(steps(HALF_FROZEN)[0], chain(0, 6, 8), setting())[1]
    for interval, moves in ((1, 0), (4, 1)):
        costly = setting(announced=True, interval=interval, layer_bytes=1, link_bytes_per_second=2 / (3 * saved))
        assert move_seconds(chain(0, 4, 8), chain(0, 6, 8), costly) == pytest.approx(3 * saved)
        run = replay(steps(HALF_FROZEN), "partition_time", costly)
        assert run.moves == moves
        assert run.move_seconds == pytest.approx(moves * 3 * saved / 1000)


def test_a_move_must_gain_three_percent() -> None:
    # The second stage gives its first layer away and keeps 4.0: 2.4% less than 4.1, 5.9% less than 4.25.
    for small, moves in ((0.1, 0), (0.25, 1)):
        run = steps(Phase.of((1, 1, 1, 0.5, small, 1, 1, 2), 1000))
        assert replay(run, "partition_time", setting(announced=True)).moves == moves


def test_a_shorter_iteration_pays_even_if_the_bottleneck_stays() -> None:
    even, few = steps(Phase.of((1,) * 6, 1000))[0], setting(layers=6, stages=3, micro_batches=2)
    late, middle = (
        chain(0, 1, 2, 6),
        chain(0, 1, 5, 6),
    )  # four layers on one stage either way, 30 s or 27 s an iteration
    assert [iteration(even, placement, few)[1] for placement in (late, middle)] == [30, 27]
    assert all(worth_it(even, pipeline_of(even, few), late, middle, arm, few) for arm in DYNAMIC)


def test_zero_bubble_is_between_the_busiest_stage_and_1f1b() -> None:
    dense, four = dense_costs(LOAD_MODELS["moe"], setting())[0], setting(stages=4)
    full, schedule, *_, ours = timed_iteration(dense, chain(0, 2, 4, 6, 8), four, Orders())
    assert full < ours < schedule
    assert ours >= full + 3 * 2  # the last stage waits for its first input
    with_links = replace(four, message_bytes=1, link_bytes_per_second=4.0)
    assert zero_bubble(dense, chain(0, 2, 4, 6, 8), with_links) > ours
    assert full < zero_bubble(dense, Placement.v(range(9)), four) < ours


def test_beside_a_stage_without_work_there_is_no_bubble_to_fill() -> None:
    step = steps(HALF_FROZEN)[0]
    assert zero_bubble(step, chain(0, 4, 8), setting()) == 96
    balanced = timed_iteration(step, chain(0, 6, 8), setting(), Orders())
    assert 48 < balanced[-1] < balanced[1]
    static = replay([step], STATIC, setting())
    assert (static.zero_bubble_seconds, static.zero_bubble_ratio) == (96, 0.5)


def test_replicas_run_one_order_and_the_slowest_counts() -> None:
    light, heavy = Phase.of([1] * 8), Phase.of([1] * 4 + [2] * 4)
    even = chain(0, 4, 8)
    alone = zero_bubble(steps(heavy)[0], even, setting())
    assert zero_bubble(PhaseCosts.of([light, heavy, light], 1.0), even, setting(replicas=3)) == alone
    crossed = PhaseCosts.of([heavy, Phase.of([2] * 4 + [1] * 4)], 1.0)
    slowest_layers = zero_bubble(steps(Phase.of([2] * 8))[0], even, setting())
    assert alone <= zero_bubble(crossed, even, setting(replicas=2)) < slowest_layers


@pytest.mark.parametrize("shape", ["chain", "v"])
@pytest.mark.parametrize("frozen", [0, 2])
def test_replicas_are_simulated_as_one_by_one(shape: Shape, frozen: int) -> None:
    owners, rng = owners_of(shape, 4), np.random.default_rng(0)
    seconds = rng.uniform(0.5, 1.5, (4, len(owners), 3))
    seconds[1:, :frozen] = 0
    one_by_one = [
        PassCosts(owners, *(map(tuple, replica.tolist())), (0.25,) * (len(owners) - 1), frozen)
        for replica in seconds.transpose(2, 0, 1)
    ]
    sizes = PassBytes.equal(len(owners))
    order = best_schedule(one_by_one[0], 6, sizes, one_f_one_b_limit(sizes, 6, owners=owners)).schedule
    together = iterations_seconds(order, one_by_one[0], list(seconds))
    assert together.tolist() == pytest.approx([replay_order(order, costs).iteration_seconds for costs in one_by_one])


def test_an_order_is_kept_until_it_has_become_worse() -> None:
    orders, four = Orders(), setting(stages=4)
    dense, alike, other = steps(Phase.of([1] * 8), Phase.of([1.001] * 8), Phase.of([1, 3] * 4))
    latest = []
    for step in (dense, alike, other):
        timed_iteration(step, Placement.v(range(9)), four, orders)
        latest.append(orders.known_by(pipeline_of(step, four, orders).passes).in_force)  # type: ignore[arg-type]
    assert latest[0] is latest[1] is not latest[2]


def test_the_bubble_is_the_share_of_an_iteration_without_work() -> None:
    run = steps(Phase.of([1] * 4 + [2] * 4, 1000))
    static = replay(run, STATIC, setting())
    _, schedule, work, *_ = iteration(run[0], chain(0, 4, 8), setting())
    assert static.one_f_one_b_seconds == schedule > static.busiest_stage_seconds
    assert static.one_f_one_b_ratio == pytest.approx(1 - work / schedule)


def test_the_machine_is_the_papers_unless_told_otherwise() -> None:
    freezing = LOAD_MODELS["freezing"]
    paper, asked = Setting.of(freezing), Setting.of(freezing, stages=8, interval=500, replicas=None)
    assert (paper.layers, paper.stages, paper.replicas, paper.micro_batches) == (40, 24, 30, 96)
    assert (paper.interval, paper.announced) == (50, True)
    assert (asked.stages, asked.replicas, asked.micro_batches) == (8, 30, 32)
    assert (asked.interval, asked.announced) == (500, False)
    assert paper.link_seconds == pytest.approx(0.3355e-3, rel=1e-3)  # 8 MiB at 25 GB/s
    assert paper.layer_bytes == 12 * 1024**2 * (2 + 4 + 4 + 4)  # weights in bf16 and fp32, two moments


def test_the_slowest_replica_counts() -> None:
    light, heavy = Phase.of([1] * 8), Phase.of([1] * 4 + [2] * 4)
    both = PhaseCosts.of([light, heavy], 1.0)
    assert both.costs() == [3.0] * 4 + [6.0] * 4
    full, _, work, imbalance, bound = iteration(both, chain(0, 4, 8), setting(replicas=2))
    assert full == 8 * 24 and work == 8 * (12 + 12 + 12 + 24) / 4 and imbalance == 12 / 18
    assert bound == 8 * 18  # replicas end together


def test_static_partitions_come_from_the_first_phase() -> None:
    light, heavy = Phase.of([1] * 6 + [4] * 2, 1000, trainable=[1, 1, 1, 1, 1, 1, 1, 9]), HALF_FROZEN
    known = known_statics(steps(light, heavy)[0], setting())
    assert known.partitions == {
        "static_uniform": (0, 4, 8),
        "static_parameters": (0, 7, 8),
        "static_profiled": (0, 6, 8),
    }
    assert known.best == "static_profiled" and known.alike == {}
    assert [known.imbalances[arm] for arm in STATICS] == [pytest.approx(one) for one in (6 / 7, 6 / 7, 2 / 7)]
    assert known.seconds["static_uniform"] == iteration(steps(light)[0], chain(0, 4, 8), setting())[1]
    assert [known.start(arm) for arm in ("static_parameters", "dense")] == [(0, 7, 8), (0, 4, 8)]
    assert {known.start(arm) for arm in (*DYNAMIC, "oracle")} == {(0, 6, 8)}
    even = known_statics(steps(Phase.of([1] * 8))[0], setting())
    assert even.best == STATIC and even.alike == {"static_parameters": STATIC, "static_profiled": STATIC}


def test_a_static_partition_that_fits_leaves_moves_no_gain() -> None:
    class Lopsided(LoadModel):
        def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
            return [Phase.of([1] * 6 + [4] * 2, 1000)]

    outcomes = compare(Lopsided("lopsided", 100), setting(), [*STATICS, *DYNAMIC], count=1, seeds=1)
    assert outcomes[STATIC].busiest_stage_seconds > outcomes["static_profiled"].busiest_stage_seconds
    assert outcomes["partition_time"].busiest_stage_seconds == outcomes["static_profiled"].busiest_stage_seconds
    assert outcomes["partition_time"].moves == 0


def test_two_chunks_per_stage_need_two_layers() -> None:
    case, few = LOAD_MODELS["freezing"], setting(layers=7, stages=4)
    outcomes = compare(case, few, [*STATICS, "makespan", "dense", *FORMS], count=2, seeds=1)
    assert V not in outcomes and {HALVES, V_HALVES} < {*outcomes}
    figures = figures_of(V_HALVES, outcomes)
    assert figures["speedup_over_1f1b"] is figures["bubble_ratio_1f1b"] is None
    assert 1 < float(figures["speedup_over_default"] or 0) < float(figures["speedup_of_bound_over_default"] or 0)


@pytest.mark.parametrize("message_bytes", [0, 1])
def test_layers_of_a_v_move(message_bytes: int) -> None:
    run, linked = (
        steps(Phase.of([1] * 8, 1000), Phase.of([4, 1, 1, 1, 1, 1, 1, 4], 1000)),
        setting(message_bytes=message_bytes, link_bytes_per_second=0.125),
    )
    moved = replay(run, "makespan", linked, Placement.v([0, 2, 4, 6, 8]))
    assert moved.moves == 1
    assert moved.busiest_stage_seconds == pytest.approx((1000 * 96 + 100 * 240 + 900 * 192) / 2000)


def test_halves_of_blocks_have_their_loads() -> None:
    whole = PhaseCosts.of([Phase.of([1, 2]), Phase.of([3, 1])], 3.0)
    halves = whole.in_halves()
    assert halves.forward.tolist() == [pytest.approx(row) for row in ([1, 2, 2, 4], [3, 6, 1, 2])]
    assert halves.backward.tolist() == [pytest.approx(row) for row in ([2, 4, 4, 8], [6, 12, 2, 4])]
    assert halves.trainable == pytest.approx((1 / 3, 2 / 3) * 2)


def test_the_table_shows_every_balancer_beside_the_paper(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sizes = ["--layers", "8", "--stages", "2", "--replicas", "1", "--phases", "4", "--seeds", "1"]
    simulate_runs.main(["--case", "early_exit", "--json", str(path), *sizes, "--balancers", *DYNAMIC, "oracle"])
    shown = capsys.readouterr().out
    rows = {row["balancer"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {*STATICS, *DYNAMIC, "oracle", "dense", *FORMS}
    assert all(label(arm) in shown for arm in rows)
    assert "4.52" in shown and "Beside the paper" in shown
    assert rows["dense"]["speedup_over_dense_1f1b"] == rows[STATIC]["speedup_over_uniform_1f1b"] == 1
    assert rows["oracle"]["speedup_over_uniform"] >= rows["partition_time"]["speedup_over_uniform"] > 1.5
    assert rows[PARAMETERS]["speedup_over_default_1f1b"] == 1
    assert rows[PARAMETERS]["speedup_over_uniform_1f1b"] == 1  # exits change no parameters
    # Tokens leave from the first iteration on, so a static partition gains most of it, too.
    assert rows["static_profiled"]["speedup_over_static_1f1b"] == 1 > rows[STATIC]["speedup_over_static_1f1b"]
    assert 1 <= rows["oracle"]["speedup_over_static_1f1b"] < 1.2
    assert rows["makespan"]["speedup_over_default"] < rows[V]["speedup_over_default"]
    assert rows[V]["speedup_over_default"] < rows[V]["speedup_of_bound_over_default"]


def test_a_recorded_run_is_a_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recording, path = tmp_path / "run.jsonl", tmp_path / "rows.json"
    write_recording(recording, [[1] * 4] * 10 + [[0, 0, 1, 1]] * 100, changed=[10])
    flags = ["--balancers", "oracle", "--phases", "1", "--case", "a case"]
    simulate_runs.main(["--recorded", str(recording), "--json", str(path), *flags])
    rows = {row["balancer"]: row for row in json.loads(path.read_text())["rows"]}
    printed = capsys.readouterr().out
    assert "a case: 4 layers, 2 stages x 1 replica," in printed and "Beside the paper" not in printed
    assert "DeepSpeed's default" in printed and set(rows) == {*STATICS, "oracle", "dense", V}
    case = Recorded.read(recording)
    outcomes = compare(case, Setting.of(case), [*STATICS, "oracle"], count=1, seeds=1)
    static, oracle = outcomes[STATIC], outcomes["oracle"]
    assert static.busiest_stage_seconds == pytest.approx(oracle.busiest_stage_seconds * 110 / (10 + 100 / 2))
    own = static.one_f_one_b_seconds / oracle.zero_bubble_seconds
    assert rows["oracle"]["speedup_over_static"] == pytest.approx(own) and 1 < own < 2
    with pytest.raises(SystemExit, match=r"^2$"):
        simulate_runs.main(["--recorded", str(recording), "--layers", "9"])
    assert f"--layers 9: {recording} is a recording of 4 layers" in capsys.readouterr().err


def test_pieces_are_compared_with_a_recording_of_whole_layers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pieces, whole, path = (tmp_path / name for name in ("pieces.jsonl", "whole.jsonl", "rows.json"))
    write_recording(pieces, [[1, 1, 1, 1]] * 8, whole_layers=[0, 1, 2, 4])
    write_recording(whole, [[1, 1, 4]] * 8)  # the last one costs twice what its halves do
    flags = ["--recorded", str(pieces), "--json", str(path), "--link-gbps", "1e9", "--micro-batches", "200"]
    found = {}
    for given in ([], ["--whole", str(whole)]):
        simulate_runs.main([*flags, *given])
        rows = {row["balancer"]: row for row in json.loads(path.read_text())["rows"]}
        found[bool(given)] = rows["makespan"]["speedup_over_static_1f1b"]
    assert found[False] == pytest.approx(1, rel=0.01) and found[True] == pytest.approx(2, rel=0.01)
    for given, error in (
        ([*flags, "--whole", str(pieces)], "holds 4 layers, 3 of them whole; should hold the 3 whole layers"),
        (["--whole", str(whole)], "needs --recorded FILE"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            simulate_runs.main(given)
        assert f"--whole {given[-1]}: {error}" in capsys.readouterr().err


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        simulate_runs.main(["--case", "moe", "--layers", "4", "--stages", "8"])
    assert "4 layers" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        simulate_runs.main(["--case", "moe", "--link-gbps", "0"])
    assert "--link-gbps 0" in capsys.readouterr().err
    for given in (["--layers", "4", "--stages", "8", "--case", "moe"], ["--layers", "x"], ["--unknown"]):
        with pytest.raises(SystemExit, match=r"^2$"):
            simulate_runs.main(given)
        line = capsys.readouterr().err
        assert line.startswith("simulate_runs.py: error: ") and line.count("\n") == 1, line
