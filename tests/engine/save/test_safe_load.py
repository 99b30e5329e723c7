"""Which objects a checkpoint's file may hold."""

from __future__ import annotations

import argparse
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch.serialization import get_safe_globals, safe_globals

from ds_dynmo.engine.save.safe_load import safe_load
from ds_dynmo.engine.save.saved_files import MappedFile
from ds_dynmo.errors import CheckpointError


class Reduced:
    """An object that is pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_files_that_deepspeed_writes_are_loaded(tmp_path: Path) -> None:
    torch.save({"stage": ZeroStageEnum.optimizer_states, "scaler": LossScaler(1.0)}, tmp_path / "file")
    assert safe_load(str(tmp_path / "file"))["stage"] is ZeroStageEnum.optimizer_states
    torch.save(Reduced(getattr, ZeroStageEnum, "optimizer_states"), tmp_path / "file")  # as Python 3.11.2 writes it
    assert safe_load(str(tmp_path / "file")) is ZeroStageEnum.optimizer_states


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_classes_that_the_user_allowed_stay_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The user allows one that we allow too, before a load or while one runs, as that of a save may in its thread."""
    torch.save(argparse.Namespace(rate=0.5), tmp_path / "file")
    load = torch.load
    with ExitStack() as user:

        def load_meanwhile(*args: Any, **kwargs: Any) -> Any:
            user.enter_context(safe_globals([argparse.Namespace]))
            return load(*args, **kwargs)

        if when == "before":
            user.enter_context(safe_globals([argparse.Namespace]))
        else:
            monkeypatch.setattr(torch, "load", load_meanwhile)
        assert safe_load(str(tmp_path / "file")) == argparse.Namespace(rate=0.5)
        assert argparse.Namespace in get_safe_globals()


def test_loads_leave_no_class_allowed(tmp_path: Path) -> None:
    torch.save(argparse.Namespace(), tmp_path / "file")
    before = {*get_safe_globals()}
    safe_load(str(tmp_path / "file"))
    assert {*get_safe_globals()} == before


def test_a_load_does_not_end_the_permission_of_another(tmp_path: Path) -> None:
    torch.save({"scaler": LossScaler(1.0), "stage": ZeroStageEnum.weights}, tmp_path / "file")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: safe_load(str(tmp_path / "file"))["stage"], range(200)))
    assert found == [ZeroStageEnum.weights] * 200


@pytest.mark.parametrize("mapped", [False, True])
def test_a_flipped_bit_is_named(tmp_path: Path, mapped: bool) -> None:
    path, values = tmp_path / "file", torch.arange(100.0)
    torch.save({"state": [{"step": 3, "exp_avg": values}, {"exp_avg": values * 2}], "last": values[:7]}, path)
    raw = path.read_bytes()
    assert torch.equal(safe_load(str(path), mapped=mapped)["state"][1]["exp_avg"], values * 2)
    flipped = bytearray(raw)
    flipped[raw.index((values * 2).numpy().tobytes()) + 123] ^= 4
    path.write_bytes(flipped)
    with pytest.raises(CheckpointError, match="file: state/1/exp_avg: other values than were written"):
        safe_load(str(path), mapped=mapped)
    assert safe_load(str(path), mapped=mapped, checks_values=False)["state"][0]["step"] == 3


def test_only_what_is_taken_is_compared_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sparse = tmp_path / "file", torch.eye(50).to_sparse_coo()
    state = {3: {"exp_avg": torch.arange(100.0)}, 4: {"exp_avg": torch.arange(100.0) * 2}}
    torch.save({"optimizer": {"state": state}, "kept": argparse.Namespace(mask=sparse), "module": None}, path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(state[4]["exp_avg"].numpy().tobytes()) + 123] ^= 4
    path.write_bytes(raw)
    compared = []
    monkeypatch.setattr(
        zlib, "crc32", lambda values, crc32=zlib.crc32: [crc32(values), compared.append(len(values))][0]
    )
    file = MappedFile(str(path))
    found = file.content["optimizer"]["state"]
    assert not compared
    assert torch.equal(file.take(found[3])["exp_avg"], state[3]["exp_avg"]) and file.take({"again": found[3]})
    assert compared == [400]
    with pytest.raises(CheckpointError, match="file: optimizer/state/4/exp_avg: other values than were written"):
        file.take(found)
    assert torch.equal(file.take([file.content["kept"]])[0].mask.to_dense(), torch.eye(50))
    assert compared == [400, 400, 800, 200]


def test_a_file_that_was_written_without_checksums_is_loaded(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.ones(3), tmp_path / "file")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(safe_load(str(tmp_path / "file")), torch.ones(3))


@pytest.mark.parametrize(
    "content",
    [
        Reduced(print, "run"),
        Reduced(getattr, ZeroStageEnum, "__init__"),
        Reduced(getattr, LossScaler, "__init__"),
        Reduced(getattr, Path, "unlink"),
    ],
)
def test_files_that_could_run_code_are_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "file")
    with pytest.raises(CheckpointError, match="file"):
        safe_load(str(tmp_path / "file"))
