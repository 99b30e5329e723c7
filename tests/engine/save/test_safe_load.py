"""Which objects a checkpoint's file may hold."""

from __future__ import annotations

import argparse
import collections
import enum
import pathlib
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch.serialization import get_safe_globals, safe_globals

from ds_dynmo.engine.save.pickled_names import Name
from ds_dynmo.engine.save.safe_load import names_to_allow, safe_load
from ds_dynmo.engine.save.saved_files import MappedFile
from ds_dynmo.errors import CheckpointError
from tests.support.checkpoints import Evil


class Marked(numpy.ndarray[Any, Any]):
    """A subclass of numpy's arrays."""


class Reduced:
    """An object that is pickled as a call."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.call = function, arguments, *([] if state is None else [state])

    def __reduce__(self) -> Any:
        return self.call


def test_files_that_deepspeed_writes_are_loaded(tmp_path: Path) -> None:
    torch.save({"stage": ZeroStageEnum.optimizer_states, "scaler": LossScaler(1.0)}, tmp_path / "file")
    assert safe_load(str(tmp_path / "file"))["stage"] is ZeroStageEnum.optimizer_states
    torch.save(Reduced(getattr, ZeroStageEnum, "optimizer_states"), tmp_path / "file")  # as Python 3.11.2 writes it
    assert safe_load(str(tmp_path / "file")) is ZeroStageEnum.optimizer_states


NUMPY = [
    numpy.random.get_state(),
    *(kind(1) for kind in (numpy.float64, numpy.float32, numpy.int64, numpy.bool_, numpy.str_)),
    *(numpy.dtype("f2"), numpy.dtype(">i4"), numpy.float32, numpy.bool_, numpy.array(3.0), numpy.zeros((0, 3))),
    *(numpy.arange(6).reshape(2, 3), numpy.asfortranarray(numpy.eye(3)[:2]), numpy.array(["long", "s"])),
    *(numpy.ones(2, numpy.float16), numpy.array([1j]), numpy.array([b"ab", b"c"]), numpy.arange(3, dtype=">f8")),
    {"args": argparse.Namespace(decay=numpy.float32(0.1), empty=b"", of_bytes=b"ab")},
]


@pytest.mark.parametrize("modules", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_numbers_of_numpy_are_loaded(tmp_path: Path, modules: str) -> None:
    """Of numpy 1 and of numpy 2, which name their functions otherwise."""
    torch.save(NUMPY, tmp_path / "file")
    present = numpy.empty(0).__reduce__()[0].__module__.encode()
    with zipfile.ZipFile(tmp_path / "file") as archive, zipfile.ZipFile(tmp_path / "other", "w") as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name).replace(b"c" + present, b"c" + modules.encode()))
    loaded = safe_load(str(tmp_path / "other"), checks_values=False)
    for written, read in zip(NUMPY, loaded, strict=True):
        assert type(read) is type(written)
        numpy.testing.assert_equal(read, written)
        assert getattr(read, "dtype", None) == getattr(written, "dtype", None) or written.dtype.byteorder == ">"
    numpy.random.RandomState().set_state(loaded[0])
    assert not names_to_allow(str(tmp_path / "other"))


def hidden_objects() -> numpy.dtype[Any]:
    """Return a dtype with a reference to an object, by a state of which numpy believes that it has none."""
    dtype = numpy.dtype("V8", False, True)  # type: ignore[call-overload]
    dtype.__setstate__((3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0))
    assert not dtype.hasobject
    return dtype  # type: ignore[no-any-return]


OF_BYTES = {"a": (numpy.dtype("f8"), 0)}
UNSAFE: list[tuple[Any, str]] = [
    (numpy.array([1, None]), "numpy's 'O8' .allowed are bool, .*; make an array of objects a list"),
    (numpy.zeros(1, [("a", "f4")]), "an array or a dtype of numpy's 'V4'"),
    (numpy.zeros(1, hidden_objects()), "an array or a dtype of numpy's 'V8'"),
    (Reduced(numpy.ndarray, (10,)), "a call of numpy.ndarray"),
    (Reduced(numpy.float64(0).__reduce__()[0], 3), "a scalar that numpy does not write"),
    (numpy.zeros(1).view(Marked), "Marked .make it a numpy.ndarray"),
    (collections.deque([1]), "a collections.deque .make it a list"),
    ([collections.deque([1]), collections.defaultdict(int, a=1)], "make it a dict.; a collections.deque"),
    (Reduced(eval, "1"), "what could run code: builtins.eval"),
]
STATES_OF_DTYPES: list[Any] = [  # that numpy does not write
    (3, "<", (numpy.dtype("f4"), (2,)), None, None, -1, -1, 0),
    (3, "<", None, ("a",), OF_BYTES, -1, -1, 0),
]
CALLS = [
    *(Reduced(print, "run"), Reduced(getattr, ZeroStageEnum, "__init__")),
    *(Reduced(getattr, LossScaler, "__init__"), Reduced(getattr, Path, "unlink")),
]


def test_what_cannot_be_loaded_safely_is_named_at_once(tmp_path: Path) -> None:
    for value, message in UNSAFE:
        torch.save(value, tmp_path / "file")
        for read in (safe_load, names_to_allow):
            with pytest.raises(CheckpointError, match=f"it holds .*{message}.*, which cannot be loaded safely"):
                pytest.fail(f"{message}: {read(str(tmp_path / 'file'))}")


def test_the_state_of_a_dtype_is_numpys_and_calls_are_refused(tmp_path: Path) -> None:
    states = [Reduced(numpy.dtype, "f8", False, True, state=state) for state in STATES_OF_DTYPES]
    for message, values in (("a dtype that numpy does not write: float64", states), ("file", CALLS)):
        for value in values:
            torch.save(value, tmp_path / "file")
            with pytest.raises(CheckpointError, match=message):
                pytest.fail(f"{value.call}: {safe_load(str(tmp_path / 'file'))}")


def test_a_file_in_torchs_old_format_runs_no_code(tmp_path: Path) -> None:
    """Its names are not read before: torch refuses it."""
    torch.save(Evil(str(tmp_path)), tmp_path / "file", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"could run code: .*mkdir|posix is blocked"):
        safe_load(str(tmp_path / "file"))
    assert not (tmp_path / "evil").exists()
    torch.save({"rate": numpy.float64(1.5)}, tmp_path / "file", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="it holds what could run code"):
        safe_load(str(tmp_path / "file"))


class Kind(enum.Enum):
    CAUSAL = 1


class Arguments:
    class Kind(enum.Enum):
        MASKED = 2


def test_all_names_that_are_not_allowed_are_named_at_once_with_the_line_that_allows_them(tmp_path: Path) -> None:
    state = {"kind": Kind.CAUSAL, "inner": Arguments.Kind.MASKED, "path": pathlib.PurePosixPath("a"), "rate": numpy.pi}
    torch.save(state, tmp_path / "file")
    module = __name__
    assert names_to_allow(str(tmp_path / "file")) == {
        *(Name(module, "Kind"), Name(module, "Arguments"), Name(module, "Arguments.Kind")),
        Name("pathlib", "PurePosixPath"),
    }
    with pytest.raises(CheckpointError) as error:
        safe_load(str(tmp_path / "file"))
    line = str(error.value).partition("before you load it: ")[2]
    assert line == (
        f"from pathlib import PurePosixPath; from {module} import Arguments; from {module} import Kind; "
        "torch.serialization.add_safe_globals([PurePosixPath, Arguments, Arguments.Kind, Kind])"
    )
    allowed = get_safe_globals()
    try:
        exec(line, {"torch": torch})
        assert not names_to_allow(str(tmp_path / "file"))
        assert safe_load(str(tmp_path / "file")) == state
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def test_classes_that_the_user_allowed_stay_allowed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user allows one that we allow too, before a load or while one runs, as that of a save may in its thread."""
    file, value = str(tmp_path / "file"), argparse.Namespace(rate=0.5)
    torch.save(value, file)
    allowed, load = {*get_safe_globals()}, torch.load
    assert safe_load(file) == value and {*get_safe_globals()} == allowed
    with safe_globals([argparse.Namespace]):
        assert safe_load(file) == value
        assert argparse.Namespace in get_safe_globals()
    with ExitStack() as user:

        def load_meanwhile(*args: Any, **kwargs: Any) -> Any:
            user.enter_context(safe_globals([argparse.Namespace]))
            return load(*args, **kwargs)

        monkeypatch.setattr(torch, "load", load_meanwhile)
        assert safe_load(file) == value
        assert argparse.Namespace in get_safe_globals()


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
