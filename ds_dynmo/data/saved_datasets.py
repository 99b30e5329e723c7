"""Folders that ``Dataset.save_to_disk`` of Hugging Face's datasets wrote (optional extra ``datasets``).

This is the one module that imports datasets, when such a folder is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ds_dynmo.data.order import Numbers
from ds_dynmo.data.texts import is_text
from ds_dynmo.errors import ConfigError

__all__ = ["IDS", "ids_of", "is_dataset", "open_dataset", "texts_of"]

IDS = "input_ids"  # column of a dataset that was tokenized
TOGETHER = 1000  # rows


def is_dataset(path: Path) -> bool:
    """Tell whether a folder holds a dataset, or one for each split."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def open_dataset(path: Path, split: str) -> Any:
    """Open a dataset; of several the one called ``split``. None: there are several, and none is called so.

    Raises:
        ConfigError: the package is missing, or cannot read the folder.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f'{path}: needs datasets, the extra "datasets": pip install ds_dynmo[datasets] ({error})'
        ) from error
    try:
        found: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds
        raise ConfigError(f"{path}: datasets cannot read it: {error}") from error
    return found.get(split) if isinstance(found, dict) else found


def ids_of(dataset: Any, name: str) -> Iterator[Numbers]:
    """Iterate over the token ids of each row.

    Raises:
        ConfigError: naming a row with something else.
    """
    for row, value in _rows(dataset.with_format("numpy"), IDS):
        ids = np.asarray(value)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise ConfigError(f'{name}, row {row}: should have token ids as "{IDS}"')
        yield ids


def texts_of(dataset: Any, column: str, name: str) -> Iterator[str]:
    """Iterate over the text of each row.

    Raises:
        ConfigError: there is no such column, or naming a row with something else.
    """
    if column not in dataset.column_names:
        raise ConfigError(f'{name}: has no column "{column}": should be one of {", ".join(dataset.column_names)}')
    for row, value in _rows(dataset.with_format(None), column):
        if not is_text(value):
            raise ConfigError(f'{name}, row {row}: should have a text as "{column}"')
        yield value


def _rows(dataset: Any, column: str) -> Iterator[tuple[int, Any]]:
    """Number the values of a column from 0."""
    for first in range(0, len(dataset), TOGETHER):
        yield from enumerate(dataset[first : first + TOGETHER][column], first)
