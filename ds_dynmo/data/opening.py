"""Open what a run is given as data. It is tokenized once, and kept in the cache of Hugging Face's datasets."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_dynmo.data.batches import TokenData
from ds_dynmo.data.config import DataConfig
from ds_dynmo.data.encoding import Encoder
from ds_dynmo.data.sources import datasets, has_split, read_rows, source_files
from ds_dynmo.data.tokens import Tokens, tokens_of
from ds_dynmo.errors import ConfigError, reason_of
from ds_dynmo.files.texts import read_errors_as_config_error

__all__ = ["open_data"]

VERSION = 1  # another one tokenizes all anew


def open_data(
    path: str | os.PathLike[str],
    config: DataConfig | None = None,
    *,
    vocabulary: int,
    tokenizer: str | os.PathLike[str] | None = None,
    packs: bool = False,
) -> TokenData:
    """Open data, and tokenize it unless that has been done before.

    One process on a host tokenizes, others wait for it; then all map the same files.

    Args:
        path: text, JSON lines or Parquet: a file, or a folder of these; or a folder that ``Dataset.save_to_disk`` of
            Hugging Face's datasets wrote.
        vocabulary: the model's: ids have to be below it.
        tokenizer: folder with the tokenizer, where ``config`` names none.
        packs: whether the model keeps packed documents apart; only "separate" ones depend on it.

    Raises:
        ConfigError: naming the path, the row and what is wrong: it cannot be read, is no text, has ids that the model
            does not know, text without a tokenizer, or a package is missing.
    """
    config, path = config or DataConfig(), Path(path)
    encoder = Encoder(tokenizer if config.tokenizer is None else config.tokenizer, config.field, vocabulary)
    validation = None if config.validation is None else Path(config.validation)
    if validation is None and has_split(path, "validation"):
        validation = path
    documents = config.documents
    if documents == "separate":
        documents = "packed" if packs else "padded"
    return TokenData(
        _tokens(path, "train", encoder, config.cache),
        documents=documents,
        validation=None if validation is None else _tokens(validation, "validation", encoder, config.cache),
        loss=config.loss,
    )


def _tokens(path: Path, split: str, encoder: Encoder, cache: str | None) -> Tokens:
    library = datasets(path)
    with read_errors_as_config_error(path):
        files = source_files(path)
        found = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    def examples() -> Iterator[dict[str, Any]]:
        empty = True
        for example in encoder.encode(read_rows(path, files, split, encoder.columns)):
            empty = empty and not example.ids
            yield {"input_ids": example.ids, "trained": example.trained}  # lists are written faster than arrays
        if empty:
            raise ConfigError(f"{path}: there is not one token in it")

    fingerprint = hashlib.sha256(json.dumps([VERSION, encoder.fingerprint, split, found]).encode()).hexdigest()
    ids = library.List(library.Value("uint16" if encoder.vocabulary <= 2**16 else "uint32"))
    try:
        dataset = library.Dataset.from_generator(
            examples,
            features=library.Features({"input_ids": ids, "trained": library.List(library.Value("bool"))}),
            cache_dir=cache,
            fingerprint=fingerprint,
        )
    except (library.exceptions.DatasetGenerationError, OSError) as error:
        folder, cause = Path(cache or library.config.HF_DATASETS_CACHE), error.__cause__ or error
        _forget(fingerprint, folder)
        if isinstance(cause, ConfigError):
            raise cause from None
        if isinstance(cause, OSError):
            last = "".join(reason_of(cause).splitlines()[-1:])  # datasets guesses before it
            raise ConfigError(f"{cause.filename or folder}: cannot keep what was tokenized: {last}") from error
        raise ConfigError(f"{path}: cannot be tokenized: {cause}") from error
    return tokens_of(dataset.with_format("arrow")[:], str(path))


def _forget(fingerprint: str, cache: Path) -> None:
    """Remove what datasets leaves where it failed: locks, and folders in which there is nothing."""
    folders = list(cache.glob(f"generator/*{fingerprint}*"))
    for lock in (lock for folder in (cache, *folders) for lock in folder.glob("*.lock")):
        if fingerprint in str(lock):
            lock.unlink(missing_ok=True)
    for folder in (*folders, cache / "generator", cache):
        with suppress(OSError):  # something is in it
            folder.rmdir()
