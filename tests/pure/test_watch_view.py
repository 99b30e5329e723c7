"""ds-dynmo-watch: bars in a terminal of any size, and the picture of them."""

from __future__ import annotations

import math
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from ds_dynmo.cli import watch
from ds_dynmo.cli.watching.run_state import Report
from ds_dynmo.placement import Placement
from tests.pure.test_watch import (
    A_MOVE,
    END,
    EVEN,
    MOVED,
    Sleeps,
    adds,
    decision,
    lines_of,
    profile,
    report_of,
    step,
)


def shown(report: Report, width: int, height: int | None = None, *, ascii_only: bool = False) -> list[str]:
    """Return the lines that the view draws, without colours."""
    console_of = pytest.importorskip("rich.console").Console
    from ds_dynmo.cli.watching.view import View

    console = console_of(width=width, file=StringIO(), color_system=None)
    options = console.options.copy()
    options.encoding = "ascii" if ascii_only else "utf-8"
    drawn = View(report, "report.jsonl", "written 3 s ago", height).__rich_console__(console, options)
    return [line.plain for line in drawn]


def test_the_view_has_bars_in_proportion() -> None:
    lines = shown(report_of(*A_MOVE, profile(4, MOVED, (0.001, 0.001, 0.001, 0.001))), 60)
    assert lines[:2] == ["report.jsonl  written 3 s ago", "step 4/6"]
    assert [line.count("█") for line in lines if line.endswith(" ms") and "█" in line] == [47, 15]
    assert lines[6].startswith("0 0-2 ███") and lines[7].startswith("1 3   ███") and lines[7].endswith("  3.0 ms")
    assert "partition [0, 3, 4], imbalance 1.00, bubble ratio 0.60" in lines
    assert any(line.startswith("tokens/s 2,000  ▁") for line in lines)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_terminal(ascii_only: bool) -> None:
    report = report_of(*A_MOVE, step(4, loss=math.nan, auxiliary_loss=0.5), profile(4, EVEN))
    report.add(b"damaged")
    for width in (*range(1, 80), 300):
        lines = shown(report, width, ascii_only=ascii_only)
        assert len(lines) > 8 and max(map(len, lines)) <= width
        assert not ascii_only or "".join(lines).isascii()


def test_a_narrow_terminal_keeps_what_matters() -> None:
    report = report_of(*A_MOVE)
    assert "0 0-2 ████████ 9.0 ms" in shown(report, 21)
    assert "0 0-2 ████ 9.0 ms" in shown(report, 17)
    assert "0 ███████ 9.0 ms" in shown(report, 16)  # no room for the numbers of its layers
    assert "0  9.0 ms" in shown(report, 12)  # nor for a bar
    assert "step 2: [0, 2, 4…" in shown(report, 17)


def test_a_narrow_terminal_wraps_lines_unless_it_is_low_as_well() -> None:
    report = report_of(*A_MOVE)
    lines = shown(report, 36, 24)
    assert lines == shown(report, 36) and not any(line.endswith("…") for line in lines)
    first = lines.index("step 2: [0, 2, 4] -> [0, 3, 4],")
    assert lines[first + 1 : first + 4] == [
        "  interval: 1 layer, 3.0 MiB in 15.4",
        "  ms, predicted bottleneck 12.0 ms",
        "  -> 9.0 ms",
    ]
    low = shown(report, 36, len(lines) - 4)
    assert len(low) == len(lines) - 4 and "stage, layers, load per micro-batch…" in low


def test_letters_that_take_two_columns_are_not_cut() -> None:
    report = report_of({**decision(2, EVEN, EVEN), "reason": "凍" * 16, "verdict": ""})
    assert shown(report, 75)[-1] == "  layers"  # 61 letters, 77 columns


@pytest.mark.parametrize("height", [1, 2, 5, 9, 13, 14, 24, 50])
def test_the_view_is_no_higher_than_the_terminal(height: int) -> None:
    stages = 64
    seconds = tuple(0.001 + 0.0001 * (layer == 40) for layer in range(stages))
    report = report_of(*A_MOVE, profile(5, Placement.chain(range(stages + 1)), seconds))
    lines = shown(report, 80, height)
    assert len(lines) <= height
    if height >= 14:
        assert any(line.startswith("40 40") for line in lines) and any(" more: 3.0 ms to 3.0 ms" in li for li in lines)
        assert lines[-1] == "step 0: a run to step 6 in 2 stages begins"
    assert len([line for line in shown(report, 80) if "█" in line and line.endswith("ms")]) == stages


def test_a_low_terminal_is_not_scrolled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console_of = pytest.importorskip("rich.console").Console
    watched = watch.Watch(tmp_path / "report.jsonl")
    stages = Placement.chain(range(65))
    watched.path.write_bytes(lines_of(*A_MOVE, decision(5, stages, stages), profile(5, stages, (0.001,) * 64)))
    watched.file.look()
    monkeypatch.setattr(time, "sleep", Sleeps())
    drawn = StringIO()
    with pytest.raises(KeyboardInterrupt):
        watched.live(console_of(file=drawn, force_terminal=True, width=80, height=16, color_system=None), 0.5)
    live, _, left = drawn.getvalue().partition("\x1b[?1049l")
    assert " more: 3.0 ms to 3.0 ms" in live and "step 5, interval: kept" in live and "step 0: a run" in live
    assert " more: " not in left and left.count(" 3.0 ms") == 64


def test_a_report_of_the_engine_alone_shows_the_time_of_a_batch() -> None:
    lines = shown(report_of(profile(2, EVEN)), 60)
    assert "batch    60.0 ms" in lines and not any("tokens/s" in line for line in lines)


def test_an_empty_report_is_shown() -> None:
    assert shown(Report(), 40) == ["report.jsonl  written 3 s ago"]


def test_the_terminal_is_drawn_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console_of = pytest.importorskip("rich.console").Console
    path = tmp_path / "report.jsonl"
    end = lines_of({**END, "partition": [0, 3, 4]})
    monkeypatch.setattr(time, "sleep", sleeps := Sleeps(adds(path, lines_of(*A_MOVE)), adds(path, end)))
    drawn = StringIO()
    watched = watch.Watch(path)
    watched.file.look()
    watched.live(console_of(file=drawn, force_terminal=True, width=60, height=24, color_system=None), 0.5)
    live, _, left = drawn.getvalue().partition("\x1b[?1049l")
    assert "is not there yet: waiting" in live and "█" in live and sleeps.seconds == [0.5, 0.5]
    assert "step 3/6, ended" in left and "the run has ended" in left


def test_the_picture_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    path = tmp_path / "report.jsonl"
    path.write_bytes(lines_of(*A_MOVE))
    for name in ("one.svg", "two.svg"):
        assert watch.main([str(path), "--svg", str(tmp_path / name)]) == 0
    drawn = (tmp_path / "one.svg").read_text()
    assert "█" in drawn and "url(http" not in drawn and "@font-face" not in drawn and "@import" not in drawn
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
        'ds-dynmo-watch: bars need rich, the extra "watch" has it: pip install "ds_dynmo[watch]"',
        'ds-dynmo-watch: error: --svg needs rich: the extra "watch" has it: pip install "ds_dynmo[watch]"',
    ]


def test_losses_are_those_of_the_latest_records() -> None:
    validation = {"kind": "validation", "step": 3, "validation_loss": 2.9}
    report = report_of(step(3, loss=2.75, auxiliary_loss=0.5), validation)
    assert any(line.startswith("loss     2.750 + auxiliary 0.500, validation 2.900") for line in shown(report, 80))
