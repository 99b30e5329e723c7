"""Rows of text files, JSON lines, Parquet, and folders that ``Dataset.save_to_disk`` wrote, one at a time."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ds_dynmo.config.withdrawn import refusal
from ds_dynmo.errors import ConfigError
from ds_dynmo.files.texts import read_errors_as_config_error, text_files

__all__ = ["SourceRow", "check_text", "datasets", "has_split", "holds_rows", "is_dataset", "read_rows", "source_files"]

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
OTHER_TABLES = (".json", ".csv", ".tsv")
TOKEN_FILES = (".bin", ".idx")
BEGINNING = 2**16  # bytes of a file by which it is known
COMPRESSED = {  # by the first bytes
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
}
REMEDY = "write another table as JSON lines or Parquet, write another encoding as UTF-8, or leave it out"
TOGETHER = 1000  # rows
SEVERAL = "dataset_dict.json"  # in a folder with a dataset for each split


class SourceRow(NamedTuple):
    """What may become a document.

    Attributes:
        where: names its file and its place in there, for messages.
        values: by column.
    """

    where: str
    values: dict[str, Any]


def datasets(path: Path) -> Any:
    """Import the library.

    Raises:
        ConfigError: the package is missing, which ``path`` needs.
    """
    try:
        import datasets as library
    except ImportError as error:
        raise ConfigError(f'{path}: needs the extra "data": pip install datasets transformers ({error})') from error
    return library


def is_dataset(path: Path) -> bool:
    """Return whether a folder holds a dataset that was saved, or one for each split."""
    return (path / SEVERAL).is_file() or (path / "dataset_info.json").is_file()


def has_split(path: Path, split: str) -> bool:
    """Return whether a folder holds several datasets, and one of them is called ``split``."""
    return (path / SEVERAL).is_file() and (path / split).is_dir()


def holds_rows(path: str | os.PathLike[str]) -> bool:
    """Return whether data has rows with columns, and is no text that could be trained as raw bytes."""
    return is_dataset(Path(path)) or any(_has_rows(file) for file in text_files(Path(path)))


def source_files(path: Path) -> list[Path]:
    """List the files of data that is to be tokenized.

    Raises:
        ConfigError: something cannot be read, a file among them is neither text nor Parquet, or text is among rows.
    """
    files = text_files(path)
    if is_dataset(path):
        return files
    for file in files:
        if file.suffix.lower() != PARQUET:
            _check_is_text(file, "")
    if files == [path] and path.suffix.lower() in OTHER_TABLES:
        raise ConfigError(
            f"{path}: is a table, and would be trained as one text with all its punctuation: write its rows as JSON "
            "lines or Parquet"
        )
    rows = [file for file in files if _has_rows(file)]
    if rows and len(rows) < len(files):
        text = next(file for file in files if file not in rows)
        raise ConfigError(f"{path}: holds rows, {rows[0]}, and text, {text}: give a file, or a folder of one kind")
    return files


def check_text(path: str | os.PathLike[str], hint: str) -> None:
    """Refuse data that is no text, and so is not trained as raw bytes unless that is asked for.

    Args:
        hint: what else can be done about it, for the message.

    Raises:
        ConfigError: something cannot be read, or a file among them is no text: token ids, compressed, a table.
    """
    for file in text_files(Path(path)):
        _check_is_text(file, hint)


def read_rows(path: Path, files: list[Path], split: str, columns: Collection[str]) -> Iterator[SourceRow]:
    """Read rows in their order. A file of text is a row with itself as ``text``.

    Args:
        files: those of ``path``.
        split: which of a folder's datasets, if it holds several.
        columns: those that are read of a table.

    Raises:
        ConfigError: naming the file, the line, and what is wrong there.
    """
    if is_dataset(path):
        yield from _saved(path, split, columns)
        return
    for file in files:
        with read_errors_as_config_error(file):
            if file.suffix.lower() in JSON_LINES:
                yield from _lines(file)
            elif file.suffix.lower() == PARQUET:
                yield from _parquet(file, columns)
            else:
                yield SourceRow(str(file), {"text": _decoded(file.read_bytes(), str(file))})


def _lines(file: Path) -> Iterator[SourceRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            text = _decoded(line, where)
            if not text.strip():
                continue
            try:
                values = json.loads(text)
            except (ValueError, RecursionError) as error:  # numbers with thousands of digits, and nesting, have limits
                raise ConfigError(f"{where}: is no JSON: {error}") from error
            if not isinstance(values, dict):
                raise ConfigError(f'{where}: should be an object, such as {{"text": "..."}}')
            yield SourceRow(where, values)


def _parquet(file: Path, columns: Collection[str]) -> Iterator[SourceRow]:
    import pyarrow.parquet  # comes with datasets

    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = _wanted(table.schema_arrow.names, columns, str(file))
        batches = (batch.to_pylist() for batch in table.iter_batches(TOGETHER, columns=names))
        yield from (
            SourceRow(f"{file}, row {number}", row) for number, row in enumerate(row for b in batches for row in b)
        )
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: is no Parquet that can be read: {error}") from error


def _saved(path: Path, split: str, columns: Collection[str]) -> Iterator[SourceRow]:
    library = datasets(path)
    try:
        dataset: Any = library.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds
        raise ConfigError(f"{path}: datasets cannot read it: {error}") from error
    if isinstance(dataset, dict):
        if split not in dataset:
            raise ConfigError(f'{path}: holds several datasets, and none is called "{split}"')
        dataset = dataset[split]
    names = _wanted(dataset.column_names, columns, str(path))
    for first in range(0, len(dataset), TOGETHER):
        found = dataset.with_format(None, columns=names)[first : first + TOGETHER]
        for number, values in enumerate(zip(*found.values()), first):
            yield SourceRow(f"{path}, row {number}", dict(zip(found, values)))


def _wanted(names: list[str], columns: Collection[str], where: str) -> list[str]:
    wanted = [name for name in names if name in columns]
    if not wanted:
        raise ConfigError(
            f"{where}: has the columns {', '.join(names)}: should have text, messages, prompt and completion, or "
            'input_ids; "field" in the "data" section names another one'
        )
    return wanted


def _has_rows(file: Path) -> bool:
    return file.suffix.lower() in (*JSON_LINES, PARQUET)


def _check_is_text(file: Path, hint: str) -> None:
    if file.suffix.lower() in TOKEN_FILES:
        raise ConfigError(f"{file}: {refusal('files of token ids')}{hint}")
    with read_errors_as_config_error(file), file.open("rb") as content:
        beginning = content.read(BEGINNING)
    problem = f"byte {beginning.index(0)} is 0" if 0 in beginning else None
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning, final=len(beginning) < BEGINNING)
    except UnicodeDecodeError as error:
        problem = str(error)
    if problem is not None:
        compressed = next((name for magic, name in COMPRESSED.items() if beginning.startswith(magic)), None)
        if compressed is not None:
            raise ConfigError(f"{file}: is compressed ({compressed}): decompress it, or leave it out{hint}")
        raise ConfigError(f"{file}: is no UTF-8 text: {problem}: {REMEDY}{hint}")


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is no UTF-8 text: {error}: {REMEDY}") from error
