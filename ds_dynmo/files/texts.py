"""List the files of a text, for token ids and for bytes alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ds_dynmo.errors import ConfigError, reason_of

__all__ = ["read_errors_as_config_error", "text_files"]


def text_files(path: Path) -> list[Path]:
    """List a file, or the regular files at any depth of a folder in the order of their names.

    Raises:
        ConfigError: there is no such path, no file in it, or something in it that would be left out: a folder that
            cannot be read, a link to a folder or to nothing.
    """
    with read_errors_as_config_error(path):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        if not path.is_dir():
            if not path.is_file():
                raise ConfigError(f"{path}: is neither a regular file nor a folder")
            return [path]
        files = []
        for folder, folders, names in os.walk(path, onerror=_raise):
            for entry in (Path(folder, name) for name in (*folders, *names)):
                if entry.is_symlink() and not entry.is_file():
                    raise ConfigError(f"{entry}: is a link to a folder or to nothing, which is not followed")
                if entry.is_file():
                    files.append(entry)
    if not files:
        raise ConfigError(f"{path}: there is no file in it")
    return sorted(files)


@contextmanager
def read_errors_as_config_error(path: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the file or folder, ``path`` if the system names none."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: cannot be read: {reason_of(error)}") from error


def _raise(error: OSError) -> NoReturn:
    raise error
