"""Every dynamic case and every optimizer wrapper on one rank with an accelerator."""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

from tests.accelerator.devices import IS_REAL, all_precisions, each, needs, run_on_devices, variants
from tests.support import case_runs
from tests.support.case_runs import CASES, CaseRun
from tests.support.checkpoints import check_same, load_and_continue, save_and_continue
from tests.support.configs import Case
from tests.support.training import train_frozen


def train_every_case(precision: str) -> dict[str, list[list[float]] | str]:
    """Return, by case, the losses of equal runs, or the error of one.

    There are two on a real device. The emulated one computes as the CPU does, so a second run would show nothing.
    """
    found: dict[str, list[list[float]] | str] = {}
    for name, model in CASES.items():
        run = CaseRun(model, stages=1, precision=precision)
        try:
            found[name] = [case_runs.train(run)["losses"] for _ in range(2 if IS_REAL else 1)]
        except Exception:
            found[name] = traceback.format_exc()
    return found


@needs(1)
@variants("precision", ["fp32", "bf16 zero1"], ["bf16 zero1"])
def test_every_case_trains_and_is_deterministic(precision: str) -> None:
    (found,) = run_on_devices(1, train_every_case, precision)
    assert found.keys() == CASES.keys()
    failures = {name: losses for name, losses in found.items() if isinstance(losses, str)}
    assert not failures, "\n".join(f"{name}:\n{text}" for name, text in failures.items())
    for name, (once, *again) in found.items():
        assert all(map(math.isfinite, once)), name
        assert all(losses == once for losses in again), name


@needs(1)
@all_precisions
def test_freezing_rebuilds_the_optimizer_and_takes_effect(precision: str) -> None:
    """Two leading layers freeze after two batches, and thaw after five."""
    (found,) = run_on_devices(1, train_frozen, Case(stages=1, precision=precision), {2: 2, 5: 0}, {})
    assert not found["thawed"] and all(map(math.isfinite, found["losses"]))


def save_and_load(case: Case, folder: str) -> list[dict[str, Any]]:
    """Return the results of a run after it saved, and of one that resumes from there."""
    return [save_and_continue(case, folder), load_and_continue(case, folder)]


@needs(1)
@all_precisions
def test_a_run_resumes_from_a_checkpoint(precision: str, tmp_path: Path) -> None:
    ((saved, loaded),) = run_on_devices(1, save_and_load, Case(stages=1, precision=precision), str(tmp_path))
    check_same([saved], [loaded])


@needs(1)
@variants("reentrant", [True, False], [True])
def test_recomputing_activations_changes_nothing(reentrant: bool) -> None:
    cases = [Case(stages=1, dropout=True, checkpoint_interval=n, reentrant=reentrant) for n in (0, 1)]
    ((plain, recomputed),) = run_on_devices(1, each, train_frozen, tuple((case, {}, {}) for case in cases))
    assert plain["losses"] == recomputed["losses"] and plain["state"] == recomputed["state"]
