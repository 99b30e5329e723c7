"""Folders of Hugging Face's datasets: ids, texts, splits, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ds_dynmo.data import DataConfig, holds_ids, open_data
from ds_dynmo.errors import ConfigError
from tests.local.test_data_text import opened


class Dataset:
    """What of the library's class is used."""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def with_format(self, kind: str | None, columns: list[str]) -> Dataset:
        self._given_columns = columns
        self._array = list if kind is None else np.array
        return self

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return {name: [self._given(value) for value in self._columns[name][rows]] for name in self._given_columns}

    def _given(self, value: Any) -> Any:
        return self._array(value) if isinstance(value, list) else value


def stand_in(monkeypatch: pytest.MonkeyPatch, path: Path, found: Any) -> Path:
    """Let the library find ``found`` in a folder. The package itself is not among those of the tests."""
    module = ModuleType("datasets")
    module.load_from_disk = lambda given: {str(path): found}[given]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    path.mkdir(exist_ok=True)
    (path / ("dataset_dict.json" if isinstance(found, dict) else "dataset_info.json")).write_text("{}")
    return path


def test_datasets_of_ids_and_of_texts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stand_in(monkeypatch, tmp_path / "ids", Dataset(input_ids=[[3, 1], [4, 4, 1]], text=["one", "two"]))
    assert holds_ids(path, DataConfig()) and opened(path, tmp_path) == [[3, 1], [4, 4, 1]]
    path = stand_in(monkeypatch, tmp_path / "texts", Dataset(story=["one", "two two"] * 1001))
    assert opened(path, tmp_path, field="story") == [[3, 1], [4, 4, 1]] * 1001
    with pytest.raises(ConfigError, match='texts: has no column "text": should be one of story'):
        opened(path, tmp_path)
    path = stand_in(monkeypatch, tmp_path / "null", Dataset(text=["one", None]))
    with pytest.raises(ConfigError, match='null, row 1: should have a text as "text"'):
        opened(path, tmp_path)
    for wrong in (None, [0.5], [[1]], "one", [1, -100], [2**32]):
        path = stand_in(monkeypatch, tmp_path / "wrong", Dataset(input_ids=[[1], [], wrong]))
        with pytest.raises(ConfigError, match='wrong, row 2: should have token ids as "input_ids"'):
            opened(path, tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": [[3, 1], [4, 4, 1]], "attention_mask": [[1, 1], [1, 1, 1]], "token_type_ids": [[0], [0]]}, None),
        ({"labels": [[3, 1], [-100, 4, 1]]}, 'd, row 1: "labels" should equal its "input_ids": every token is trained'),
        ({"labels": [[3, 1], [4, 1]]}, 'row 1: "labels" should equal its "input_ids"'),
        ({"labels": [[3, 1], None]}, 'row 1: "labels" should equal its "input_ids"'),
        ({"labels": [0, 1]}, 'row 0: "labels" should equal its "input_ids"'),
        ({"attention_mask": [[1, 1], [1, 1, 0]]}, 'row 1: "attention_mask" should be 1 for each of its 3 "input_ids"'),
        ({"attention_mask": [[1, 1], [1, 1]]}, 'row 1: "attention_mask" should be 1'),
        ({"completion_mask": [[0, 1], [0, 1, 1]]}, 'row 0: "completion_mask" should be 1 for each of its 2'),
        ({"assistant_masks": [[0, 1], [0, 1, 1]]}, 'row 0: "assistant_masks" should be 1'),
        ({"loss_mask": [[0, 1], [0, 1, 1]]}, 'row 0: "loss_mask" should be 1'),
    ],
)
def test_tokens_that_a_dataset_leaves_out_are_not_trained_in_silence(
    columns: dict[str, Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stand_in(monkeypatch, tmp_path / "d", Dataset(input_ids=[[3, 1], [4, 4, 1]], **columns))
    if message is None:
        assert opened(path, tmp_path) == [[3, 1], [4, 4, 1]]
        return
    with pytest.raises(ConfigError, match=message):
        opened(path, tmp_path)


def test_datasets_of_several_splits_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": Dataset(input_ids=[[3]]), "validation": Dataset(input_ids=[[4]])}
    config = DataConfig(cache=str(tmp_path / "cache"))
    data = open_data(stand_in(monkeypatch, tmp_path / "d", splits), config, vocabulary=6)
    assert data.validation is not None and (data.tokens.ids.tolist(), data.validation.ids.tolist()) == ([3], [4])
    del splits["validation"]
    assert open_data(stand_in(monkeypatch, tmp_path / "d", splits), config, vocabulary=6).validation is None
    with pytest.raises(ConfigError, match='d: holds several datasets, and none is called "validation"'):
        open_data(tmp_path / "d", DataConfig(cache=config.cache, validation=str(tmp_path / "d")), vocabulary=6)
    splits["test"] = splits.pop("train")
    with pytest.raises(ConfigError, match='d: holds several datasets, and none is called "train"'):
        open_data(tmp_path / "d", config, vocabulary=6)


def test_datasets_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stand_in(monkeypatch, tmp_path / "d", Dataset(text=[]))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"d: needs datasets, the extra \"datasets\": pip install datasets"):
        open_data(path, vocabulary=6)
