"""ds-dynmo-plot: what it reads, what it refuses, and its pictures."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.cli import plot
from ds_dynmo.cli.plotting.pictures import over_time
from ds_dynmo.cli.plotting.timelines import Bar, TimelineRows, around, read_trace, traced
from ds_dynmo.cli.run_records import DecisionRecord, RunRecords, read_report
from ds_dynmo.engine.measure.trace_events import TraceEvent, TraceFile, Track, batch_events, track_names
from ds_dynmo.errors import ConfigError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile
from tests.support.full_disk import files_of_at_most
from tests.support.split_orders import zb_h1

SECONDS = [(1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (3.0, 6.0)]


def profile(step: int, partition: tuple[int, ...], slower: float = 1.0) -> Profile:
    layers = tuple(
        LayerCost(
            *(slower * forward, slower * backward, 1, 1, 1, 1, 1),
            input_gradient_seconds=slower * backward / 2,
            weight_gradient_seconds=slower * backward / 2,
        )
        for forward, backward in SECONDS
    )
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


def order(step: int, *lines: str) -> dict[str, Any]:
    return {"kind": "schedule", "step": step, "orders": lines or None}


def test_a_batch_is_simulated_before_and_after_the_last_decision_that_changed_it(tmp_path: Path) -> None:
    report = read_report(write_report(tmp_path, run_records()))
    assert [rows.title for rows in around(report, None)] == [
        "before step 6, simulated: [0, 3, 4], 1F1B",
        "after step 6, simulated: [0, 2, 4], 1F1B",
    ]
    before, after = around(report, 2)
    assert before.seconds == 2 + 4 * 12 + 4 and after.seconds == 3 + 4 * 9 + 6
    assert [(name, len(bars)) for name, bars in after.rows] == [("stage 0", 8), ("stage 1", 8)]
    assert [rows.title for rows in around(report, 4)] == ["before step 4, simulated: [0, 3, 4], 1F1B"]
    with pytest.raises(ConfigError, match=r"^--decision 3: decisions of this run were made at steps 2, 4, 6$"):
        around(report, 3)


def test_a_batch_is_drawn_in_the_order_that_ran(tmp_path: Path) -> None:
    """The first decision adopts zero bubble, the second one moves a layer under it, the last one goes back."""
    split = zb_h1(2, 4)
    records = [
        *(order(2), decision(2, (0, 2, 4), (0, 2, 4)), order(2, *split.lines), profile(2, (0, 2, 4)).as_record()),
        *(decision(4, (0, 2, 4), (0, 3, 4)), profile(4, (0, 2, 4)).as_record()),
        *(decision(6, (0, 3, 4), (0, 3, 4)), order(6), profile(6, (0, 3, 4)).as_record()),
    ]
    report = read_report(write_report(tmp_path, records))
    orders = [(one.order_before, one.order_after) for one in report.decisions]
    assert orders == [(None, split), (split, split), (split, None)] and report.order is None
    zero_bubble = f"zero bubble, {split.splits} split passes"
    assert [rows.title.partition(": ")[2] for rows in around(report, 2)] == [
        f"[0, 2, 4], {kind}" for kind in ("1F1B", zero_bubble)
    ]
    moved = around(report, 4)
    assert [rows.title.partition(": ")[2] for rows in moved] == [
        f"{partition}, {zero_bubble}" for partition in ("[0, 2, 4]", "[0, 3, 4]")
    ]
    assert {bar.category for rows in moved for _, bars in rows.rows for bar in bars} == {
        *("forward", "input gradient", "weight gradient")
    }
    assert [rows.title.partition(": ")[2] for rows in around(report, None)] == [
        f"[0, 3, 4], {kind}" for kind in (zero_bubble, "1F1B")
    ]


def test_a_run_without_decisions_has_the_batch_of_its_last_profile() -> None:
    (rows,) = around(RunRecords((), (profile(2, (0, 2, 4)), profile(4, (0, 3, 4)))), None)
    assert rows.title == "step 4, simulated: [0, 3, 4], 1F1B"
    assert around(RunRecords(({"step": 1, "tokens_per_second": 1.0},), ()), None) == []


def placements_of(report: RunRecords) -> list[tuple[int, str]]:
    return [(step, str(placement)) for step, placement in report.placements()]


def test_partitions_of_a_run_that_was_repacked() -> None:
    repacked = {"kind": "repack", "step": 5, "old_partition": [0, 3, 4], "new_partition": [0, 4]}
    moved = read_decisions(decision(2, (0, 2, 4), (0, 3, 4)), decision(4, (0, 3, 4), (0, 3, 4)))
    report = RunRecords((), (profile(2, (0, 2, 4)),), moved, (repacked,))
    assert placements_of(report) == [(0, "[0, 2, 4]"), (2, "[0, 3, 4]"), (5, "[0, 4]")]
    assert placements_of(RunRecords((), (profile(2, (0, 2, 4)),))) == [(0, "[0, 2, 4]")]
    resumed = RunRecords((), (profile(2, (0, 2, 4)), profile(9, (0, 1, 2, 4))))
    assert placements_of(resumed) == [(0, "[0, 2, 4]"), (9, "[0, 1, 2, 4]")], "with other stages, and nothing moved"


def test_a_run_on_a_v_is_drawn_by_its_chunks() -> None:
    of_v = replace(profile(2, (0, 2, 4)), placement=Placement.v([0, 1, 2, 3, 4]))
    to_chain = decision(2, (0, 1, 2, 3, 4), (0, 2, 4), old_partition_owners=(0, 1, 1, 0))
    report = RunRecords((), (of_v,), read_decisions(to_chain))
    assert placements_of(report) == [(0, "[0, 1, 2, 3, 4] on stages [0, 1, 1, 0]"), (2, "[0, 2, 4]")]
    _, ratios, layers = over_time(report).axes
    assert [text.get_text() for text in layers.texts][:4] == ["0", "1", "1", "0"]
    (imbalance, *_) = ratios.lines[0].get_ydata()
    assert imbalance == pytest.approx((12 - 6) / 9)  # of the stages: layers 0 and 3, layers 1 and 2


def read_decisions(*records: dict[str, Any]) -> tuple[DecisionRecord, ...]:
    return tuple(DecisionRecord(record, None, None) for record in records)


def test_a_traced_batch_begins_at_0(tmp_path: Path) -> None:
    rows = traced(read_trace(write_trace(tmp_path)), 4)
    assert rows.title == "step 4, measured: [0, 2, 4]"
    (_, first), (_, second) = rows.rows
    assert [(bar.category, bar.micro_batch, bar.begin_seconds, bar.seconds) for bar in second] == [
        *(("forward", 0, 1.0, 1.0), ("backward", 0, 4.0, 2.0), ("optimizer step", None, 8.0, 1.0))
    ]
    assert first[0].begin_seconds == 0 and rows.seconds == 9
    assert [name for name, _ in rows.rows] == ["stage 0", "stage 1"]
    several = traced(read_trace(write_trace(tmp_path, replicas=2)), 5)
    assert [name for name, _ in several.rows][1:3] == ["pipeline 0, stage 1", "pipeline 1, stage 0"]


def test_only_a_batch_in_which_layers_travelled_has_a_row_of_transfers() -> None:
    forward, transfer = (TraceEvent(category, category, 0, 0.0, 1.0) for category in ("forward", "transfer"))
    still, moving = (
        [Track(**{"rank": 0, "replica": 0, "stage": 0, "slice": 0}, clock_error_seconds=0.0, events=events)]
        for events in ((forward,), (forward, transfer))
    )
    batches = [batch_events(step, Placement.chain([0, 2]), tracks, 0.0) for step, tracks in ((3, still), (4, moving))]
    events = [*track_names(still), *batches[0], *batches[1]]
    assert [name for name, _ in traced(events, 3).rows] == ["stage 0"]
    assert [name for name, _ in traced(events, 4).rows] == ["stage 0", "stage 0, transfers"]


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
        ('{"kind": "schedule", "step": 3, "orders": ["F0 X0"]}', "line 1 is no record of a report: ValueError("),
        ('{"kind": "schedule", "step": 3, "orders": ["F0"]}', "line 1 is no record of a report: ScheduleError("),
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
def test_all_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, trace, out = write_report(tmp_path, run_records()), write_trace(tmp_path), tmp_path / "new" / "pictures"
    assert plot.main([str(report), "--trace", str(trace), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"run.png", "batch.png", "trace.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.iterdir())


@pytest.mark.filterwarnings("error")
def test_a_report_with_records_of_the_engine_only(tmp_path: Path) -> None:
    """The records of ds-dynmo-train are missing, or there are no others."""
    pytest.importorskip("matplotlib")
    report = write_report(tmp_path, [profile(2, (0, 2, 4)).as_record(), profile(4, (0, 2, 4)).as_record()])
    assert plot.main([str(report), "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"batch.png", "run.png"}
    alone = write_report(tmp_path, [r for r in run_records() if r["kind"] == "step"])  # with "dynmo" switched off
    assert plot.main([str(alone), "--out", str(tmp_path / "steps")]) == 0
    assert {path.name for path in (tmp_path / "steps").glob("*.png")} == {"run.png"}


@pytest.mark.filterwarnings("error")
def test_a_run_is_drawn_with_its_decisions(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    repacked = {"kind": "repack", "step": 7, "old_partition": [0, 2, 4], "new_partition": [0, 4]}
    froze = decision(5, (0, 3, 4), (0, 3, 4), reason="froze 3 layers", model_changed=True)
    report = write_report(tmp_path, [*run_records(), froze, repacked])
    for name in ("one", "two"):  # the same bytes, so that a committed picture changes only with its numbers
        assert plot.main([str(report), "--format", "svg", "--out", str(tmp_path / name)]) == 0
    drawn = (tmp_path / "one" / "run.svg").read_text()
    assert drawn == (tmp_path / "two" / "run.svg").read_text()
    marks = ("layers moved", "layers stayed", "re-packed", "the model changed")
    assert all(f">{text}<" in drawn for text in (*marks, "tokens/s", "bubble ratio", "imbalance", "layers of stages"))


def test_the_legend_of_a_timeline_is_inside_the_picture() -> None:
    pictures = pytest.importorskip("ds_dynmo.cli.plotting.pictures")
    bars = tuple(Bar(category, 0, float(place), 1.0) for place, category in enumerate(pictures.COLORS))
    figure = pictures.timelines([TimelineRows("all kinds", (("stage 0", bars),))])
    figure.canvas.draw()
    (legend,) = figure.legends
    inside, drawn = figure.bbox, legend.get_window_extent()
    assert len(legend.texts) == len(pictures.COLORS)
    assert inside.x0 <= drawn.x0 and drawn.x1 <= inside.x1 and inside.y0 <= drawn.y0 and drawn.y1 <= inside.y1


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
    assert plot.main([str(report), "--never", "other.jsonl"]) == 2
    assert "--never: withdrawn; draw each report by itself" in capsys.readouterr().err
    draws = "ds_dynmo.cli.plotting.pictures"
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib" or name == draws]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(draws, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([str(report), "--out", str(tmp_path / "never")]) == 2
    assert 'no matplotlib: install the extra "plot"' in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
