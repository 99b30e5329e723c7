"""Documents of text: files, each one document, and JSON lines, each line one document."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from ds_dynmo.errors import ConfigError
from ds_dynmo.files.texts import read_errors_as_config_error

__all__ = ["JSON_LINES", "check_is_text", "is_text", "read_documents"]

JSON_LINES = (".jsonl", ".ndjson")
BEGINNING = 2**16  # bytes of a file by which it is known
REMEDY = "decompress it, write a table such as Parquet as JSON lines, write another encoding as UTF-8, or leave it out"
SURROGATE = re.compile("[\ud800-\udfff]")


def check_is_text(file: Path, hint: str = "") -> None:
    """Refuse a file that does not begin as UTF-8 text: compressed, a table in columns, in another encoding.

    Args:
        hint: what else can be done about it, for the message.

    Raises:
        ConfigError: naming the file and the byte.
    """
    with read_errors_as_config_error(file), file.open("rb") as content:
        beginning = content.read(BEGINNING)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning, final=len(beginning) < BEGINNING)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is no UTF-8 text: {error}: {REMEDY}{hint}") from error
    if 0 in beginning:
        raise ConfigError(f"{file}: is no UTF-8 text: byte {beginning.index(0)} is 0: {REMEDY}{hint}")


def read_documents(files: list[Path], field: str) -> Iterator[str]:
    """Read documents in their order, one line or one file at a time.

    Args:
        field: of a JSON line, where its text is.

    Raises:
        ConfigError: naming the file, the line or byte, and what is wrong there.
    """
    for file in files:
        try:
            with read_errors_as_config_error(file):
                if file.suffix.lower() in JSON_LINES:
                    yield from _lines(file, field)
                else:
                    yield file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is no UTF-8 text: {error}: {REMEDY}") from error


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is a text. One with half of a surrogate pair, which JSON can hold, is none."""
    return isinstance(value, str) and SURROGATE.search(value) is None


def _lines(file: Path, field: str) -> Iterator[str]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # numbers with thousands of digits, and nesting, have limits
                raise ConfigError(f"{file}, line {number}: is no JSON: {error}") from error
            text = row.get(field) if isinstance(row, dict) else None
            if not is_text(text):
                raise ConfigError(f'{file}, line {number}: should be an object with a text as "{field}"')
            yield text
