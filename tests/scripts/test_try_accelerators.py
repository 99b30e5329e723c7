"""scripts/try_accelerators.py: what it expects of figures, what it writes, and that no step stops another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import try_accelerators
from try_accelerators import Expectation, Outcome, Step, Trial, page, record, summary, try_step

MACHINE = {
    "processor": "a processor",
    "cores": 16,
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "accelerator": "cuda",
    "devices": ["Fast 100", "Fast 100"],
    "count": 2,
    "environment": {"os": "Linux", "nvidia_driver_version": "580.1", "pip_packages": "many"},
}
MIGRATION = {"bytes": 2**30, "move_seconds": 0.5, "raw_seconds": 0.25, "bandwidth_over_raw": 0.5}
OVERHEAD = {
    "batch ms": 50.0,
    "profiled over plain batch (median of pairs)": 1.1,
    "share of a run at interval 100": 0.01,
}
ARMS = [{"arm": name, "speedup_over_stock": 1.0, "seconds": 0.1} for name in ("stock", "zero_bubble", "auto")]
ROW = {"schedule": "1f1b", "precision": "bf16", "checkpointing": "none", "predicted_bytes": [100, 100]}
END = {"kind": "end", "first_train_loss": 5.0, "train_loss": 3.0, "tokens_per_second": 1e4}


def trial_in(folder: Path, devices: int = 2, kind: str = "cuda", *, quick: bool = False) -> Trial:
    return Trial(tuple(range(devices)), kind, quick, folder)


def step_of(name: str) -> Step:
    return next(step for step in try_accelerators.STEPS if step.name == name)


@pytest.mark.parametrize(
    ("step", "holds", "fails", "figures"),
    [
        (
            "tests",
            {"tests": {"tests": "9", "failures": "0", "errors": "0", "skipped": "2"}},
            {"tests": {"tests": "9", "failures": "1", "errors": "1", "skipped": "2"}},
            "5 passed, 2 failed, 2 skipped",
        ),
        (
            "quickstart",
            {"quickstart": [{"stages": 2}, {"kind": "rebalance", "bytes_moved": 9}, END]},
            {"quickstart": [{"stages": 2}, {"kind": "rebalance", "bytes_moved": 0}, END]},
            "0 moves, 10,000 tokens/s",
        ),
        (
            "schedules",
            {"schedules": {"differing_weights": [], "arms": ARMS}},
            {"schedules": {"differing_weights": ["auto"], "arms": ARMS}},
            "auto",
        ),
        (
            "schedules",
            {"schedules": {"differing_weights": [], "arms": ARMS}},
            {"schedules": {"differing_weights": [], "arms": [{**ARMS[1], "speedup_over_stock": 0.99}]}},
            "0.990 of its speed, batches of 100.0 ms",
        ),
        (
            "migration",
            {"devices 0 and 1": MIGRATION},
            {"devices 0 and 1": MIGRATION, "devices 0 and 2": {**MIGRATION, "bandwidth_over_raw": 0.49}},
            "1,024 MiB, 2.15 GB/s, plain 4.29 GB/s: 0.49",
        ),
        (
            "overhead",
            {"overhead": OVERHEAD},
            {"overhead": {**OVERHEAD, "share of a run at interval 100": 0.02}},
            "2.00%",
        ),
        (
            "memory",
            {"memory": {"machine": MACHINE, "rows": [{**ROW, "measured_bytes": [90, 110], "step_bytes": [1, 110]}]}},
            {"memory": {"machine": MACHINE, "rows": [{**ROW, "measured_bytes": [100, 89], "step_bytes": [1, 110]}]}},
            "1.000, 0.890; at most 0 MiB",
        ),
        (
            "memory",
            {"memory": {"machine": MACHINE, "rows": [{**ROW, "measured_bytes": [90, 110], "step_bytes": [1, 110]}]}},
            {"memory": {"machine": MACHINE, "rows": [{**ROW, "measured_bytes": [90, 110], "step_bytes": [1, 111]}]}},
            "0.010, 1.110; at most 0 MiB",
        ),
    ],
)
def test_figures_hold_up_to_their_bounds_and_no_further(step: str, holds: Any, fails: Any, figures: str) -> None:
    assert all(expected.held for expected in step_of(step).judge(holds))
    assert [expected.figures for expected in step_of(step).judge(fails) if not expected.held] == [figures]


def test_where_one_device_is_one_stage_nothing_is_expected_to_move() -> None:
    (falls,) = step_of("quickstart").judge({"quickstart": [{"stages": 1}, END]})
    assert falls.held and falls.figures == "5.000 to 3.000"


def test_a_cpu_counts_no_allocations() -> None:
    row = {**ROW, "measured_bytes": [500, 500], "step_bytes": [500, 500]}
    machine = {**MACHINE, "accelerator": "cpu"}
    expectations = step_of("memory").judge({"memory": {"machine": machine, "rows": [row]}})
    assert [expected.held for expected in expectations] == [None, None]


@pytest.mark.parametrize(
    ("kind", "quick", "held"), [("cuda", False, False), ("cuda", True, None), ("emulated", False, None)]
)
def test_seconds_are_judged_in_full_sizes_on_devices_of_their_own(
    kind: str, quick: bool, held: bool | None, tmp_path: Path
) -> None:
    trial = trial_in(tmp_path, kind=kind, quick=quick)
    assert try_accelerators.judged(Expectation("fast", "slow", False, timed=True), trial).held is held
    assert try_accelerators.judged(Expectation("equal", "differs", False), trial).held is False


def test_every_pair_of_devices_moves_layers(tmp_path: Path) -> None:
    labels = list(try_accelerators.migration(trial_in(tmp_path, 4)))
    assert labels[0] == "devices 0 and 1, fp32" and len(labels) == 1 + 6
    assert labels[-1] == "devices 2 and 3, bf16-zero1"
    assert len(try_accelerators.migration(trial_in(tmp_path, 4, quick=True))) == 2


@pytest.mark.parametrize("name", ["schedules", "migration"])
def test_what_needs_two_devices_is_skipped_with_one(name: str, tmp_path: Path) -> None:
    outcome = try_step(step_of(name), trial_in(tmp_path, 1))
    assert outcome.skipped is not None and outcome.skipped.startswith("needs 2 devices, 1 here: one ")
    assert not outcome.commands and not outcome.expectations


WRITES = "import sys; print('written'); open(sys.argv[1], 'w').write('7')"


@pytest.mark.parametrize(
    ("program", "fault", "figures"),
    [
        (WRITES, None, 7),
        (WRITES + "; sys.exit(3)", "exit status 3", 7),
        ("print('lost')", "no figures were written", None),
        ("import time; time.sleep(600)", "not done after 0.5 s", None),
    ],
)
def test_a_step_that_fails_or_hangs_is_an_expectation_that_does_not_hold(
    program: str, fault: str | None, figures: Any, tmp_path: Path
) -> None:
    def judge(found: Any) -> list[Expectation]:
        return [Expectation("seven", str(found["one"]), found["one"] == 7)]

    limit = 0.5 if fault and "not done" in fault else 60.0
    step = Step("step", lambda trial: {"one": [sys.executable, "-c", program]}, judge, limit)
    outcome = try_step(step, trial_in(tmp_path))
    (done,) = outcome.commands
    assert (done.fault, done.figures) == (fault, figures)
    assert outcome.expectations[0].held is (fault is None)
    assert [expected.says for expected in outcome.expectations[1:]] == ["seven"] * (figures is not None)
    if "print" in program:
        assert done.output in (["written"], ["lost"])


def test_figures_that_end_early_are_an_expectation_that_does_not_hold(tmp_path: Path) -> None:
    program = 'import sys; open(sys.argv[1], \'w\').write(\'{"kind": "start", "stages": 2}\')'
    step = step_of("quickstart")._replace(commands=lambda trial: {"quickstart": [sys.executable, "-c", program]})
    *_, last = try_step(step, trial_in(tmp_path)).expectations
    assert last.says == "quickstart writes all figures" and last.held is False


def test_the_page_and_the_json_have_every_figure(tmp_path: Path) -> None:
    expectations = [Expectation("a | b", "1 of 2", True), Expectation("c", "3", False), Expectation("d", "4", None)]
    done = try_accelerators.Done("one", "python one.py", 12.3, "exit status 1", {"x": 1}, ["Traceback", "Error"])
    outcomes = [Outcome("first", None, [done], expectations), Outcome("second", "needs 2 devices, 1 here: why")]
    results = json.loads(json.dumps(record(trial_in(tmp_path), MACHINE, "2026-01-02", outcomes)))
    assert results["steps"][0]["commands"][0]["figures"] == {"x": 1} and results["machine"] == MACHINE
    text = page(results)
    assert summary(results["steps"]) == "1 of 2 expectations held, 1 not judged, 1 step skipped"
    for line in (
        "# Accelerators, 2026-01-02",
        "**1 of 2 expectations held, 1 not judged, 1 step skipped**",
        "| accelerator | cuda, 2 tried of 2: 2 × Fast 100 |",
        "| torch, deepspeed | 2.13.0, 0.19.8 |",
        "| nvidia driver version | 580.1 |",
        "| first | a \\| b | 1 of 2 | held |",
        "| first | c | 3 | **did not hold** |",
        "| first | d | 4 | not judged |",
        "| second |  | needs 2 devices, 1 here: why | skipped |",
        "exit status 1, 12 s",
        "    $ python one.py",
        "    Error",
    ):
        assert line in text.splitlines(), line
    assert "pip" not in text
