"""Text that was tokenized once is kept in a folder, for all ranks of a machine and for later runs."""

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

from ds_dynmo.data.config import TokenType
from ds_dynmo.data.files import read_tokens, write_tokens
from ds_dynmo.data.tokens import Ids, Say, Tokens, sometimes
from ds_dynmo.errors import ConfigError

__all__ = ["cached", "default_folder", "identity_of"]

VERSION = 2  # another one makes all anew


def default_folder() -> Path:
    """Give the folder ``ds_dynmo/tokens`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_dynmo" / "tokens"


def identity_of(files: Iterable[Path]) -> list[list[Any]]:
    """Describe files so that a change of one of them is seen: path, size, time of its last change."""
    described = []
    for file in files:
        found = file.stat()
        described.append([str(file.resolve()), found.st_size, found.st_mtime_ns])
    return described


def cached(
    folder: Path,
    key: Any,
    documents: Callable[[], Iterable[Ids]],
    *,
    name: str,
    dtype: TokenType,
    say: Say,
) -> Tokens:
    """Give the tokens of ``documents`` from the folder; write them there first if they are not in it.

    One process on a machine writes, others wait for it. One that is killed leaves nothing that is read. What is there
    is read from a folder that nobody may write to, too.

    Args:
        key: JSON of all that the tokens depend on.
        name: of the text, for messages.

    Raises:
        ConfigError: the folder cannot be written to, or a document cannot be read.
    """
    digest = hashlib.sha256(json.dumps([VERSION, key, dtype], sort_keys=True).encode()).hexdigest()[:32]
    kept = folder / digest
    try:
        if not kept.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder / f"{digest}.lock"):
                if not kept.is_dir():
                    _write(kept, _counted(documents(), name, sometimes(say)), dtype)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot keep what was tokenized: {error}") from error
    return replace(read_tokens(kept / "text.bin"), name=name)


def _write(kept: Path, documents: Iterable[Ids], dtype: TokenType) -> None:
    """Write the folder ``kept``, which gets its name when it is complete."""
    new = kept.with_name(f"{kept.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        write_tokens(new / "text.bin", documents, dtype=dtype)
        new.rename(kept)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _counted(documents: Iterable[Ids], name: str, say: Say) -> Iterator[Ids]:
    tokens = 0
    for number, document in enumerate(documents, 1):
        tokens += len(document)
        yield document
        say(f"{name}: tokenized {number:,} documents, {tokens:,} tokens")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process in at a time. The system unlocks the file where a process is killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
