"""scripts/plot.py: what it reads, what it refuses, and the page with all pictures."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.cli import plot
from ds_dynmo.cli.plotting.data import (
    RunRecords,
    loads_around,
    read_report,
    read_trace,
    simulated,
    traced,
)
from ds_dynmo.cli.plotting.html import rebalance_rows
from ds_dynmo.engine.measure.trace_events import TraceEvent, TraceFile, Track, batch_events, track_names
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile
from tests.full_disk import files_of_at_most

SECONDS = [(1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (3.0, 6.0)]


def profile(step: int, partition: tuple[int, ...], slower: float = 1.0) -> Profile:
    layers = tuple(LayerCost(slower * forward, slower * backward, 1, 1, 1, 1, 1) for forward, backward in SECONDS)
    return Profile(step, Placement.chain(partition), layers, micro_batches=4, batch_seconds=60.0)


def decision(step: int, old: Sequence[int], new: Sequence[int], **changes: Any) -> dict[str, Any]:
    """Make a record; its predictions are of layers that take other times than :func:`profile` says."""
    record = {
        **{"kind": "rebalance", "step": step, "reason": "<b>interval</b>", "old_partition": old, "new_partition": new},
        **{"bottleneck_seconds_before": 12.0, "bottleneck_seconds_after": 9.0, "imbalance_before": 0.67},
        **{"imbalance_after": 0.0, "layers_moved": int(old != new), "bytes_moved": 2**20, "profile_seconds": 0.001},
        **{"decide_seconds": 0.002, "migrate_seconds": 0.003, "load_signals": []},
        **{"stage_seconds_before": [4.0, 12.0], "stage_seconds_after": [7.0, 9.0]},
    }
    return {**record, **changes}


def run_records() -> list[dict[str, Any]]:
    """Make the records of a run that moves a layer at step 2, keeps all at step 4, and moves it back at 6."""
    steps = [
        {
            "kind": "step",
            "step": n,
            "seconds": 1.0,
            "tokens_per_second": 8.0,
            "train_loss": 3 / n,
            "auxiliary_loss": 0.5,
        }
        for n in range(1, 7)
    ]
    return [
        {"kind": "start", "stop_at": 6, "first_step": 0, "stages": 2, "config": {"dynmo": {"interval": 2}}},
        *steps,
        decision(2, (0, 2, 4), (0, 3, 4)),
        profile(2, (0, 2, 4)).as_record(),
        decision(4, (0, 3, 4), (0, 3, 4)),
        profile(4, (0, 3, 4), slower=2.0).as_record(),
        decision(6, (0, 3, 4), (0, 2, 4), bottleneck_seconds_before=None),
        {
            **{"kind": "end", "tokens_per_second": 8.0, "train_seconds": 6.0, "median_step_seconds": 1.0},
            **{"first_train_loss": 3.0, "train_loss": 0.5, "validation_loss": 0.7, "partition": [0, 2, 4]},
            "validation_losses": [[3, 1.0], [6, 0.7]],
        },
    ]


def write_report(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "report.jsonl"
    folder.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_trace(folder: Path, replicas: int = 1) -> Path:
    path, step_seconds = folder / "trace.json", 10.0
    file = TraceFile(path)
    for step in (3, 4, 5):
        begin = step * step_seconds
        tracks = [
            Track(
                **{"rank": 2 * replica + stage, "replica": replica, "stage": stage, "slice": 0},
                clock_error_seconds=0.0,
                events=(
                    TraceEvent("forward", "forward", 0, begin + stage, begin + stage + 1),
                    TraceEvent("backward", "backward", 0, begin + 5 - stage, begin + 7 - stage),
                    TraceEvent("optimizer step", "optimizer step", None, begin + 8, begin + 9),
                ),
            )
            for replica in range(replicas)
            for stage in range(2)
        ]
        file.append(
            [*(track_names(tracks) if step == 3 else []), *batch_events(step, Placement.chain([0, 2, 4]), tracks, 30.0)]
        )
    return path


def test_loads_around_each_move_are_those_of_its_decision(tmp_path: Path) -> None:
    first, second = loads_around(read_report(write_report(tmp_path, run_records())))
    assert (first.move["step"], second.move["step"]) == (2, 6)
    assert first[1:] == ([4.0, 12.0], [7.0, 9.0], [18.0, 18.0])
    bottlenecks = (first.move["bottleneck_seconds_before"], first.move["bottleneck_seconds_after"])
    assert (max(first.before), max(first.predicted_after)) == bottlenecks  # of the table beside the picture
    assert second.measured_after is None


def test_a_move_without_a_profile_has_no_loads() -> None:
    given = decision(1, (0, 2, 4), (0, 3, 4), stage_seconds_before=None, stage_seconds_after=None)
    assert loads_around(RunRecords(None, None, (), (profile(2, (0, 3, 4)),), (given,))) == []


def test_loads_after_the_next_move_do_not_count_for_this_one() -> None:
    moves = (decision(2, (0, 2, 4), (0, 3, 4)), decision(3, (0, 3, 4), (0, 2, 4)))
    profiles = (profile(2, (0, 2, 4)), profile(5, (0, 2, 4)))
    first, second = loads_around(RunRecords(None, None, (), profiles, moves))
    assert first.measured_after is None and second.measured_after == [6.0, 12.0]


def test_a_simulated_batch() -> None:
    rows = simulated(profile(2, (0, 2, 4)), [0, 3, 4], "a title")
    assert [(name, len(bars)) for name, bars in rows.rows] == [("stage 0", 8), ("stage 1", 8)]
    assert rows.seconds == 3 + 4 * 9 + 6 and rows.title == "a title"


def test_a_traced_batch_begins_at_0(tmp_path: Path) -> None:
    rows = traced(read_trace(write_trace(tmp_path)), 4)
    assert rows.title == "step 4, measured: partition [0, 2, 4]"
    (_, first), (_, second) = rows.rows
    assert [(bar.category, bar.micro_batch, bar.begin_seconds, bar.seconds) for bar in second] == [
        *(("forward", 0, 1.0, 1.0), ("backward", 0, 4.0, 2.0), ("optimizer step", None, 8.0, 1.0))
    ]
    assert first[0].begin_seconds == 0 and rows.seconds == 9
    assert [name for name, _ in rows.rows] == ["stage 0", "stage 1"]
    several = traced(read_trace(write_trace(tmp_path, replicas=2)), 5)
    assert [name for name, _ in several.rows][1:3] == ["pipeline 0, stage 1", "pipeline 1, stage 0"]


def test_which_batches_are_drawn(tmp_path: Path) -> None:
    events = read_trace(write_trace(tmp_path))
    assert [rows.title[:6] for rows in plot.measured(events, None)] == ["step 3", "step 5"]
    assert [rows.title[:6] for rows in plot.measured(events, [4])] == ["step 4"]
    with pytest.raises(ConfigError, match=r"^--steps 9: is not in the trace, which has 3 to 5$"):
        plot.measured(events, [4, 9])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is no record of a report: "),
        ('{"kind": "step"}\n{"step": 3}', "line 2 is no record of a report: "),
        ('{"kind": "profile", "step": 3}', "line 1 is no record of a report: KeyError('partition')"),
        ("[1]", "line 1 is no record of a report: "),
        ('{"kind": "start"}', 'has no record of kind "step" or "profile", there is nothing to draw'),
    ],
)
def test_an_invalid_report_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "report.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/report.jsonl: {message}")):
        read_report(tmp_path / "report.jsonl")


def test_an_invalid_trace_is_refused(tmp_path: Path) -> None:
    for text in ('{"traceEvents": []}', "{}", '{"traceEvents": 3}'):
        (tmp_path / "trace.json").write_text(text)
        with pytest.raises(ConfigError, match=r"trace\.json: should be a trace written by \"dynmo\.trace\""):
            read_trace(tmp_path / "trace.json")


# -- whole runs of the script -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_all_pictures_are_in_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, trace, out = write_report(tmp_path, run_records()), write_trace(tmp_path), tmp_path / "new" / "pictures"
    assert plot.main([str(report), "--trace", str(trace), "--out", str(out)]) == 0
    names = {"loads.png", "losses.png", "simulated.png", "speed.png", "timeline.png"}
    assert {path.name for path in out.iterdir()} == {*names, "report.html"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names)
    page = (out / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{26})', page)
    assert sources == ["data:image/svg+xml;base64,"] * 5 and "http" not in page
    assert '<meta name="viewport" content="width=device-width">' in page
    assert "<b>interval" not in page and "&lt;b&gt;interval" in page
    assert "[0, 2, 4] → [0, 3, 4]" in page and "12000.00 → 9000.00" in page
    assert page.count("<tr>") == 1 + 6 + 1 + 3


def test_a_decision_is_a_row() -> None:
    moved, kept, unknown = rebalance_rows(
        [
            decision(2, [0, 2, 4], [0, 3, 4]),
            decision(4, [0, 3, 4], [0, 3, 4]),
            decision(6, [0, 3, 4], [0, 2, 4], bottleneck_seconds_before=None),
        ]
    )
    assert moved[2:7] == ("[0, 2, 4] → [0, 3, 4]", "1", "1.0", "12000.00 → 9000.00", "0.67 → 0.00")
    assert kept[2:7] == ("[0, 3, 4] kept", "0", "1.0", "12000.00", "0.67")
    assert unknown[5] == "-" and unknown[7:] == ("1.0", "2.0", "3.0")


@pytest.mark.filterwarnings("error")
def test_a_report_with_records_of_the_engine_only(tmp_path: Path) -> None:
    """The records of scripts/train.py are missing, and no layer moves."""
    pytest.importorskip("matplotlib")
    report = write_report(tmp_path, [profile(2, (0, 2, 4)).as_record(), profile(4, (0, 2, 4)).as_record()])
    assert plot.main([str(report), "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"simulated.png", "speed.png"}
    alone = write_report(tmp_path, [r for r in run_records() if r["kind"] == "step"])  # with "dynmo" switched off
    assert plot.main([str(alone), "--out", str(tmp_path / "steps")]) == 0
    assert {path.name for path in (tmp_path / "steps").glob("*.png")} == {"losses.png", "speed.png"}


@pytest.mark.filterwarnings("error")
def test_ranks_at_work_are_drawn_where_a_run_repacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    repacked = {"kind": "repack", "step": 3, "old_partition": [0, 2, 4], "new_partition": [0, 4]}
    froze = {**repacked, "reason": "freezing: first 3 layers", "model_changed": True}
    kept = decision(5, (0, 4), (0, 4), reason="<b>thawing</b>: all", model_changed=True)
    never = write_report(tmp_path, run_records()).rename(tmp_path / "never.jsonl")
    report = write_report(tmp_path, [*run_records(), froze, kept])
    assert read_report(report).repacks == (froze,)
    assert [record["step"] for record in read_report(report).changes] == [5, 3]
    assert plot.main([str(report), "--never", str(never), "--format", "svg", "--out", str(tmp_path)]) == 0
    drawn = (tmp_path / "ranks.svg").read_text()
    written = ("2 to 1 stage", "never re-packed", "&lt;b&gt;thawing&lt;/b&gt;, freezing", "tokens/s")
    assert all(f">{text}<" in drawn for text in written)
    assert not list(tmp_path.glob("*.png"))
    assert plot.main([str(report), "--format", "svg", "--out", str(tmp_path)]) == 0
    assert "never" not in (tmp_path / "ranks.svg").read_text()
    alone = write_report(
        tmp_path / "alone", [profile(2, (0, 2, 4)).as_record(), {**froze, "step": 2}, profile(4, (0, 4)).as_record()]
    )
    assert plot.main([str(alone), "--never", str(never), "--out", str(tmp_path)]) == 2
    assert f"--never {never}: only one of the two reports has tokens/s" in capsys.readouterr().err
    assert plot.main([str(alone), "--never", str(alone), "--format", "svg", "--out", str(tmp_path)]) == 0
    assert all(text in (tmp_path / "ranks.svg").read_text() for text in (">batch (s)<", ">never re-packed<"))


def test_both_parts_of_a_traced_backward_pass_have_a_colour() -> None:
    tracks = [
        Track(
            **{"rank": stage, "replica": 0, "stage": stage, "slice": 0},
            clock_error_seconds=0.0,
            events=(
                TraceEvent("backward", "input gradient", 0, 0.0, 1.0),
                TraceEvent("weight gradient", "weight gradient", 0, 1.0, 2.0),
                TraceEvent("backward", "backward", 1, 2.0, 4.0),
            ),
        )
        for stage in range(2)
    ]
    drawn = traced([*track_names(tracks), *batch_events(3, Placement.chain([0, 2, 4]), tracks, 0.0)], 3)
    categories = [bar.category for bar in drawn.rows[0][1]]
    assert categories == ["input gradient", "weight gradient", "backward"]
    pictures = pytest.importorskip("ds_dynmo.cli.plotting.pictures")
    assert len({pictures.COLORS[category] for category in (*categories, "forward")}) == 4


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report = write_report(tmp_path, run_records())
    (tmp_path / "file").touch()
    for out, why in ((tmp_path / "file" / "out", "Not a directory"), (tmp_path / "full", "File too large")):
        with files_of_at_most(1000):
            assert plot.main([str(report), "--format", "svg", "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"ds-dynmo-plot: error: --out {out}: cannot be written: ") and why in said
    assert os.listdir(tmp_path / "full") == []


def test_arguments_that_cannot_be_drawn_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    report = write_report(tmp_path, run_records())
    assert plot.main([str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: cannot be read" in capsys.readouterr().err
    assert plot.main([str(report), "--steps", "3", "--out", str(tmp_path / "never")]) == 2
    assert "--steps 3: needs --trace FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        plot.main(["--trace", "trace.json"])
    assert "required: report" in capsys.readouterr().err
    draws = "ds_dynmo.cli.plotting.pictures"
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib" or name == draws]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(draws, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([str(report), "--out", str(tmp_path / "never")]) == 2
    assert 'no matplotlib: install the extra "plots"' in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
