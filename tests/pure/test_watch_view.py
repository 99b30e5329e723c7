"""ds-dynmo-watch: the table in a terminal of any size, and the picture of it."""

from __future__ import annotations

import math
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from ds_dynmo.cli import watch
from ds_dynmo.cli.watching.run_state import ReportState
from ds_dynmo.placement import Placement
from tests.pure.test_watch import (
    A_MOVE,
    END,
    EVEN,
    MOVED,
    Sleeps,
    adds,
    lines_of,
    profile,
    report_of,
    step,
)


class Ascii(StringIO):
    encoding = "ascii"  # type: ignore[assignment]


def shown(report: ReportState, width: int, height: int | None = None, *, ascii_only: bool = False) -> list[str]:
    """Return the lines that the view draws, without colours."""
    console_of = pytest.importorskip("rich.console").Console
    from ds_dynmo.cli.watching.view import view

    drawn = Ascii() if ascii_only else StringIO()
    console_of(width=width, file=drawn, color_system=None).print(
        view(report, "report.jsonl", "written 3 s ago", height)
    )
    return [line.rstrip() for line in drawn.getvalue().splitlines()]


def test_a_row_for_each_stage_has_a_bar_in_proportion() -> None:
    lines = shown(report_of(*A_MOVE, profile(4, MOVED, (0.001, 0.001, 0.001, 0.001))), 80)
    assert lines[:3] == [
        "report.jsonl  written 3 s ago",
        "step 4/6, loss 3.000, 2,000 tokens/s",
        "partition [0, 3, 4], imbalance 1.00, bubble ratio 0.60, loads measured in step 4",
    ]
    assert lines[5].split() == ["stage", "layers", "load", "per", "micro-batch"]
    (*first, _), (*second, _) = (line.split() for line in lines[6:8])
    assert first[:2] == ["0", "0-2"] and second[:2] == ["1", "3"]
    assert [row[3] for row in (first, second)] == ["9.0", "3.0"]
    assert first[2].count("━") == pytest.approx(3 * second[2].count("━"), abs=2)
    assert lines[9].startswith("step 2: [0, 2, 4] -> [0, 3, 4], interval: 1 layer")


@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_terminal(ascii_only: bool) -> None:
    report = report_of(*A_MOVE, step(4, loss=math.nan, auxiliary_loss=0.5), profile(4, EVEN))
    report.add(b"damaged")
    for width in (*range(10, 80), 300):
        lines = shown(report, width, ascii_only=ascii_only)
        assert len(lines) > 8 and max(map(len, lines)) <= width
        assert not ascii_only or "".join(lines).isascii()
    assert "1 line is no record" in lines


def test_a_low_terminal_shows_the_stages_with_the_largest_loads() -> None:
    stages = 64
    seconds = tuple(0.001 + 0.0001 * (layer == 40) for layer in range(stages))
    report = report_of(*A_MOVE, profile(5, Placement.chain(range(stages + 1)), seconds))
    rows = [line.split() for line in shown(report, 120, 24)]
    numbered = [row[0] for row in rows if len(row) == 5 and row[-1] == "ms"]
    assert len(numbered) == 11 and "40" in numbered
    assert ["...", "53", "stages", "with", "smaller", "loads"] in rows
    assert len([line for line in shown(report, 120) if line.endswith("ms") and "━" in line]) == stages


def test_a_low_terminal_is_not_scrolled_and_the_last_view_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console_of = pytest.importorskip("rich.console").Console
    watched = watch.ReportWatcher(tmp_path / "report.jsonl")
    watched.path.write_bytes(lines_of(*A_MOVE, profile(5, Placement.chain(range(65)), (0.001,) * 64)))
    watched.file.look()
    sizes = []
    drawn = StringIO()
    console = console_of(file=drawn, force_terminal=True, width=80, height=16, color_system=None)
    monkeypatch.setattr(time, "sleep", Sleeps(lambda: sizes.append(drawn.getvalue().count("\n"))))
    with pytest.raises(KeyboardInterrupt):
        watched.live(console, 0.5)
    assert sizes[0] < 16 and drawn.getvalue().count(" 3.0 ms") >= 64


def test_a_report_of_the_engine_alone_shows_the_time_of_a_batch() -> None:
    lines = shown(report_of(profile(2, EVEN)), 60)
    assert "step 2, a batch takes 60.0 ms" in lines and not any("tokens/s" in line for line in lines)


def test_an_empty_report_is_shown() -> None:
    assert shown(ReportState(), 40) == ["report.jsonl  written 3 s ago"]


def test_the_terminal_is_drawn_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console_of = pytest.importorskip("rich.console").Console
    path = tmp_path / "report.jsonl"
    end = lines_of({**END, "partition": [0, 3, 4]})
    monkeypatch.setattr(time, "sleep", sleeps := Sleeps(adds(path, lines_of(*A_MOVE)), adds(path, end)))
    drawn = StringIO()
    watched = watch.ReportWatcher(path)
    watched.file.look()
    watched.live(console_of(file=drawn, force_terminal=True, width=60, height=24, color_system=None), 0.5)
    assert "is not there yet: waiting" in drawn.getvalue() and "━" in drawn.getvalue() and sleeps.seconds == [0.5, 0.5]
    left = drawn.getvalue().rpartition("report.jsonl")[2]
    assert "step 3/6, ended" in left and "the run has ended" in left


def test_the_picture_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    path = tmp_path / "report.jsonl"
    path.write_bytes(lines_of(*A_MOVE))
    for name in ("one.svg", "two.svg"):
        assert watch.main([str(path), "--svg", str(tmp_path / name)]) == 0
    drawn = (tmp_path / "one.svg").read_text()
    assert "━" in drawn and "url(http" not in drawn and "@font-face" not in drawn and "@import" not in drawn
    assert drawn == (tmp_path / "two.svg").read_text()


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_without_rich_a_terminal_gets_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.jsonl"
    path.write_bytes(lines_of(*A_MOVE))
    for name in [name for name in sys.modules if name.split(".")[0] == "rich" or name == "ds_dynmo.cli.watching.view"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert watch.main([str(path), "--once"]) == 0
    assert "step 3/6: loss" in terminal.getvalue()
    assert watch.main([str(path), "--svg", str(tmp_path / "view.svg")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        'ds-dynmo-watch: the table needs rich, the extra "watch": pip install rich',
        'ds-dynmo-watch: error: --svg needs rich: the extra "watch": pip install rich',
    ]


def test_losses_are_those_of_the_latest_records() -> None:
    validation = {"kind": "validation", "step": 3, "validation_loss": 2.9}
    report = report_of(step(3, loss=2.75, auxiliary_loss=0.5), validation)
    assert "step 3, loss 2.750 + auxiliary 0.500, validation 2.900, 3,000 tokens/s" in shown(report, 80)
