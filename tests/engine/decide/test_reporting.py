"""A report that rank 0 cannot write neither ends training nor blocks other ranks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.errors import ConfigError
from tests.support.configs import Case
from tests.support.harness import run_each
from tests.support.training import Warnings, batches, build, reports_of, state

pytestmark = pytest.mark.ranks

MOVES = ([0, 3, 8], [0, 5, 8], [0, 2, 8])


def _replace(path: Path) -> None:
    """Replace a file by a folder, or a folder by a file."""
    was_file = path.is_file()
    path.rename(path.with_name(f"kept {path.name}"))
    path.mkdir() if was_file else path.write_text("no folder")


def _restore(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.with_name(f"kept {path.name}").rename(path)


def train(lost: list[Path], monitors: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    """Train three batches, with a rebalance after each. The files or folders ``lost`` are away in the second."""
    warnings = Warnings()
    engine = build(Case(dynmo={"interval": 0, **section}), more=monitors)
    data, losses = batches(engine), []
    for step, move in enumerate(MOVES):
        if step > 0 and engine.global_rank == 0:
            for path in lost:
                (_replace, _restore)[step - 1](path)
        losses.append(engine.train_batch(data).item())
        engine.rebalance(move)
    trained = {"losses": losses, "state": state(engine), "reports": len(reports_of(engine))}
    return {"trained": trained, "warnings": [*warnings.messages]}  # later runs add to them


def test_what_cannot_be_written_gives_one_warning_and_changes_nothing(tmp_path: Path) -> None:
    """Reports and traces to a full disk, and reports and monitors whose paths are gone for a while, and back."""
    full, traced, report, job = (tmp_path / name for name in ("full", "traced", "report.jsonl", "job"))
    for path in (full, traced):
        path.symlink_to("/dev/full")
    monitors = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    trace = {"path": str(traced), "steps": [1, 3]}
    plain, on_full_disk, lost = run_each(
        2,
        train,
        ([], {}, {}),
        ([], {}, {"report": str(full), "trace": trace}),
        ([report, job], monitors, {"report": str(report)}),
    )
    expected = {
        0: [f"{path}: was not written: [Errno 28] No space left" for path in (full, traced)],
        1: [
            f"{report}: was not written: [Errno 21] Is a dir",
            "csv_monitor: was not written: [Errno 20] Not a directory",
        ],
    }
    for number, ranks in enumerate((on_full_disk, lost)):
        assert [result["trained"] for result in ranks] == [result["trained"] for result in plain]
        assert [result["trained"]["reports"] for result in ranks] == [3, 3] and ranks[1]["warnings"] == []
        for words in expected[number]:
            assert sum(words in text for text in ranks[0]["warnings"]) == 1, ranks[0]["warnings"]
        assert len(ranks[0]["warnings"]) == 2
    records = [json.loads(line) for line in report.read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "rebalance"] == [1, 3]
    assert (job / "DynMo_layers_moved.csv").read_text().splitlines() == ["step,layers_moved", "6,1", "18,3"]
    losses = (job / "Train_Samples_train_loss.csv").read_text().splitlines()  # DeepSpeed's own, in every batch
    assert [row.split(",")[0] for row in losses[1:]] == ["6", "18"]


def with_a_section_of_its_own(sections: list[dict[str, Any]]) -> float | str:
    """Train a batch with a section per rank, and return the loss, or why the section is refused."""
    try:
        engine = build(Case(dynmo={"interval": 0, "timeout_seconds": 10.0, **sections[int(os.environ["RANK"])]}))
    except ConfigError as error:
        return str(error)
    return float(engine.train_batch(batches(engine)).item())


def test_what_is_written_may_differ_between_ranks_and_all_other_keys_must_be_equal(tmp_path: Path) -> None:
    """As in scripts that configure a report only on rank 0."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    (tmp_path / "file").write_text("no folder")
    nowhere = tmp_path / "file" / "report.jsonl"
    traces = [{"trace": {"path": str(tmp_path / str(rank)), "steps": [2, 3]}} for rank in range(2)]
    plain, on_first, on_second, seeds, traced, refused = run_each(
        2,
        with_a_section_of_its_own,
        ([{}, {}],),
        ([{"report": str(first), "log": False, "monitor": False, **traces[0]}, traces[1]],),
        ([{}, {"report": str(second)}],),
        ([{"randomness": {"seed": rank}} for rank in range(2)],),
        ([{}, traces[1]],),
        ([{"report": str(nowhere)}] * 2,),
    )
    assert on_first == on_second == plain and isinstance(plain[0], float)
    assert first.exists() and not second.exists()
    for messages, words in (
        (seeds, "rank 1: dynmo.randomness = RandomnessConfig(per_layer=True, seed=1) here, on rank 0 "),
        (traced, "rank 1: dynmo.trace = TraceConfig("),
        (refused, f'dynmo.report = "{nowhere}": cannot be written: '),
    ):
        assert all(message.startswith(words) for message in messages), messages
