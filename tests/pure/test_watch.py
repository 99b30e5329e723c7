"""ds-dynmo-watch: a file that is written meanwhile, what its lines say, and how they are shown."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.cli import watch
from ds_dynmo.cli.watching.follower import Follower
from ds_dynmo.cli.watching.lines import duration
from ds_dynmo.cli.watching.run_state import Report
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile, RebalanceReport, RepackReport

START = {"kind": "start", "steps": 6, "first_step": 0, "stop_at": 6, "stages": 2}
END = {"kind": "end", "steps": 6, "tokens_per_second": 1234.5, "train_loss": 2.5, "validation_loss": 2.4}
SECONDS = (0.001, 0.001, 0.001, 0.003)  # forward of each layer; backward takes twice as long


def step(number: int, loss: float = 3.0, **changes: Any) -> dict[str, Any]:
    record = {"kind": "step", "step": number, "seconds": 1.0, "tokens_per_second": 1000.0 * number}
    return {**record, "train_loss": loss, "auxiliary_loss": 0.0, **changes}


def profile(number: int, placement: Placement, seconds: tuple[float, ...] = SECONDS) -> dict[str, Any]:
    layers = tuple(LayerCost(one, 2 * one, 1, 1, 1, 1, 1) for one in seconds)
    return Profile(number, placement, layers, micro_batches=4, batch_seconds=0.06).as_record()


def decision(number: int, old: Placement, new: Placement, **changes: Any) -> dict[str, Any]:
    settings = {
        **{"bottleneck_seconds_before": 0.012, "bottleneck_seconds_after": 0.009, "imbalance_before": 0.7},
        **{"imbalance_after": 0.0, "layers_moved": int(old != new), "bytes_moved": 3 * 2**20, "profile_seconds": 0.0},
        **{"decide_seconds": 0.0, "migrate_seconds": 0.0154, "verdict": "better", **changes},
    }
    return RebalanceReport(step=number, reason="interval", old_placement=old, new_placement=new, **settings).as_record()


def lines_of(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def report_of(*records: dict[str, Any]) -> Report:
    report = Report()
    for line in lines_of(*records).splitlines():
        report.add(line)
    assert not report.skipped
    return report


EVEN, MOVED = Placement.chain([0, 2, 4]), Placement.chain([0, 3, 4])
A_MOVE = (START, step(1), step(2), decision(2, EVEN, MOVED), profile(2, EVEN), step(3))


# -- the file ---------------------------------------------------------------------------------------------------------


class Followed:
    """A file, and what a follower has passed on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[bytes] = []
        self.restarts = 0
        self.follower = Follower(path, self.lines.append, self._restart)

    def _restart(self) -> None:
        self.lines.clear()
        self.restarts += 1

    def after(self, write: bytes | None = None, *, add: bytes | None = None) -> list[bytes]:
        """Return what was passed on since the last restart, once the file was written or added to."""
        if write is not None:
            self.path.write_bytes(write)
        if add is not None:
            with self.path.open("ab") as file:
                file.write(add)
        self.follower.look()
        return self.lines


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "report.jsonl")


def test_lines_are_passed_on_once_when_they_are_complete(followed: Followed) -> None:
    assert followed.after(b'{"a": 1}\n{"b"') == [b'{"a": 1}\n']
    assert followed.after(add=b": 2") == [b'{"a": 1}\n']
    assert followed.after(add=b"}\n\xff\n") == [b'{"a": 1}\n', b'{"b": 2}\n', b"\xff\n"]
    assert followed.after() == [b'{"a": 1}\n', b'{"b": 2}\n', b"\xff\n"]
    assert followed.restarts == 0 and followed.follower.changed == followed.path.stat().st_mtime


def test_a_torn_line_may_be_taken_back(followed: Followed) -> None:
    """As the engine does where a disk is full."""
    followed.after(b"first\nsec")
    os.truncate(followed.path, len(b"first\n"))
    assert followed.after() == [b"first\n"]
    assert followed.after(add=b"other\n") == [b"first\n", b"other\n"]
    assert followed.restarts == 0


