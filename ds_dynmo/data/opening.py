"""Open what a run is given as data: files of token ids, or text that is tokenized."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ds_dynmo.data.batches import Split, TokenData
from ds_dynmo.data.cache import cached, default_folder, identity_of
from ds_dynmo.data.config import BLOCK, DataConfig
from ds_dynmo.data.files import read_tokens, smallest_type
from ds_dynmo.data.megatron import is_index, read_megatron
from ds_dynmo.data.saved_datasets import IDS, ids_of, is_dataset, open_dataset, texts_of
from ds_dynmo.data.texts import read_documents, text_files
from ds_dynmo.data.tokenizing import Tokenizer
from ds_dynmo.data.tokens import Say, Tokens, check_ids, say_nothing
from ds_dynmo.errors import ConfigError

__all__ = ["holds_ids", "lacks_dtype", "open_data"]

SPLITS = {"train": "train.bin", "validation": "val.bin"}  # nanoGPT's names in a folder


def holds_ids(path: str | os.PathLike[str], config: DataConfig) -> bool:
    """Tell whether data is in one of the formats of token ids. A folder of datasets counts as one."""
    file = _token_file(Path(path))
    if file is None:
        return is_dataset(Path(path))
    return file.suffix == ".idx" or config.dtype is not None or file.with_suffix(".json").is_file()


def lacks_dtype(path: str | os.PathLike[str], config: DataConfig) -> Path | None:
    """Find a ``.bin`` file of which nothing says that it holds token ids, or of what type. None: there is none."""
    return None if holds_ids(path, config) else _token_file(Path(path))


def open_data(
    path: str | os.PathLike[str],
    config: DataConfig | None = None,
    *,
    vocabulary: int,
    tokenizer: str | os.PathLike[str] | None = None,
    say: Say = say_nothing,
) -> TokenData:
    """Open data, and check every token id.

    Args:
        path: token ids: a ``.bin`` file, a folder with nanoGPT's ``train.bin``, Megatron's files by the name of one or
            without a suffix; text: a file, JSON lines, or a folder of these; or a folder that ``Dataset.save_to_disk``
            of Hugging Face's datasets wrote.
        vocabulary: the model's: ids have to be below it.
        tokenizer: folder with the tokenizer for text, where ``config`` names none.
        say: is told how far slow work is.

    Raises:
        ConfigError: naming the path, and what is wrong: it cannot be read, ids that the model does not know (with the
            first of them, its position and the vocabulary), text without a tokenizer, or a package that is missing.
    """
    config, path = config or DataConfig(), Path(path)
    tokenizer = tokenizer if config.tokenizer is None else config.tokenizer
    opened: dict[Split, Tokens] = {}
    for split, source in _splits(path, config).items():
        tokens = _open(source, split, config, tokenizer, say)
        if tokens is not None:
            opened[split] = check_ids(tokens, vocabulary, say)
        elif split == "train" or config.validation is not None:
            raise ConfigError(f'{source}: holds several datasets, and none is called "{split}"')
    return TokenData(opened["train"], documents=config.documents, validation=opened.get("validation"))


def _splits(path: Path, config: DataConfig) -> dict[Split, Path]:
    """Say where the splits are."""
    found: dict[Split, Path] = {"train": path}
    if config.validation is not None:
        found["validation"] = Path(config.validation)
    elif (path / SPLITS["train"]).is_file() and (path / SPLITS["validation"]).is_file():
        found = {"train": path / SPLITS["train"], "validation": path / SPLITS["validation"]}
    elif (path / "dataset_dict.json").is_file():
        found["validation"] = path
    return found


def _token_file(path: Path) -> Path | None:
    """Find the file with which reading ids begins: a ``.bin`` file, or Megatron's index. None: this is no such data."""
    index = path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")
    if is_index(index):
        return index
    path = path / SPLITS["train"] if (path / SPLITS["train"]).is_file() else path
    return path if path.suffix == ".bin" and path.is_file() else None


def _open(
    path: Path, split: Split, config: DataConfig, folder: str | os.PathLike[str] | None, say: Say
) -> Tokens | None:
    file = _token_file(path)
    if file is not None:
        return read_megatron(file) if file.suffix == ".idx" else read_tokens(file, config)
    cache = default_folder() if config.cache is None else Path(config.cache)
    files = text_files(path)
    if is_dataset(path):
        dataset = open_dataset(path, split)
        if dataset is None:
            return None
        if IDS in dataset.column_names:
            key = [IDS, split, identity_of(files)]
            return cached(cache, key, lambda: ids_of(dataset, str(path)), name=str(path), dtype="uint32", say=say)
    if folder is None:
        raise ConfigError(
            f'{path}: is text, and no tokenizer is given: "tokenizer" in the "{BLOCK}" block names a folder with one'
        )

    tokenizer = Tokenizer(folder)

    def documents() -> Iterator[list[int]]:
        if is_dataset(path):
            return tokenizer.encode(texts_of(dataset, config.field, str(path)))
        return tokenizer.encode(read_documents(files, config.field))

    key = [tokenizer.fingerprint, config.field, split, identity_of(files)]
    kind = smallest_type(tokenizer.vocabulary)
    return cached(cache, key, documents, name=str(path), dtype=kind, say=say)
