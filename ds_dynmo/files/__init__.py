"""Write files and folders atomically: after an error the old content is there. Errors name the path and the reason."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ds_dynmo.errors import reason_of
from ds_dynmo.files.claims import claim_folder

__all__ = ["append_line", "atomic_write", "claim_folder", "overwrite", "path_in_errors", "why_unreadable", "write_text"]

_PROBE_BYTES = 2**20


@contextmanager
def path_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name ``path`` in the error if writing it fails inside. torch and safetensors raise errors that do not.

    Raises:
        OSError: with the system's errno and ``path``; errors that are not of writing pass as they are.
    """
    try:
        yield
    except Exception as error:
        number = _errno(error, Path(path))
        if number is None or getattr(error, "filename", None) is not None:
            raise
        raise OSError(number, os.strerror(number), os.fspath(path)) from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside ``path``, and rename it to ``path`` when the body ends; remove it if the body fails.

    The body writes a file or makes a folder there. A device or a pipe is written as it is. An empty folder is replaced.

    Raises:
        OSError: as :func:`path_in_errors`.
    """
    path = Path(path)
    with path_in_errors(path):
        if path.exists() and not (path.is_file() or path.is_dir()):
            yield path
            return
        target = Path(os.path.realpath(path))
        new = target.with_name(f".{target.name}.{os.getpid()}.new")
        try:
            yield new
            new.replace(target)
        finally:
            _remove(new)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to a file in UTF-8, or leave what was there.

    Raises:
        OSError: as :func:`path_in_errors`.
    """
    with atomic_write(path) as new:
        new.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Append a whole line, or none of it. A pipe or a device may get a part.

    Raises:
        OSError: as :func:`path_in_errors`.
    """
    with path_in_errors(path), path.open("ab", buffering=0) as file:
        _write_or_restore(file, file.seek(0, os.SEEK_END) if file.seekable() else 0, line + "\n", b"")


def overwrite(path: Path, begin: int, text: str) -> None:
    """Replace what a file holds from byte ``begin`` on, or leave it as it was.

    Raises:
        OSError: as :func:`path_in_errors`.
    """
    with path_in_errors(path), path.open("rb+", buffering=0) as file:
        file.seek(begin)
        before = file.read()
        file.seek(begin)
        _write_or_restore(file, begin, text, before)


def why_unreadable(error: Exception) -> str:
    """Say in one line why a file could not be read. Python's text for one that ends too early is "Ran out of input"."""
    text = "it is empty, or ends too early" if isinstance(error, EOFError) else " ".join(reason_of(error).split())
    return f"{type(error).__name__}: {text}"


def _write_or_restore(file: io.FileIO, begin: int, text: str, before: bytes) -> None:
    """Write ``text`` at the present place; if that fails, let the file end with ``before`` from byte ``begin`` on."""
    left = text.encode()
    try:
        while left:
            left = left[file.write(left) or 0 :]
    except OSError:
        with suppress(OSError):  # a device
            file.truncate(begin)
            file.seek(begin)
            file.write(before)  # there was room for it
        raise


def _errno(error: Exception, path: Path) -> int | None:
    """Find the system's reason for a failed write; None: the error is not of writing."""
    if isinstance(error, OSError):
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors
        return int(found[1])
    if not isinstance(error, RuntimeError):
        return None
    try:  # torch does not say why; the disk will, while the part that was written is on it
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as reason:
        return reason.errno
    return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
