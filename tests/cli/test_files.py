"""Files are written whole or not at all, and errors name them."""

from __future__ import annotations

import errno
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ds_dynmo.cli.command_line import write_json
from ds_dynmo.cli.training.paths import check_writable
from ds_dynmo.engine.decide.report_files import guard_monitors
from ds_dynmo.errors import ConfigError
from ds_dynmo.files import append_line, atomic_write, write_text
from tests.support.full_disk import files_of_at_most


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "a" * 9)
    with files_of_at_most(15), pytest.raises(OSError, match=f"File too large: '{path}'"):  # five more bytes fit
        append_line(path, "b" * 9)
    append_line(path, "é")
    assert path.read_bytes() == b"aaaaaaaaa\n\xc3\xa9\n"


def write_by_python(path: Path) -> None:
    path.write_bytes(bytes(400_000))


def write_by_torch(path: Path) -> None:
    torch.save({"weight": torch.zeros(100_000)}, path)


def write_by_safetensors(path: Path) -> None:
    save_file({"weight": torch.zeros(100_000)}, path)


def write_a_folder(path: Path) -> None:
    path.mkdir()
    write_by_torch(path / "weights.pt")


@pytest.mark.parametrize("write", [write_by_python, write_by_torch, write_by_safetensors, write_a_folder])
def test_a_failed_write_names_the_path_and_leaves_what_was_there(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    if write is not write_a_folder:
        path.write_text("as it was")
    with pytest.raises(OSError) as raised, files_of_at_most(1000), atomic_write(path) as new:
        write(new)
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(path)
    assert os.listdir(tmp_path) == ([] if write is write_a_folder else ["file"])
    with atomic_write(path) as new:
        write(new)
    assert path.is_dir() == (write is write_a_folder) and os.listdir(tmp_path) == ["file"]


def test_errors_that_are_not_of_writing_pass_as_they_are(tmp_path: Path) -> None:
    for error in (RuntimeError("a kernel failed"), KeyError("weight")):
        with pytest.raises(type(error), match=str(error.args[0])), atomic_write(tmp_path / "file"):
            raise error
    assert os.listdir(tmp_path) == []


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    write_text(os.devnull, "text")
    assert Path(os.devnull).is_char_device()


def test_a_line_goes_through_a_pipe() -> None:
    reading, writing = os.pipe()
    append_line(Path(f"/dev/fd/{writing}"), "a")
    assert os.read(reading, 9) == b"a\n"
    os.close(reading)
    os.close(writing)


def test_missing_folders_of_what_options_name_are_made_or_named(tmp_path: Path) -> None:
    """Also that of an export, which is written hours later, is found to be none that can be made."""
    new = tmp_path / "new"
    arguments = Namespace(save=new / "saved", export=new / "exported", record=new / "of_records" / "record.jsonl")
    check_writable(arguments, new / "of_reports" / "report.jsonl")
    write_json(new / "of_figures" / "figures.json", {"a": 1})
    assert sorted(path.name for path in new.iterdir()) == ["of_figures", "of_records", "of_reports"]
    file = new / "of_figures" / "figures.json"
    for option in ("save", "export", "record"):
        inside = Namespace(**{**vars(arguments), option: file / "inside" / option})
        with pytest.raises(ConfigError, match=f"^--{option} {file}/inside/{option}: cannot be written: "):
            check_writable(inside, None)
    with pytest.raises(ConfigError, match=f"^--json {file}/figures.json: cannot be written: "):
        write_json(file / "figures.json", {})


def test_failing_monitors_are_named_once_and_the_others_continue() -> None:
    written: list[Any] = []
    warnings: list[str] = []

    def fail(events: Any) -> None:
        written.append(("tried", events))
        raise ConnectionError("no route")

    failing = SimpleNamespace(write_events=fail)
    working = SimpleNamespace(write_events=lambda events: written.append(("written", events)))
    master = SimpleNamespace(tb_monitor=None, wandb_monitor=failing, csv_monitor=working, enabled=True)
    guard_monitors(master, warnings.append)
    for events in (1, 2):
        for monitor in (master.wandb_monitor, master.csv_monitor):
            monitor.write_events(events)
    assert written == [("tried", 1), ("written", 1), ("tried", 2), ("written", 2)]
    (warning,) = warnings
    assert warning.startswith("wandb_monitor: was not written: no route.")
