"""scripts/benchmark.py: its arguments, what it refuses, and the layers that it emulates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import emulate
from benchmark import checked_load_models, parse
from benchmarks.arms import chosen
from benchmarks.emulated import Benchmark, until_settled
from benchmarks.emulation import EmulatedBlock
from benchmarks.machine import Machine
from ds_dynmo.engine.run.weight_gradients import WeightGradients
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import PipelineModel
from simulation import LOAD_MODELS, Phase, Recorded
from simulation.runs import ARMS
from simulation.statics import Statics
from tests.support.recordings import write_recording


@pytest.mark.parametrize("command", emulate.COMMANDS)
def test_every_command_of_emulate_has_sizes_of_its_own(command: str) -> None:
    arguments = emulate.parse(["--local_rank=1", command, "--micro-batches", "3", "--json", "rows.json"])
    assert (arguments.what, arguments.micro_batches, arguments.json.name) == (command, 3, "rows.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "7"], "--layers 7: should be at least the number of stages, 8"),
        (["--layers", "0"], "--layers 0: should be at least 1"),
        (["--rounds", "0"], "--rounds 0: should be at least 1"),
        (["--micro-batches", "0"], "--micro-batches 0: should be at least 1"),
        (["--recorded", "RECORDING"], "a.jsonl: layers 6: should be at least the number of stages, 8"),
        (["--recorded", "RECORDING", "--layers", "9"], "--layers 9: .*a.jsonl is a recording of 6 layers"),
    ],
)
def test_sizes_that_do_not_make_a_pipeline_are_refused(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    recording = str(write_recording(tmp_path / "a.jsonl", [[1] * 6] * 9))
    flags = [recording if flag == "RECORDING" else flag for flag in flags]
    with pytest.raises(ConfigError, match=message):
        checked_load_models(parse(flags))


def test_engines_are_the_requested_ones_and_their_baselines() -> None:
    lopsided = PipelineModel((1.0, 1.0, 1.0, 3.0), (2.0, 2.0, 2.0, 6.0), 8, (1.0, 1.0))
    known = Statics.known(lopsided, [1.0] * 4)  # by parameters it is uniform
    assert chosen(["makespan"], known) == ["static_uniform", "static_profiled", "makespan", "dense"]
    assert set(ARMS) - set(chosen(None, known)) == {"static_parameters"}


def test_the_launcher_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="start with DeepSpeed's launcher"):
        checked_load_models(parse([]))


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
    first, second = (2.0, (0.1, 0.2, 0.3)), (1.0, (0.3, 0.0, 0.1))
    freezing, early_exit = LOAD_MODELS["freezing"], LOAD_MODELS["early_exit"]
    announced, later = replace(Phase.of([1], 2500), announced=True), Phase.of([1], 2500)  # after an interval of 100
    passed, seconds, costs = until_settled(freezing, announced, [first, second], 0.05, moved_again=True)
    assert passed == 1 + 50
    assert seconds == pytest.approx(1.95 + 50 * 0.95)
    assert costs == pytest.approx((50 * (0.2 + 0.05), 50 * 0.1, 0.4))
    passed, seconds, _ = until_settled(early_exit, later, [first, second], 0.0, moved_again=True)
    assert (passed, seconds) == (200, pytest.approx(200.0 + 100.0))


def test_a_phase_has_settled_when_its_decisions_move_nothing() -> None:
    first, second = (2.0, (0.1, 0.2, 0.3)), (1.0, (0.3, 0.0, 0.0))
    freezing, pruning = LOAD_MODELS["freezing"], LOAD_MODELS["pruning"]
    announced = replace(Phase.of([1], 2500), announced=True)
    assert until_settled(freezing, announced, [first, second], 0.05, moved_again=False)[:2] == (1, pytest.approx(1.95))
    # A phase of pruning that is as long as its interval has one decision.
    passed, seconds, costs = until_settled(
        pruning, replace(announced, iterations=1000), [first], 0.0, moved_again=False
    )
    assert (passed, seconds, costs) == (1, 2.0, pytest.approx((0.1, 0.2, 0.3)))


def test_a_phase_that_is_shorter_than_its_interval_has_a_decision() -> None:
    passed, seconds, costs = until_settled(
        LOAD_MODELS["pruning"], Phase.of([1], 75), [(2.0, (0.1, 0.2, 0.3))], 0.05, moved_again=False
    )
    assert (passed, seconds) == (75, pytest.approx(75 * 1.95))  # nothing was announced, and it is over before
    assert costs == pytest.approx((0.15, 0.2, 0.3))


@pytest.mark.parametrize("recorded", [True, False])
def test_the_oracle_knows_recorded_loads_before_they_come(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = Phase.of([1, 0]), Phase.of([0, 1])
    benchmark, went = object.__new__(Benchmark), list[Phase]()
    benchmark.load_model = Recorded("recorded") if recorded else LOAD_MODELS["moe"]
    arm = SimpleNamespace(
        name="oracle", dynamic=False, engine=SimpleNamespace(partition=[0, 1, 2]), new_costs=lambda: (0.0, 0.0, 0.0)
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
