"""Open what a run is given as data: files of token ids, or text that is tokenized."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ds_dynmo.data.batches import Split, TokenData
from ds_dynmo.data.cache import cached_id_statistics, cached_tokens, default_folder, identity_of
from ds_dynmo.data.config import SECTION, DataConfig
from ds_dynmo.data.files import read_tokens, smallest_type
from ds_dynmo.data.megatron import read_megatron
from ds_dynmo.data.saved_datasets import IDS, ids_of, is_dataset, open_dataset, texts_of
from ds_dynmo.data.texts import check_is_text, read_documents
from ds_dynmo.data.tokenizing import Tokenizer
from ds_dynmo.data.tokens import LogProgress, Tokens, check_ids, log_nothing
from ds_dynmo.errors import ConfigError
from ds_dynmo.files.texts import read_errors_as_config_error, text_files

__all__ = ["check_text", "find_file_without_dtype", "holds_ids", "open_data"]

SPLITS: dict[Split, str] = {"train": "train.bin", "validation": "val.bin"}  # nanoGPT's names in a folder
OF_IDS = (".bin", ".idx")


def holds_ids(path: str | os.PathLike[str], config: DataConfig) -> bool:
    """Return whether data is in one of the formats of token ids. A folder of datasets counts as one."""
    with read_errors_as_config_error(Path(path)):
        file = _token_file(Path(path), "train")
        if file is None:
            return is_dataset(Path(path))
        return _is_index(file) or config.dtype is not None or file.with_suffix(".json").is_file()


def find_file_without_dtype(path: str | os.PathLike[str], config: DataConfig) -> Path | None:
    """Find a ``.bin`` file of which nothing says that it holds token ids, or of what type. None: there is none."""
    return None if holds_ids(path, config) else _token_file(Path(path), "train")


def check_text(path: str | os.PathLike[str], hint: str = "") -> list[Path]:
    """List the files of a text.

    Args:
        hint: what else can be done about token ids, for the message.

    Raises:
        ConfigError: something cannot be read, or a file among them is no text: token ids, compressed, a table.
    """
    files = text_files(Path(path))
    found = next((file for file in files if file.suffix.lower() in OF_IDS), None)
    if found is not None:
        raise ConfigError(
            f"{found}: files of token ids are not read as text: give the file itself, or a folder without it (of "
            f"nanoGPT's files one with {SPLITS['train']}){hint}"
        )
    for file in files:
        check_is_text(file, hint)
    return files


def open_data(
    path: str | os.PathLike[str],
    config: DataConfig | None = None,
    *,
    vocabulary: int,
    tokenizer: str | os.PathLike[str] | None = None,
    packs: bool = False,
    log_progress: LogProgress = log_nothing,
) -> TokenData:
    """Open data, and check every token id.

    Args:
        path: token ids: a ``.bin`` file, a folder with nanoGPT's ``train.bin``, Megatron's files by the name of one or
            without a suffix; text: a file, JSON lines, or a folder of these; or a folder that ``Dataset.save_to_disk``
            of Hugging Face's datasets wrote.
        vocabulary: the model's: ids have to be below it.
        tokenizer: folder with the tokenizer for text, where ``config`` names none.
        packs: whether the model keeps packed documents apart; only "separate" ones depend on it.
        log_progress: called with a line about how far slow work is.

    Raises:
        ConfigError: naming the path, and what is wrong: it cannot be read, ids that the model does not know (with the
            first of them, its position and the vocabulary), text without a tokenizer, or a package that is missing.
    """
    config, path = config or DataConfig(), Path(path)
    tokenizer = tokenizer if config.tokenizer is None else config.tokenizer
    opened: dict[Split, Tokens] = {}
    with read_errors_as_config_error(path):
        sources = _splits(path, config)
        _check_used(config, sources)
        for split, source in sources.items():
            tokens = _open(source, split, config, tokenizer, log_progress)
            if tokens is not None:
                statistics = partial(cached_id_statistics, _cache(config))
                opened[split] = check_ids(tokens, vocabulary, log_progress, statistics)
            elif split == "train" or config.validation is not None:
                raise ConfigError(f'{source}: holds several datasets, and none is called "{split}"')
    documents = config.documents
    if documents == "separate":
        documents = "packed" if packs else "padded"
    return TokenData(opened["train"], documents=documents, validation=opened.get("validation"))


def _cache(config: DataConfig) -> Path:
    return default_folder() if config.cache is None else Path(config.cache)


def _splits(path: Path, config: DataConfig) -> dict[Split, Path]:
    """Find the splits' files."""
    found: dict[Split, Path] = {"train": path}
    if config.validation is not None:
        found["validation"] = Path(config.validation)
    elif all((path / name).is_file() for name in SPLITS.values()) or (path / "dataset_dict.json").is_file():
        found["validation"] = path
    return found


def _token_file(path: Path, split: Split) -> Path | None:
    """Find the file with which reading ids begins: a ``.bin`` file, or Megatron's index. None: this is no such data."""
    path = path / SPLITS[split] if (path / SPLITS[split]).is_file() else path
    if path.suffix.lower() in OF_IDS:
        index = path.with_suffix(".idx")
        return index if index.is_file() else path if path.is_file() else None
    index = Path(f"{path}.idx")
    return index if index.is_file() and not path.exists() else None


def _is_index(file: Path) -> bool:
    return file.suffix.lower() == OF_IDS[1]


def _check_used(config: DataConfig, sources: dict[Split, Path]) -> None:
    """Refuse what says how a ``.bin`` file is read if none is."""
    given = [key for key in ("dtype", "end_of_document") if getattr(config, key) is not None]
    files = [_token_file(source, split) for split, source in sources.items()]
    if given and all(file is None or _is_index(file) for file in files):
        raise ConfigError(
            f"{SECTION}.{f', {SECTION}.'.join(given)}: says how a .bin file without an index is read, and "
            f"{sources['train']} is none"
        )


def _open(
    path: Path, split: Split, config: DataConfig, folder: str | os.PathLike[str] | None, log_progress: LogProgress
) -> Tokens | None:
    file = _token_file(path, split)
    if file is not None:
        return read_megatron(file) if _is_index(file) else read_tokens(file, config)
    cache = _cache(config)
    files = text_files(path) if is_dataset(path) else check_text(path)
    if is_dataset(path):
        dataset = open_dataset(path, split)
        if dataset is None:
            return None
        if IDS in dataset.column_names:
            key = [IDS, split, identity_of(files)]
            ids = partial(ids_of, dataset, str(path))
            return cached_tokens(cache, key, ids, name=str(path), dtype="uint32", log_progress=log_progress)
    if folder is None:
        raise ConfigError(
            f'{path}: is text, and no tokenizer is given: "tokenizer" in the "{SECTION}" section names a folder '
            "with one"
        )

    tokenizer = Tokenizer(folder)

    def documents() -> Iterator[list[int]]:
        if is_dataset(path):
            return tokenizer.encode(texts_of(dataset, config.field, str(path)))
        return tokenizer.encode(read_documents(files, config.field))

    key = [tokenizer.fingerprint, config.field, split, identity_of(files)]
    kind = smallest_type(tokenizer.vocabulary)
    return cached_tokens(cache, key, documents, name=str(path), dtype=kind, log_progress=log_progress)
