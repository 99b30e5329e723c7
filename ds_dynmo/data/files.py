"""Token files of our own: ``NAME.bin`` with ids one after the other, little endian, and ``NAME.json`` beside it.

The JSON has ``"dtype"`` and may have more (:class:`TokenFile`). Where it says so, ``NAME.documents`` holds where
documents begin, int64, little endian, and at the end the number of tokens. nanoGPT's files are such ``.bin`` files
without the JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ds_dynmo.config import load_json, parse_section
from ds_dynmo.config.section import Section
from ds_dynmo.data.config import SECTION, DataConfig, TokenType
from ds_dynmo.data.tokens import Ids, Tokens
from ds_dynmo.errors import ConfigError
from ds_dynmo.files import atomic_write, write_text

__all__ = ["TokenFile", "little_endian", "map_ids", "read_tokens", "smallest_type", "write_tokens"]


class TokenFile(Section):
    """The JSON beside a ``.bin`` file."""

    dtype: TokenType = Field(description="type of the ids")
    tokens: int | None = Field(
        default=None, ge=0, description="how many ids the file holds, which is checked; null: not said"
    )
    vocab_size: int | None = Field(default=None, ge=1, description="entries of the vocabulary, for your information")
    end_of_document: int | None = Field(default=None, ge=0, description="id that ends each document; null: none does")
    documents: bool = Field(
        default=False,
        description="true: NAME.documents has where documents begin and the last one ends: int64, little endian",
    )


def read_tokens(path: str | os.PathLike[str], config: DataConfig | None = None) -> Tokens:
    """Map a ``.bin`` file into memory.

    Args:
        config: its ``dtype`` and ``end_of_document`` are used where there is no JSON beside the file.

    Raises:
        ConfigError: nothing says the dtype, both do and differ, or sizes do not agree. Ids have not been checked.
    """
    file, config = Path(path), config or DataConfig()
    beside = file.with_suffix(".json")
    if not beside.is_file():
        if config.dtype is None:
            raise ConfigError(
                f'{file}: has no header, and no {beside.name} beside it: "dtype" in the "{SECTION}" section says what '
                'the ids are: "uint16" in nanoGPT\'s files'
            )
        return Tokens(map_ids(file, config.dtype), str(file), end_of_document=config.end_of_document)
    header = parse_section(TokenFile, load_json(beside), str(beside))
    for key in ("dtype", "end_of_document"):
        asked, written = getattr(config, key), getattr(header, key)
        if asked is not None and written is not None and asked != written:
            raise ConfigError(f"{SECTION}.{key} = {json.dumps(asked)}: {beside} says {json.dumps(written)}")
    ids = map_ids(file, header.dtype)
    if header.tokens is not None and header.tokens != len(ids):
        raise ConfigError(f"{file}: holds {len(ids)} tokens of {header.dtype}, {beside.name} says {header.tokens}")
    end = config.end_of_document if header.end_of_document is None else header.end_of_document
    if not header.documents:
        return Tokens(ids, str(file), end_of_document=end)
    starts = map_ids(file.with_suffix(".documents"), "int64").astype(np.int64)
    if len(starts) < 1 or starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 0).any():
        raise ConfigError(
            f"{file.with_suffix('.documents')}: should hold where documents begin, from 0 up to {len(ids)}, the tokens"
        )
    return Tokens(ids, str(file), starts)


def write_tokens(
    path: str | os.PathLike[str],
    documents: Iterable[Ids],
    *,
    dtype: TokenType = "uint16",
    vocab_size: int | None = None,
) -> None:
    """Write ``NAME.bin`` with ``NAME.documents`` and, last, ``NAME.json``.

    Args:
        path: of the ``.bin`` file.
        documents: token ids of each document. One without tokens is left out.

    Raises:
        ConfigError: an id that is no integer or that ``dtype`` cannot hold, or a file that cannot be written.
    """
    file = Path(path)
    starts, most = [0], np.iinfo(dtype).max
    try:
        with atomic_write(file) as new, new.open("wb") as target:
            for document in documents:
                if not len(document):
                    continue
                ids = np.asarray(document)
                if ids.dtype.kind not in "iu":
                    raise ConfigError(f"{file}: token ids should be integers, got {ids.dtype}")
                if ids.min() < 0 or ids.max() > most:
                    raise ConfigError(f"{file}: {dtype} holds ids from 0 to {most}, got {ids.min()} to {ids.max()}")
                target.write(ids.astype(little_endian(dtype)).tobytes())
                starts.append(starts[-1] + len(ids))
        with atomic_write(file.with_suffix(".documents")) as new:
            new.write_bytes(np.asarray(starts, dtype="<i8").tobytes())
        header = TokenFile(dtype=dtype, tokens=starts[-1], vocab_size=vocab_size, documents=True)
        write_text(file.with_suffix(".json"), header.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from error


def smallest_type(vocabulary: int) -> TokenType:
    """Return the smallest of the two usual types that holds the ids of a vocabulary."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def map_ids(path: Path, dtype: str) -> NDArray[Any]:
    """Map a file of integers into memory, whatever their order of bytes on this machine.

    Raises:
        ConfigError: it cannot be read, or its size is no multiple of the integers'.
    """
    kind = little_endian(dtype)
    try:
        size = path.stat().st_size
        if size % kind.itemsize:
            raise ConfigError(f"{path}: {size} bytes are no multiple of {kind.itemsize}, the bytes of a {dtype}")
        return np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, dtype=kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
