"""Rows as data: text, JSON lines, Parquet, saved datasets; what a tokenizer makes of them, once; what is refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from ds_dynmo.data import DataConfig, TokenData, holds_rows, open_data
from ds_dynmo.data.encoding import Encoder, Example
from ds_dynmo.data.sources import SourceRow
from ds_dynmo.errors import ConfigError
from tests.support.full_disk import files_of_at_most
from tests.support.words import word_tokenizer

Rows = list[dict[str, Any]]


def documents(data: TokenData) -> list[list[int]]:
    starts = data.tokens.starts.tolist()
    return [data.tokens.ids.read(*piece).tolist() if piece[1] > piece[0] else [] for piece in zip(starts, starts[1:])]


def opened(path: Path, folder: Path, **changes: Any) -> TokenData:
    """Open data with the tokenizer of words in ``folder``."""
    config = DataConfig(**{"cache": str(folder / "cache"), "documents": "packed", **changes})
    model = folder / "model" if (folder / "model").exists() else word_tokenizer(folder / "model")
    return open_data(path, config, vocabulary=6, tokenizer=model)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one two"}\n\n{"text": "", "other": 1}\n{"text": "three four\\nthree three"}\n')
    return path


# -- formats --------------------------------------------------------------------------------------------------


def test_a_json_line_is_a_document(lines: Path, tmp_path: Path) -> None:
    assert documents(opened(lines, tmp_path)) == [[3, 4, 1], [1], [5, 2, 5, 5, 1]]


def test_every_file_of_a_folder_is_a_document_and_holds_several(tmp_path: Path, lines: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "a").mkdir(parents=True)
    (folder / "b.txt").write_text("two one", encoding="utf-8-sig")
    (folder / "a" / "c.md").write_text("three")
    assert documents(opened(folder, tmp_path)) == [[5, 1], [4, 3, 1]] and not holds_rows(folder)
    assert documents(opened(folder / "b.txt", tmp_path)) == [[4, 3, 1]]
    (tmp_path / "rows").mkdir()
    lines.rename(tmp_path / "rows" / "b.jsonl")
    parquet([{"text": "one", "n": 1}], tmp_path / "rows" / "a.parquet")
    assert documents(opened(tmp_path / "rows", tmp_path)) == [[3, 1], [3, 4, 1], [1], [5, 2, 5, 5, 1]]


def test_text_among_rows_and_other_tables_are_refused(tmp_path: Path, lines: Path) -> None:
    """A cloned dataset has a README.md beside its rows."""
    (tmp_path / "data").mkdir()
    lines.rename(tmp_path / "data" / "rows.jsonl")
    (tmp_path / "data" / "README.md").write_text("one")
    with pytest.raises(
        ConfigError, match=r"data: holds rows, .*rows\.jsonl, and text, .*README\.md: give a file, or a"
    ):
        opened(tmp_path / "data", tmp_path)
    for name in ("x.json", "x.CSV", "x.tsv"):
        (tmp_path / name).write_text("one")
        with pytest.raises(ConfigError, match=rf"{name}: is a table, .*punctuation: write its rows as JSON"):
            opened(tmp_path / name, tmp_path)


def json_lines(rows: Rows, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(rows: Rows, path: Path) -> None:
    datasets.Dataset.from_list(rows).to_parquet(str(path))


def saved(rows: Rows, path: Path) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(str(path))


FORMATS: dict[str, Callable[[Rows, Path], None]] = {"x.jsonl": json_lines, "x.parquet": parquet, "x": saved}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_same_in_every_format(name: str, tmp_path: Path) -> None:
    path, write = tmp_path / name, FORMATS[name]
    write([{"text": "one", "n": 1}, {"text": "two two", "n": 2}] * 501, path)
    assert holds_rows(path) and documents(opened(path, tmp_path)) == [[3, 1], [4, 4, 1]] * 501
    path = tmp_path / f"ids{path.suffix}"
    labelled = [
        {"input_ids": [3, 1], "labels": [3, 1], "loss_mask": None},
        {"input_ids": [4, 5, 5, 1], "labels": [-100, 5, 5, 1], "loss_mask": [1, 1, 0, 1]},
    ]
    write(labelled, path)
    data = opened(path, tmp_path)
    assert documents(data) == [[3, 1], [4, 5, 5, 1]] and data.tokens.trained is not None
    assert data.tokens.trained.read(0, 6).tolist() == [True, True, False, True, False, True]
    path = tmp_path / f"wrong{path.suffix}"
    write([{"text": "one"}, {"text": None}], path)
    row = "line 2" if write is json_lines else "row 1"
    with pytest.raises(ConfigError, match=rf"wrong.*, {row}: null in text: write a value there, or leave the row out$"):
        opened(path, tmp_path)


def test_a_table_is_in_the_column_that_is_named(tmp_path: Path) -> None:
    for name, write in FORMATS.items():
        path = tmp_path / name
        write([{"story": "one", "text": "two"}], path)
        assert documents(opened(path, tmp_path, field="story")) == [[3, 1]]
        path = tmp_path / f"other{path.suffix}"
        write([{"story": "one"}], path)
        with pytest.raises(
            ConfigError, match=r'other.*story: should have .*text.*; "field" in the "data" section names'
        ):
            opened(path, tmp_path)


def test_datasets_of_several_splits_are_read(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_dict({"input_ids": [[number]]}) for number, name in enumerate(("train", "v"))}
    datasets.DatasetDict(train=splits["train"], validation=splits["v"]).save_to_disk(str(tmp_path / "d"))
    data = opened(tmp_path / "d", tmp_path)
    assert data.validation is not None and data.validation.ids.read(0, 1).tolist() == [1]
    datasets.DatasetDict(train=splits["train"]).save_to_disk(str(tmp_path / "e"))
    assert opened(tmp_path / "e", tmp_path).validation is None
    with pytest.raises(ConfigError, match='e: holds several datasets, and none is called "validation"'):
        opened(tmp_path / "e", tmp_path, validation=str(tmp_path / "e"))


def test_ids_need_no_tokenizer_and_text_does(lines: Path, tmp_path: Path) -> None:
    config = DataConfig(cache=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r'corpus\.jsonl, line 1: is text, and no tokenizer is given: "tokenizer" in'):
        open_data(lines, config, vocabulary=6)
    json_lines([{"input_ids": [3, 1]}] * 9, lines)
    assert documents(open_data(lines, config, vocabulary=6)) == [[3, 1]] * 9


# -- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "one"}\n{"txt": "one"}', r"x\.jsonl, line 2: has txt: should have messages, prompt and completion"),
        (b'{"prompt": "one", "completion": null}', "line 1: null in completion: write a value there"),
        (b'{"messages": null, "input_ids": null}', "line 1: null in messages, input_ids: write a value there"),
        (b'["one"]', r'line 1: should be an object, such as {"text": "..."}'),
        (b'{"text": 3}', 'line 1: "text" should be a text, a list of messages, or token ids'),
        (b'{"messages": []}', 'line 1: "messages" should be a text, a list of messages'),
        (b'{"text": "one \\ud800"}', "line 1: the tokenizer cannot encode it: half of a surrogate pair is no text"),
        (b'\n{"text": "one"', "line 2: is no JSON: "),
        (b"[" * 10**5, "line 1: is no JSON: "),
        (b'{"text": "one", "n": ' + b"9" * 5000 + b"}", "line 1: is no JSON: "),
        (b'{"text": "one"}\n' * 5000 + b'{"text": "\xff"}', r"line 5001: is no UTF-8 text: .* position 10"),
        (b"", r"x\.jsonl: there is not one token in it"),
        (
            b'{"text": "one", "input_ids": [3]}',
            'line 1: has input_ids and text: "field" in the "data" section says which',
        ),
        (b'{"input_ids": [3, 6]}', r"line 1: token 1 of 2 is 6: the model's vocabulary has 6 entries, 0 to 5"),
        (b'{"input_ids": [3, -1]}', "line 1: token 1 of 2 is -1: the model's"),
        (b'{"input_ids": [3, 0.5]}', 'line 1: "input_ids" should be a text, a list of messages, or token ids'),
        (b'{"input_ids": [3, 1], "labels": [1, 3]}', 'line 1: "labels" should be the token, or -100 where'),
        (b'{"input_ids": [3, 1], "labels": [3]}', 'line 1: "labels" should have one for each of the 2 tokens'),
        (b'{"input_ids": [3, 1], "attention_mask": [1, 0]}', 'line 1: "attention_mask" should be 1: leave padding out'),
        (b'{"input_ids": [3, 1], "loss_mask": [1, 2]}', 'line 1: "loss_mask" should be 1, or 0 where'),
        (b'{"input_ids": [3, 1], "loss_mask": [1, 0]}', "line 1: none of its tokens is trained: give it an answer"),
    ],
)
def test_wrong_lines_are_named_and_leave_nothing(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "x.jsonl", tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "text.jsonl.gz",
            gzip.compress(b"one " * 999, mtime=0),
            r"is compressed \(gzip\): decompress it, or leave it out",
        ),
        ("table.parquet", b"PAR1\x15\x04\x15\xc0" + bytes(500), "is no Parquet that can be read: "),
        ("text.bz2", bz2.compress(b"one " * 999), r"is compressed \(bzip2\): decompress it"),
        ("text.xz", lzma.compress(b"one " * 999), r"is compressed \(xz\): decompress it"),
        ("text.zst", b"\x28\xb5\x2f\xfd" + bytes(99), r"is compressed \(Zstandard\): decompress it"),
        ("zeros.dat", b"one" + bytes(500), "is no UTF-8 text: byte 3 is 0"),
        ("deep/utf16.txt", "one two three ".encode("utf-16") * 100, "is no UTF-8 text: "),
        ("late.txt", b"one two three " * 8000 + b"\xff", "is no UTF-8 text: .* position 112000"),
        ("train.bin", bytes(500), r"files of token ids: withdrawn; give rows with input_ids, .*docs/data\.md"),
        ("deep/corpus.idx", b"MMIDIDX", "files of token ids: withdrawn; give rows with input_ids"),
    ],
)
def test_files_that_are_no_text_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    for given in (file, tmp_path / "data"):
        with pytest.raises(ConfigError, match=f"{name}: {message}"):
            opened(given, tmp_path)


def test_text_is_known_by_its_beginning_also_where_that_ends_in_a_character(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" + "é" * 2**16, encoding="utf-8-sig")
    assert documents(opened(tmp_path / "text.txt", tmp_path)) == [[2, 1]]


@pytest.mark.parametrize("name", ["datasets", "transformers"])
def test_packages_that_are_missing_are_named(
    name: str, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_tokenizer(tmp_path / "model")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r': needs the extra "data": pip install datasets transformers'):
        opened(lines, tmp_path)


# -- tokenizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "model", "found"),
    [
        ("</s>", {}, 1),
        ({"content": "</s>", "lstrip": False, "__type": "AddedToken"}, {}, 1),
        (None, {"eos_token_id": 1}, 1),
        (None, {"eos_token_id": [2, 1]}, 2),
        (None, {"eos_token_id": None}, None),
        (None, {}, None),
    ],
)
def test_the_folder_names_the_end_of_a_text(
    tmp_path: Path, lines: Path, end: object, model: dict[str, object], found: Any
) -> None:
    word_tokenizer(tmp_path / "model", end=end)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **model}))
    ended = [] if found is None else [found]
    assert documents(opened(lines, tmp_path)) == [[3, 4, *ended], [*ended], [5, 2, 5, 5, *ended]]


@pytest.mark.parametrize("given", ["1", 1.0, True, ["</s>"], -1])
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, given: object, lines: Path) -> None:
    word_tokenizer(tmp_path / "model", end=None)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id = .*: should be the id of a token"):
        opened(lines, tmp_path)


def test_special_tokens_are_those_of_the_library(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "model", special=True)
    (tmp_path / "x.txt").write_text("one one one one one")
    assert documents(opened(tmp_path / "x.txt", tmp_path)) == [[0, 3, 3, 3, 3, 3, 1]]
    assert AutoTokenizer.from_pretrained(str(folder))("one one")["input_ids"] == [0, 3, 3, 1]


def test_a_folder_without_a_tokenizer_that_works_is_refused(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: there is no such folder, which should have a tokenizer"):
        opened(lines, tmp_path, tokenizer="nowhere")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="model: transformers cannot open its tokenizer: "):
        opened(lines, tmp_path)
    Tokenizer(WordLevel({"one": 0}, unk_token="?")).save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"corpus\.jsonl, line 1: the tokenizer cannot encode it: .*[Mm]issing"):
        opened(lines, tmp_path)


# -- what was tokenized once ----------------------------------------------------------------------------------


def test_a_text_is_tokenized_once_until_something_changes(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(lines, tmp_path)
    encoded: list[int] = []
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *given: (encoded.append(1), encode(*given))[1])
    assert documents(opened(lines, tmp_path)) == [[3, 4, 1], [1], [5, 2, 5, 5, 1]] and not encoded
    os.utime(lines, ns=(0, 0))
    opened(lines, tmp_path)
    assert len(encoded) == 1
    lines.write_text('{"text": "two"}')
    assert documents(opened(lines, tmp_path)) == [[4, 1]] and len(encoded) == 2
    opened(lines, tmp_path, tokenizer=str(word_tokenizer(tmp_path / "other", end="?")))
    assert len(encoded) == 3
    (tmp_path / "model" / "chat_template.jinja").write_text("x")
    opened(lines, tmp_path)
    assert len(encoded) == 4


def test_one_process_tokenizes_and_the_others_wait_for_it(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begun, go_on, encode = [], threading.Event(), threading.Event(), Encoder.encode

    def slow(encoder: Encoder, rows: Iterable[SourceRow]) -> Iterator[Example]:
        made.append(threading.get_ident())
        begun.set()
        assert go_on.wait(60)
        yield from encode(encoder, rows)

    monkeypatch.setattr(Encoder, "encode", slow)
    word_tokenizer(tmp_path / "model")
    found: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: found.append(documents(opened(lines, tmp_path)))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found == [[[3, 4, 1], [1], [5, 2, 5, 5, 1]]] * 2 and made == [threads[0].ident]


def test_a_cache_that_cannot_be_written_is_named(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/cache.*: cannot keep what was tokenized: Not a directory$"):
        opened(lines, tmp_path, cache=str(tmp_path / "file" / "cache"))
    full = rf"{tmp_path}/cache: cannot keep what was tokenized: \[Errno 27\] File too large$"
    with pytest.raises(ConfigError, match=full), files_of_at_most(100):
        opened(lines, tmp_path)
    assert not (tmp_path / "cache").exists()


def test_tokens_of_many_batches_are_read_across_their_borders(tmp_path: Path) -> None:
    """The library writes 1,000 rows together."""
    rows = [list(range(1 + number % 5)) for number in range(2500)]
    json_lines([{"input_ids": row} for row in rows], tmp_path / "x.jsonl")
    tokens = opened(tmp_path / "x.jsonl", tmp_path).tokens
    expected = np.concatenate(rows)
    assert len(tokens.ids) == len(expected) == tokens.starts[-1]
    for start in (0, 2990, 2999, 3000, len(expected) - 1):
        stop = min(start + 3500, len(expected))
        assert np.array_equal(tokens.ids.read(start, stop), expected[start:stop])
