"""scripts/benchmark.py: its arguments, what it refuses, and the layers that it emulates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import emulate
from benchmarks.arms import chosen
from benchmarks.emulated import Batch, Benchmark, until_settled, with_costs
from benchmarks.emulation import EmulatedBlock, told_passes
from benchmarks.machine import Machine
from ds_dynmo.engine.run.weight_gradients import WeightGradients
from ds_dynmo.partitioners import PipelineModel
from ds_dynmo.placement import Placement
from ds_dynmo.schedules import schedule_for_equal_costs
from simulation import LOAD_MODELS, Phase, Recorded
from simulation.runs import ARMS
from simulation.statics import Statics


def test_engines_are_the_requested_ones_and_their_baselines() -> None:
    lopsided = PipelineModel((1.0, 1.0, 1.0, 3.0), (2.0, 2.0, 2.0, 6.0), 8, (1.0, 1.0))
    known = Statics.known(lopsided, [1.0] * 4)  # by parameters it is uniform
    assert chosen(["makespan"], known) == ["static_uniform", "static_profiled", "makespan", "dense"]
    assert set(ARMS) - set(chosen(None, known)) == {"static_parameters"}


def test_two_chunks_per_stage_begin_balanced() -> None:
    rising = PipelineModel((1.0, 1.0, 1.0, 3.0, 3.0, 9.0), (0.0,) * 6, 8, (1.0, 1.0))
    known = Statics.known(rising, [1.0] * 6)
    assert known.start("makespan") == known.partitions[known.best] == (0, 5, 6)
    assert known.start("makespan", "v") == (0, 1, 4, 5, 6)  # loads of 10 and 8
    assert known.start("makespan", "loop") == (0, 2, 3, 5, 6)  # 8 and 10
    assert [known.start(arm, "v") for arm in ("static_uniform", "dense")] == [(0, 3, 6)] * 2


def test_static_partitions_are_of_whole_layers() -> None:
    whole = PipelineModel((1.0, 2.0, 5.0), (2.0, 4.0, 10.0), 8, (1.0, 1.0))
    known = Statics.known(whole, [1.0] * 3, [3, 3, 3, 5, 5, 5], [0, 1, 3, 6])
    assert known.start("static_profiled") == (0, 2, 3) and known.start("makespan") == (0, 3, 6)
    assert known.start("makespan", "v") == (0, 2, 4, 5, 6)


@pytest.mark.parametrize("command", emulate.COMMANDS)
def test_every_command_of_emulate_has_sizes_of_its_own(command: str) -> None:
    arguments = emulate.parse(["--local_rank=1", command, "--micro-batches", "3", "--json", "rows.json"])
    assert (arguments.what, arguments.micro_batches, arguments.json.name) == (command, 3, "rows.json")


def test_an_emulated_block_takes_the_seconds_of_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    block = EmulatedBlock()
    block.forward_seconds, block.backward_seconds = 0.02, 0.05
    hidden = block(torch.ones(2, requires_grad=True))
    assert slept == [0.02]
    hidden.sum().backward()
    assert slept == [0.02, 0.05]
    assert hidden.tolist() == [1.0, 1.0]


def test_an_emulated_backward_pass_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    block, gradients = EmulatedBlock(0.01), WeightGradients()
    block.weight_share, block.split_price = 0.25, 2.0
    with gradients.splitting([]):
        hidden = block(torch.ones(2, requires_grad=True)).sum()
        with gradients.first_part((0, 0)):
            hidden.backward()
        assert slept == [0.01, pytest.approx(0.03)] and block.parts[block.largest].grad is None
        gradients.second_part((0, 0)).roots()[0].backward()
    assert slept[2:] == [pytest.approx(0.01)] and block.parts[block.largest].grad is not None


@pytest.mark.parametrize(("share", "units"), [(1.0, 255), (0.5, 128), (0.1, 26), (0.001, 1), (0.0, 0)])
def test_the_requested_share_of_parameters_is_trainable(share: float, units: int) -> None:
    block = EmulatedBlock()
    whole = sum(part.numel() for part in block.parameters())
    block.train_share(share)
    assert sum(part.numel() for part in block.parameters() if part.requires_grad) == whole * units // 255
    hidden = block(torch.ones(2, requires_grad=True))
    hidden.sum().backward()
    assert [part.grad is not None for part in block.parts].count(True) == (1 if share else 0)


def test_a_phase_begins_with_two_decisions() -> None:
    decisions = [(0.1, 0.2, 0.3), (0.3, 0.0, 0.1)]
    freezing, early_exit = LOAD_MODELS["freezing"], LOAD_MODELS["early_exit"]
    announced, later = replace(Phase.of([1], 2500), announced=True), Phase.of([1], 2500)  # after an interval of 100
    counts, costs = until_settled(freezing, announced, decisions, 0.05, moved_again=True)
    assert counts == [1, 50]
    assert costs == pytest.approx((50 * (0.2 + 0.05), 50 * 0.1, 0.4))
    assert until_settled(early_exit, later, decisions, 0.0, moved_again=True)[0] == [100, 100]


def test_a_phase_has_settled_when_its_decisions_move_nothing() -> None:
    freezing, pruning = LOAD_MODELS["freezing"], LOAD_MODELS["pruning"]
    announced = replace(Phase.of([1], 2500), announced=True)
    decisions = [(0.1, 0.2, 0.3), (0.3, 0.0, 0.0)]
    assert until_settled(freezing, announced, decisions, 0.05, moved_again=False)[0] == [1]
    # A phase of pruning that is as long as its interval has one decision.
    short = replace(announced, iterations=1000)
    counts, costs = until_settled(pruning, short, decisions[:1], 0.0, moved_again=False)
    assert (counts, costs) == ([1], pytest.approx((0.1, 0.2, 0.3)))


def test_a_phase_that_is_shorter_than_its_interval_has_a_decision() -> None:
    counts, costs = until_settled(LOAD_MODELS["pruning"], Phase.of([1], 75), [(0.1, 0.2, 0.3)], 0.05, moved_again=False)
    assert counts == [75]  # nothing was announced, and it is over before
    assert costs == pytest.approx((0.15, 0.2, 0.3))


def test_costs_of_a_phase_are_those_of_its_first_iterations() -> None:
    passes, placement = told_passes(Phase.of([1, 1]), 1.0), Placement.v([0, 1, 2])
    batch = Batch(5.0, (0.0, 0.0, 0.0), placement, schedule_for_equal_costs(1, 2, shape="v"))
    before, after = batch.times(10, passes, less=1.0), batch.times(0, passes)
    assert (before.iterations, before.seconds) == (10, 40)
    (only,) = with_costs([before, after], (1.0, 2.0, 3.0))
    assert (only.iterations, only.seconds, only.costs) == (10, 46, (1.0, 2.0, 3.0))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_told_passes_are_what_a_block_sleeps(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(EmulatedBlock, "split_price", 1.1)
    passes = told_passes(Phase(1, (1.0, 1.0), (1.0, 1.0), (1.0, share)), 1.0)
    block, gradients = EmulatedBlock(), WeightGradients()
    block.forward_seconds, block.backward_seconds = passes.forward_seconds[1], passes.backward_seconds[1]
    block.train_share(share)
    hidden = block(torch.ones(2, requires_grad=True)).sum()
    with gradients.splitting([]), gradients.first_part((0, 0)):
        hidden.backward()
    assert slept == pytest.approx([passes.forward_seconds[1], passes.input_gradient_seconds[1]])
    assert passes.frozen_layers == 0
    assert told_passes(Phase(1, (1.0,), (0.0,), (0.0,)), 1.0).frozen_layers == 1


@pytest.mark.parametrize("recorded", [True, False])
def test_the_oracle_knows_recorded_loads_before_they_come(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = Phase.of([1, 0]), Phase.of([0, 1])
    benchmark, went = object.__new__(Benchmark), list[Phase]()
    benchmark.load_model = Recorded("recorded") if recorded else LOAD_MODELS["moe"]
    stage = SimpleNamespace(placement=None, schedule=SimpleNamespace(running=None))
    arm = SimpleNamespace(
        name="oracle", dynamic=False, engine=SimpleNamespace(stage=stage), new_costs=lambda: (0.0, 0.0, 0.0)
    )
    for name in ("load", "timed_batch", "passes"):
        monkeypatch.setattr(Benchmark, name, lambda *given: 1.0)
    monkeypatch.setattr(Benchmark, "go_to_best", lambda self, arm, phase: went.append(phase))
    benchmark.one_iteration(arm, now, before, 0.0)
    assert went == [now if recorded else before]


def test_stolen_seconds_are_a_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stolen = iter([10.0, 14.0]), iter([100.0, 106.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr("benchmarks.machine._stolen_seconds", lambda: next(stolen))
    assert Machine().stolen() == 6 / (4 * 3)
