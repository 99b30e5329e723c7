"""ds-dynmo-watch: what the lines of a report say, and the lines that are printed where there is no terminal."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.cli import watch
from ds_dynmo.cli.watching.follower import Follower
from ds_dynmo.cli.watching.lines import duration
from ds_dynmo.cli.watching.run_state import ReportState
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


def report_of(*records: dict[str, Any]) -> ReportState:
    report = ReportState()
    for line in lines_of(*records).splitlines():
        report.add(line)
    assert not report.skipped
    return report


EVEN, MOVED = Placement.chain([0, 2, 4]), Placement.chain([0, 3, 4])
A_MOVE = (START, step(1), step(2), decision(2, EVEN, MOVED), profile(2, EVEN), step(3))


# -- what its lines say -----------------------------------------------------------------------------------------------


def test_loads_are_those_of_layers_before_a_move_until_they_are_measured() -> None:
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
        **{"iteration_seconds_before": None, "iteration_seconds_after": None},
        **{"layers_moved": 2, "bytes_moved": 2**20, "decide_seconds": 0.0, "migrate_seconds": 0.1},
        **{"world_seconds": 0.2, "verdict": "one stage is as fast"},
    ).as_record()
    scheduled = {**decision(4, MOVED, MOVED), "schedule": "1f1b, predicted 60.0 ms"}
    report = report_of(*A_MOVE, scheduled, repack)
    assert report.run.schedule == "" and report.run.placement == one and report.run.loads == pytest.approx([0.018])
    expected = "step 5: [0, 2, 4] -> [0, 4], interval: re-packed, ranks [1] released, 2 layers, 1.0 MiB in 300 ms"
    assert report.history[-1] == expected
    kept = report_of(scheduled, {**repack, "new_partition": [0, 2, 4], "verdict": "no"})
    assert kept.history == [] and kept.run.decision == "step 5, interval: kept: no" and kept.run.schedule


def test_another_run_in_the_same_file_begins_anew() -> None:
    report = report_of(*A_MOVE, START, step(1, loss=7.0))
    assert report.run.loss == 7.0 and report.run.placement is None
    back = report_of(step(8), profile(8, EVEN), decision(3, EVEN, EVEN))  # the engine appends to a report
    assert back.run.step == 3 and back.run.loss is None and back.run.measurement is None
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
        *(lines_of({**profile(2, EVEN), "forward_seconds": [one] * 4}) for one in (math.nan, math.inf, -1.0, 1e308)),
        *(lines_of({"kind": "step", "step": one}) for one in (math.inf, math.nan)),
    ],
)
def test_a_line_that_is_no_record_is_counted_and_changes_nothing_that_is_shown(line: bytes) -> None:
    report = report_of(*A_MOVE)
    before = (report.run.placement, report.run.loads, report.run.loss, list(report.history))
    report.add(line)
    assert report.skipped == 1
    assert (report.run.placement, report.run.loads, report.run.loss, list(report.history)) == before


def test_kinds_of_a_later_version_are_passed_over() -> None:
    report = report_of(*A_MOVE, {"kind": "something new"}, {"kind": "measured", "step": 4})
    assert report.skipped == 0 and report.run.step == 3


def test_what_a_reason_says_to_a_terminal_is_left_out() -> None:
    said = {"reason": "\x1b[2Jfrozen\n", "verdict": "a\x07b", "schedule": "\x1b[31mzero_bubble"}
    report = report_of({**decision(2, EVEN, MOVED), **said})
    assert report.history == [
        "step 2: [0, 2, 4] -> [0, 3, 4], ?[2Jfrozen?: 1 layer, 3.0 MiB in 15.4 ms, "
        "predicted bottleneck 12.0 ms -> 9.0 ms"
    ]
    assert report.run.decision == "step 2, ?[2Jfrozen?: moved: a?b" and report.run.schedule == "?[31mzero_bubble"


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
        "step 3/6: loss 3.000, 2,000 tokens/s; partition [0, 3, 4]; loads 9.0 ms, 9.0 ms "
        "(measured in step 2, before layers moved); imbalance 0.00",
        "step 6: the run has ended: 1,234 tokens/s, training loss 2.500, validation loss 2.400, partition [0, 3, 4]",
    ]
    assert sleeps.seconds == [10.0] * 4


def test_ctrl_c_ends_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "sleep", sleeps := Sleeps())
    assert watch.main([str(tmp_path / "report.jsonl"), "--interval", "3"]) == 130
    assert capsys.readouterr().out == "report.jsonl is not there yet: waiting\n" and sleeps.seconds == [3.0]


def test_ctrl_c_while_the_report_is_read_ends_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(file: Follower) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "look", interrupted)
    assert watch.main([str(tmp_path / "report.jsonl")]) == 130


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
