"""Cache results in a folder, for all ranks of a machine and for later runs.

Cached are tokens of text, and statistics and digests of large files, so that these are not read at every start.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ds_dynmo.data.config import TokenType
from ds_dynmo.data.files import read_tokens, write_tokens
from ds_dynmo.data.tokens import Ids, IdStatistics, LogProgress, Tokens, scan_ids, sometimes
from ds_dynmo.errors import ConfigError

__all__ = ["LARGE", "cached_arrays", "cached_id_statistics", "cached_tokens", "default_folder", "identity_of"]

VERSION = 2  # another one makes all anew
LARGE = 2**24  # ids or bytes; reading fewer takes no longer than reading the cache
ARRAYS_FILE = "found.npz"


def default_folder() -> Path:
    """Return the folder ``ds_dynmo/tokens`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_dynmo" / "tokens"


def identity_of(files: Iterable[Path]) -> list[list[Any]]:
    """Describe files so that a change of one of them is seen: path, size, time of its last change."""
    described = []
    for file in files:
        status = file.stat()
        described.append([str(file.resolve()), status.st_size, status.st_mtime_ns])
    return described


def cached_tokens(
    folder: Path,
    key: Any,
    documents: Callable[[], Iterable[Ids]],
    *,
    name: str,
    dtype: TokenType,
    log_progress: LogProgress,
) -> Tokens:
    """Return the tokens of ``documents`` from the folder, and write them there first if it lacks them.

    One process on a machine writes, others wait for it. One that is killed leaves nothing that is read. What is there
    is read from a folder that nobody may write to, too.

    Args:
        key: JSON of all that the tokens depend on.
        name: of the text, for messages.

    Raises:
        ConfigError: the folder cannot be written to, or a document cannot be read.
    """
    try:
        entry = _cache_entry(
            folder,
            [VERSION, key, dtype],
            lambda new: write_tokens(
                new / "text.bin", _counted(documents(), name, sometimes(log_progress)), dtype=dtype
            ),
        )
    except OSError as error:
        raise ConfigError(f"{folder}: cannot keep what was tokenized: {error}") from error
    return replace(read_tokens(entry / "text.bin"), name=name)


def cached_arrays(
    folder: Path, files: Iterable[Path], key: Any, compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the arrays that ``compute`` makes of ``files``, from the cache if the files have not changed since.

    One process on a machine computes them, others wait for it. Each computes them by itself where the cache cannot be
    written.

    Args:
        key: JSON of all else that it depends on.
        compute: returns arrays, or what becomes one.
    """
    computed: dict[str, Any] | None = None

    def write(new: Path) -> None:
        nonlocal computed
        computed = compute()
        np.savez(new / ARRAYS_FILE, **computed)

    try:
        with np.load(_cache_entry(folder, [VERSION, key, identity_of(files)], write) / ARRAYS_FILE) as arrays:
            return dict(arrays)
    except (OSError, EOFError, ValueError, BadZipFile):  # no folder to write to, or a file in it was damaged
        return compute() if computed is None else computed


def cached_id_statistics(folder: Path, tokens: Tokens, log_progress: LogProgress) -> IdStatistics:
    """Return what all ids of a text amount to. Of a large file it is read once, as long as the file is not changed.

    Its ids at equal distances are read each time: a file can be changed and keep its size and time.
    """
    if tokens.file is None or len(tokens.ids) <= LARGE:
        return scan_ids(tokens, log_progress)

    def compute() -> dict[str, Any]:
        statistics = scan_ids(tokens, log_progress)
        starts = {} if statistics.starts is None else {"starts": statistics.starts}
        return {"least": statistics.least, "most": statistics.most, **starts}

    key = ["ids", str(tokens.ids.dtype), tokens.end_of_document, tokens.sample]
    arrays = cached_arrays(folder, [tokens.file], key, compute)
    return IdStatistics(int(arrays["least"]), int(arrays["most"]), arrays.get("starts"))


def _cache_entry(folder: Path, key: Any, write: Callable[[Path], None]) -> Path:
    """Return the folder of ``key`` in ``folder``. One process on a machine writes it, others wait for it.

    It gets its name when it is complete, so nothing is read of one whose writing was interrupted.

    Raises:
        OSError: the folder cannot be written to. One that is there can be read where nobody may write.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    entry, new = folder / digest, folder / f"{digest}.new"
    if not entry.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{digest}.lock"):
            if not entry.is_dir():
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
                try:
                    write(new)
                    new.rename(entry)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
    return entry


def _counted(documents: Iterable[Ids], name: str, log_progress: LogProgress) -> Iterator[Ids]:
    tokens = 0
    for number, document in enumerate(documents, 1):
        tokens += len(document)
        yield document
        log_progress(f"{name}: tokenized {number:,} documents, {tokens:,} tokens")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process in at a time. The system unlocks the file where a process is killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