def test_a_file_may_appear_late_and_vanish(followed: Followed) -> None:
    assert followed.after() == [] and followed.follower.problem == "is not there yet" and followed.follower.waits
    assert followed.after(b"first\n") == [b"first\n"] and followed.follower.problem is None
    followed.path.unlink()
    assert followed.after() == [b"first\n"] and followed.follower.problem == "is gone" and followed.follower.waits
    assert followed.after(b"second\n") == [b"second\n"] and followed.follower.problem is None


@pytest.mark.parametrize("content", [b"", b"x\n", b"new\nline\n", b"other\nand many more lines than there were\n"])
def test_a_file_that_is_written_anew_is_read_from_its_beginning(followed: Followed, content: bytes) -> None:
    followed.after(b"first\nsecond\n")
    assert followed.after(content) == content.splitlines(keepends=True)
    assert followed.restarts == 1


def test_a_file_that_is_replaced_is_read_from_its_beginning(followed: Followed) -> None:
    followed.after(b"first\n")
    new = followed.path.with_name("new")
    new.write_bytes(b"First\nsecond\n")
    new.replace(followed.path)
    assert followed.after() == [b"First\n", b"second\n"] and followed.restarts == 1


def test_the_same_lines_in_another_file_are_the_same_report(followed: Followed) -> None:
    followed.after(b"first\n")
    followed.path.unlink()
    assert followed.after(b"first\nsecond\n") == [b"first\n", b"second\n"] and followed.restarts == 0


def test_what_cannot_be_read_is_said(followed: Followed, tmp_path: Path) -> None:
    followed.path.mkdir()
    followed.follower.look()
    assert followed.follower.problem == "cannot be read: is not a file" and not followed.follower.waits
    os.mkfifo(tmp_path / "pipe")  # opening it would wait
    inside = [Followed(tmp_path / "pipe"), Followed(tmp_path / "pipe" / "report.jsonl")]
    for one in inside:
        one.follower.look()
    problems = [one.follower.problem for one in inside]
    assert problems == ["cannot be read: is not a file", "cannot be read: Not a directory"]


# -- what its lines say -----------------------------------------------------------------------------------------------


def test_loads_are_predicted_after_a_move_until_they_are_measured() -> None:
    report = report_of(*A_MOVE)
    run = report.run
    assert (run.step, run.steps, run.placement, run.decisions, run.moves) == (3, 6, MOVED, 1, 1)
    assert run.loads == pytest.approx([0.009, 0.009]) and not run.loads_are_measured
    assert run.imbalance == pytest.approx(0.0) and list(run.speeds) == [1000.0, 2000.0, 3000.0]
    for line in lines_of(profile(4, MOVED, (0.001, 0.001, 0.001, 0.001))).splitlines():
        report.add(line)
    assert run.loads == pytest.approx([0.009, 0.003]) and run.loads_are_measured
    assert run.imbalance == pytest.approx(1.0)
    assert run.measurement is not None and run.measurement.bubble_ratio == pytest.approx(1 - 4 * 0.012 / 2 / 0.06)


def test_losses_are_those_of_the_latest_records() -> None:
    validation = {"kind": "validation", "step": 3, "validation_loss": 2.9}
    report = report_of(step(3, loss=2.75, auxiliary_loss=0.5), validation)
    assert any(line.startswith("loss     2.750 + auxiliary 0.500, validation 2.900") for line in shown(report, 80))


def test_a_profile_says_where_layers_are_if_nothing_else_does() -> None:
    run = report_of(profile(2, EVEN)).run
    assert run.placement == EVEN and run.loads_are_measured and run.steps is None
    late = report_of(decision(3, EVEN, MOVED), profile(2, EVEN), profile(4, EVEN)).run  # decided while a batch trained
    assert late.placement == EVEN and late.step == 4


def test_stages_of_a_v_have_two_chunks() -> None:
    run = report_of(profile(2, Placement.v([0, 1, 2, 3, 4]))).run
    assert run.loads == pytest.approx([0.012, 0.006])


