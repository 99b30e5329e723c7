"""Rows that are cut, left out or packed, and the columns of those that have token ids already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.errors import ConfigError

pytest.importorskip("transformers")

from ds_dynmo.trainer.rows import read_rows
from tests.support.trainer_runs import tokenizer_of


def rows_of(given: Any, tokenizer: str | None = None, **changes: Any) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"field": None, "max_length": None, "packed": False, "known_columns": True}
    settings |= {"answers_only": True, "completions_only": True}
    found = read_rows(given, "train_dataset", vocabulary=97, tokenizer=tokenizer, **settings | changes)
    return [found[number] for number in range(len(found))]


def test_rows_with_ids_keep_the_columns_that_a_model_takes() -> None:
    row = {"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 1]}
    assert rows_of([{**row, "source": "x"}]) == [row]
    assert rows_of([{**row, "source": "x"}], known_columns=False) == [{**row, "source": "x"}]


def test_rows_are_cut_and_those_of_which_nothing_is_trained_then_are_left_out() -> None:
    rows = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}]
    assert rows_of(rows, max_length=2) == [{"input_ids": [1, 2], "labels": [1, 2]}]
    assert rows_of(rows, max_length=3)[1] == {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}


def test_packed_documents_have_positions_and_labels_of_their_own() -> None:
    """The last token of a document predicts nothing; the last place of a row is none's."""
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [-100, 5]}, {"input_ids": [6, 7, 8]}]
    first, second = rows_of(rows, max_length=5, packed=True)
    assert first == {
        "input_ids": [1, 2, 6, 7, 0],
        "labels": [-100, 2, 3, 7, 8],
        "position_ids": [0, 1, 0, 1, 0],
    }
    assert second["input_ids"][:1] == [4] and second["labels"] == [-100, 5, -100, -100, -100]


def test_all_of_a_conversation_is_trained_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = tokenizer_of(tmp_path / "words")
    chat = [{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}]
    (answers,), (every,) = rows_of(chat, folder), rows_of(chat, folder, answers_only=False)
    assert answers["input_ids"] == every["input_ids"] == every["labels"]
    assert answers["labels"].count(-100) > 3 and {2, 3} & {*answers["labels"]}
    completed = [{"prompt": "w1 ", "completion": "w2"}]
    (answer,), (both,) = rows_of(completed, folder), rows_of(completed, folder, completions_only=False)
    assert answer["labels"][0] == -100 and both["labels"] == both["input_ids"]


def test_a_column_of_text_may_have_another_name_and_a_path_is_read(tmp_path: Path) -> None:
    folder = tokenizer_of(tmp_path / "words")
    (named,), (plain,) = rows_of([{"body": "w1 w2"}], folder, field="body"), rows_of([{"text": "w1 w2"}], folder)
    assert named == plain
    (tmp_path / "rows.jsonl").write_text('{"text": "w1 w2"}\n')
    with pytest.raises(ConfigError, match="nowhere: no such file"):
        rows_of(tmp_path / "nowhere")
    assert rows_of(tmp_path / "rows.jsonl", folder) == [plain]
