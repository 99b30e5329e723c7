"""Folders that ``Dataset.save_to_disk`` of Hugging Face's datasets wrote (optional extra ``datasets``).

This is the one module that imports datasets, when such a folder is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_dynmo.data.order import Numbers
from ds_dynmo.data.texts import is_text
from ds_dynmo.errors import ConfigError

__all__ = ["IDS", "ids_of", "is_dataset", "open_dataset", "texts_of"]

IDS = "input_ids"  # column of a dataset that was tokenized
LABELS = "labels"
MASKS = ("attention_mask", "completion_mask", "assistant_masks", "loss_mask")  # 0: a token that is not trained
TOGETHER = 1000  # rows


def is_dataset(path: Path) -> bool:
    """Return whether a folder holds a dataset, or one for each split."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def open_dataset(path: Path, split: str) -> Any:
    """Open a dataset; of several the one called ``split``. None: there are several, and none is called so.

    Raises:
        ConfigError: the package is missing, or cannot read the folder.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f'{path}: needs datasets, the extra "datasets": pip install datasets ({error})') from error
    try:
        found: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds
        raise ConfigError(f"{path}: datasets cannot read it: {error}") from error
    return found.get(split) if isinstance(found, dict) else found


def ids_of(dataset: Any, name: str) -> Iterator[Numbers]:
    """Iterate over the token ids of each row.

    Raises:
        ConfigError: naming a row with something else, or with tokens that its labels or masks leave out: all are
            trained.
    """
    beside = [column for column in (LABELS, *MASKS) if column in dataset.column_names]
    for row, values in _rows(dataset, "numpy", [IDS, *beside]):
        ids, *others = map(np.asarray, values)
        if not _are_ids(ids):
            raise ConfigError(f'{name}, row {row}: should have token ids as "{IDS}"')
        for column, other in zip(beside, others):
            if not np.array_equal(other, ids if column == LABELS else np.ones_like(ids)):
                should = f'equal its "{IDS}"' if column == LABELS else f'be 1 for each of its {len(ids)} "{IDS}"'
                raise ConfigError(
                    f'{name}, row {row}: "{column}" should {should}: every token is trained; cut the rows to what is '
                    "to be trained, or remove the column"
                )
        yield ids


def texts_of(dataset: Any, column: str, name: str) -> Iterator[str]:
    """Iterate over the text of each row.

    Raises:
        ConfigError: there is no such column, or naming a row with something else.
    """
    if column not in dataset.column_names:
        raise ConfigError(f'{name}: has no column "{column}": should be one of {", ".join(dataset.column_names)}')
    for row, (value,) in _rows(dataset, None, [column]):
        if not is_text(value):
            raise ConfigError(f'{name}, row {row}: should have a text as "{column}"')
        yield value


def _are_ids(array: NDArray[Any]) -> bool:
    integers = array.ndim == 1 and (not len(array) or array.dtype.kind in "iu")
    return integers and (not len(array) or (array.min() >= 0 and array.max() < 2**32))


def _rows(dataset: Any, form: str | None, columns: list[str]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Number the rows from 0, and return their values of some columns."""
    dataset = dataset.with_format(form, columns=columns)
    for first in range(0, len(dataset), TOGETHER):
        found = dataset[first : first + TOGETHER]
        yield from enumerate(zip(*(found[column] for column in columns)), first)