def test_a_repacking_changes_the_number_of_stages() -> None:
    one = Placement.chain([0, 4])
    repack = RepackReport(
        **{"step": 5, "reason": "interval", "old_placement": EVEN, "new_placement": one, "released_ranks": (1,)},
        **{"recalled_ranks": (), "iteration_seconds_before": None, "iteration_seconds_after": None},
        **{"layers_moved": 2, "bytes_moved": 2**20, "decide_seconds": 0.0, "migrate_seconds": 0.1},
        **{"world_seconds": 0.2, "verdict": "one stage is as fast"},
    ).as_record()
    report = report_of(*A_MOVE, repack)
    assert report.run.placement == one and report.run.loads == pytest.approx([0.018])
    expected = "step 5: [0, 2, 4] -> [0, 4], interval: re-packed, ranks [1] released, 2 layers, 1.0 MiB in 300 ms"
    assert report.history[-1] == expected
    kept = report_of({**repack, "new_partition": [0, 2, 4], "verdict": "no"})
    assert kept.history == [] and kept.run.decision == "step 5, interval: kept: no"


def test_another_run_in_the_same_file_begins_anew() -> None:
    report = report_of(*A_MOVE, START, step(1, loss=7.0))
    assert list(report.run.losses) == [7.0] and report.run.placement is None
    back = report_of(step(8), profile(8, EVEN), decision(3, EVEN, EVEN))  # the engine appends to a report
    assert back.run.step == 3 and not back.run.losses and back.run.measurement is None
    assert back.history == ["step 3 follows step 8: another run, or an earlier checkpoint"]


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"\xff\xfe", b"[1]", b"3", b"null", b"{}", b'{"kind": ["step"]}', b'{"kind": "step"}', b""),
        *(b'{"kind": "step", "step": "x"}', b'{"kind": "end"}', b'{"kind": "start", "stop_at": null}'),
        *(
            b'{"kind": "rebalance", "step": 3, "old_partition": [0, 0], "new_partition": [0, 1]}',
            b'{"kind": "profile"}',
        ),
        lines_of({**profile(2, EVEN), "partition": [0, 2, 5]}),
        lines_of({**profile(2, EVEN), "backward_seconds": [1.0]}),
    ],
)
def test_a_line_that_is_no_record_is_counted_and_changes_nothing_that_is_shown(line: bytes) -> None:
    report = report_of(*A_MOVE)
    before = (report.run.placement, report.run.loads, list(report.run.losses), list(report.history))
    report.add(line)
    assert report.skipped == 1
    assert (report.run.placement, report.run.loads, list(report.run.losses), list(report.history)) == before


def test_kinds_of_a_later_version_are_passed_over() -> None:
    report = report_of(*A_MOVE, {"kind": "something new"}, {"kind": "measured", "step": 4})
    assert report.skipped == 0 and report.run.step == 3


def test_what_a_reason_says_to_a_terminal_is_left_out() -> None:
    report = report_of({**decision(2, EVEN, MOVED), "reason": "\x1b[2Jfrozen\n", "verdict": "a\x07b"})
    assert report.history == [
        "step 2: [0, 2, 4] -> [0, 3, 4], ?[2Jfrozen?: 1 layer, 3.0 MiB in 15.4 ms, "
        "predicted bottleneck 12.0 ms -> 9.0 ms"
    ]
    assert report.run.decision == "step 2, ?[2Jfrozen?: moved: a?b"


def test_durations_have_a_unit() -> None:
    assert [duration(one) for one in (12.34, 1.0, 0.3994, 0.0193, 2e-5, 0.0)] == [
        *("12.3 s", "1.0 s", "399 ms", "19.3 ms", "20 us", "0 us")
    ]


# -- lines ------------------------------------------------------------------------------------------------------------


class Sleeps:
    """Stands in for ``time.sleep``: writes the next part of a report instead, and is interrupted after the last."""

    def __init__(self, *parts: Callable[[], object]) -> None:
        self._parts: Iterator[Callable[[], object]] = iter(parts)
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        part = next(self._parts, None)
        if part is None:
            raise KeyboardInterrupt
        part()


def adds(path: Path, content: bytes) -> Callable[[], object]:
    def add() -> None:
        with path.open("ab") as file:
            file.write(content)

    return add


