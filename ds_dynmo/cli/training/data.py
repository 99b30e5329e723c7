"""Open the data of a run: raw bytes, or token ids that the model's vocabulary holds."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from ds_dynmo.data import DataConfig, Loss, TokenData, check_text, holds_rows, open_data, read_data_config
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ByteText, ModelConfig, huggingface, load_text, vocabulary_of
from ds_dynmo.models.text import FileBytes

__all__ = ["check_same_data", "describe", "identity_of", "load_data", "say"]

LARGE = 2**24  # bytes, which are read in a fraction of a second
PIECES, PIECE = 2**12, 2**8  # bytes: each piece may bring 128 KiB around it from the disk
TO_BYTES = '"tokens": "bytes" in the "model" section trains on its bytes'


def load_data(
    path: str | None,
    settings: dict[str, Any],
    model: ModelConfig,
    *,
    packed: bool,
    resumed: dict[str, Any] | None = None,
) -> ByteText | TokenData:
    """Read what ``--data`` names, and check it against the model. Rank 0 says what it found.

    Args:
        path: None: Python's standard library, as bytes.
        settings: the DeepSpeed configuration, whose "data" section says more.
        packed: are the model's layers built for packed documents?
        resumed: the metadata of the run that is resumed, which keeps its loss; None: the run is new.

    Raises:
        ConfigError: naming the path or key, and what is wrong.
    """
    config = read_data_config(settings)
    if path == "":
        raise ConfigError('--data "": should name a file or a folder')
    folder = _folder(model)
    no_tokenizer = config.tokenizer is None and folder is None
    if model.tokens == "bytes" or (no_tokenizer and (path is None or not holds_rows(path))):
        keys = sorted(config.model_fields_set)
        if keys:
            raise ConfigError(
                f"data.{', data.'.join(keys)}: cannot be given for raw bytes, which this run trains on; token ids are "
                'of "tokenizer" in the "data" section, without "tokens": "bytes"'
            )
        if model.tokens is None and path is not None:
            check_text(path, f"; {TO_BYTES}")
        return load_text(path)
    if path is None:
        raise ConfigError(f"--data: should name text for a model with a tokenizer; {TO_BYTES}")
    tokenizer = folder if huggingface.tokenizer_files(folder) else None
    config = config.model_copy(update={"loss": _loss(config, resumed)})
    data = open_data(path, config, vocabulary=vocabulary_of(model), tokenizer=tokenizer, packs=packed)
    say(data.describe(model.sequence_length))
    return data


def _loss(config: DataConfig, resumed: dict[str, Any] | None) -> Loss:
    """Return the loss of a run, which one that is resumed keeps; rank 0 says so where a new run has another.

    Raises:
        ConfigError: the section asks for another.
    """
    before = resumed.get("data") if resumed is not None else None
    if not isinstance(before, dict) or before.get("documents", "joined") == "joined":
        return config.loss
    had: Loss = before.get("loss", "micro_batch_mean")  # what runs had before there was a choice
    if had != config.loss:
        if "loss" in config.model_fields_set:
            raise ConfigError(
                f'data.loss = "{config.loss}": the run that is resumed has "{had}": should be that, or left out'
            )
        say(f'data.loss = "{had}", as in the run that is resumed; new runs have "{config.loss}"')
    return had


def check_same_data(resume: Path, resumed: dict[str, Any], data: ByteText | TokenData) -> None:
    """Refuse to resume a run on other data.

    Raises:
        ConfigError: saying what differs.
    """
    now = identity_of(data)
    before = resumed.get("data", now)
    if before is None and isinstance(data, ByteText):  # saved by an earlier version, like one without all keys
        return
    if not isinstance(before, dict) or not before.keys() <= now.keys():
        kind, other = ("raw bytes", "token ids") if isinstance(data, ByteText) else ("token ids", "raw bytes")
        raise ConfigError(f"--resume {resume}: was trained on {other}, this run has {kind}")
    changed = [f"{key} was {value}, is {now[key]}" for key, value in before.items() if value != now[key]]
    if changed:
        raise ConfigError(f"--resume {resume}: was trained on other data than this run has: {'; '.join(changed)}")


def identity_of(data: ByteText | TokenData) -> dict[str, Any]:
    """Describe data for the runs that resume this one."""
    if isinstance(data, TokenData):
        return data.identity
    return {"bytes": len(data.tokens), "sha256": _digest(data)}


def describe(data: ByteText | TokenData) -> str:
    """Describe data for the ranks that train on it together."""
    if isinstance(data, TokenData):
        return f"{len(data.tokens.ids)} tokens ({data.digest})"
    return f"{len(data.tokens)} bytes ({_digest(data)})"


def say(line: str) -> None:
    """Print a line on rank 0, before ranks have met."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(line, flush=True)


@lru_cache(maxsize=1)
def _digest(text: ByteText) -> str:
    """Hash all bytes, of a large text pieces at equal distances."""
    tokens, found = text.tokens, hashlib.sha256()
    assert isinstance(tokens, FileBytes), "load_text gives these"
    places = range(0, len(tokens), max(1, len(tokens) // PIECES))
    for piece in tokens.pieces() if len(tokens) <= LARGE else (tokens.piece(place, PIECE) for place in places):
        found.update(piece)
    return found.hexdigest()[:16]


def _folder(model: ModelConfig) -> Path | None:
    """Find the folder of a Hugging Face model, which would have a tokenizer."""
    folder = model.huggingface
    return Path(folder) if isinstance(folder, str) and Path(folder).is_dir() else None