def test_lines_are_printed_as_the_run_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.jsonl"
    end = lines_of({**END, "partition": [0, 3, 4]})
    parts = [adds(path, lines_of(START)), lambda: None, adds(path, lines_of(*A_MOVE[1:])), adds(path, end)]
    sleeps = Sleeps(*parts)
    monkeypatch.setattr(time, "sleep", sleeps)
    assert watch.main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "report.jsonl is not there yet: waiting",
        "step 0: a run to step 6 in 2 stages begins",
        "step 2: [0, 2, 4] -> [0, 3, 4], interval: 1 layer, 3.0 MiB in 15.4 ms, predicted bottleneck 12.0 ms -> 9.0 ms",
        "step 3/6: loss 3.000, 2,000 tokens/s; partition [0, 3, 4]; predicted loads 9.0 ms, 9.0 ms; imbalance 0.00",
        "step 6: the run has ended: 1,234 tokens/s, training loss 2.500, validation loss 2.400, partition [0, 3, 4]",
    ]
    assert sleeps.seconds == [10.0] * 4


def test_ctrl_c_ends_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "sleep", sleeps := Sleeps())
    assert watch.main([str(tmp_path / "report.jsonl"), "--interval", "3"]) == 130
    assert capsys.readouterr().out == "report.jsonl is not there yet: waiting\n" and sleeps.seconds == [3.0]


def test_a_replaced_and_a_lost_file_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.jsonl"
    path.write_bytes(lines_of(step(4)))
    parts = [path.unlink, lambda: path.write_bytes(b""), adds(path, lines_of(step(1))), lambda: None]
    monkeypatch.setattr(time, "sleep", Sleeps(*parts))
    assert watch.main([str(path), "--plain"]) == 130
    assert capsys.readouterr().out.splitlines() == [
        "step 4: loss 3.000, 4,000 tokens/s",
        "report.jsonl is gone: waiting",
        "report.jsonl has no record yet: waiting",
        "the file was written anew",
        "step 1: loss 3.000, 1,000 tokens/s",
    ]


def test_once_says_how_the_run_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.jsonl"
    path.write_bytes(lines_of(*A_MOVE))
    assert watch.main([str(path), "--once"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl", "--once"], "none.jsonl: is not there yet"),
        (["none.jsonl", "--svg", "view.svg"], "none.jsonl: is not there yet"),
        (["."], ".: cannot be read: is not a file"),
        (["text", "--once"], "text: has no record of a run"),
        (["report.jsonl", "--svg", "no/view.svg"], "--svg no/view.svg: cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no report\n")
    Path("report.jsonl").write_bytes(lines_of(*A_MOVE))
    assert watch.main(arguments) == 2
    assert capsys.readouterr().err == f"ds-dynmo-watch: error: {message}\n"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_an_interval_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        watch.main(["report.jsonl", f"--interval={seconds}"])
    assert f"--interval {seconds}: should be more than 0 seconds" in capsys.readouterr().err


def test_the_flags_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        watch.main(["--help"])
    options = capsys.readouterr().out.partition("options:")[2]
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    section = page.partition("## Watch a run")[2].partition("\n## ")[0]
    assert {"--help", *re.findall(r"^\| `(--\w+)", section, re.MULTILINE)} == {*re.findall(r"--\w+", options)}


# -- bars -------------------------------------------------------------------------------------------------------------


def shown(report: Report, width: int, height: int | None = None, *, ascii_only: bool = False) -> list[str]:
    """Return the lines that the view draws, without colours."""
    console_of = pytest.importorskip("rich.console").Console
    from ds_dynmo.cli.watching.view import View

    console = console_of(width=width, file=StringIO(), color_system=None)
    options = console.options.update_height(height) if height is not None else console.options.copy()
    options.encoding = "ascii" if ascii_only else "utf-8"
    drawn = View(report, "report.jsonl", "written 3 s ago").__rich_console__(console, options)
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
    assert "predicted stage loads…" in shown(report, 22)
    assert "0 0-2 ████████ 9.0 ms" in shown(report, 21)
    assert "0 0-2 ████ 9.0 ms" in shown(report, 17)
    assert "0 ███████ 9.0 ms" in shown(report, 16)  # no room for the numbers of its layers
    assert "0  9.0 ms" in shown(report, 12)  # nor for a bar
    assert "step 2: [0, 2, 4] -> [0…" in shown(report, 24)


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
