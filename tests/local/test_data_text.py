"""Text as data: tokenizers of a model's folder, JSON lines, and what was tokenized once."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from ds_dynmo.data import DataConfig, TokenData, Tokenizer, cache, holds_ids, open_data
from ds_dynmo.errors import ConfigError

WORDS = {"<s>": 0, "</s>": 1, "?": 2, "one": 3, "two": 4, "three": 5}


def tokenizer(folder: Path, *, end: object = "</s>", special: bool = False) -> Tokenizer:
    """Write a tokenizer of words, and open it."""
    folder.mkdir(exist_ok=True)
    made = LibraryTokenizer(WordLevel(WORDS, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    if special:
        made.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.enable_truncation(3)
    made.enable_padding(length=7)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return Tokenizer(folder)


def documents(data: TokenData) -> list[list[int]]:
    starts = data.tokens.starts
    assert starts is not None
    return [data.tokens.ids[start:stop].tolist() for start, stop in zip(starts, starts[1:])]


def opened(path: Path, folder: Path, **changes: Any) -> list[list[int]]:
    config = DataConfig(**{"cache": str(folder / "cache"), **changes})
    return documents(open_data(path, config, vocabulary=6, tokenizer=tokenizer(folder / "model").folder))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one two"}\n\n{"text": "", "other": 1}\n{"text": "three four\\nthree three"}\n')
    return path


def test_a_json_line_is_a_document(lines: Path, tmp_path: Path) -> None:
    assert opened(lines, tmp_path) == [[3, 4, 1], [1], [5, 2, 5, 5, 1]]


def test_every_file_of_a_folder_is_a_document(tmp_path: Path, lines: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "a").mkdir(parents=True)
    (folder / "b.txt").write_text("two one", encoding="utf-8-sig")
    (folder / "a" / "c.md").write_text("three")
    lines.rename(folder / "z.jsonl")
    assert opened(folder, tmp_path) == [[5, 1], [4, 3, 1], [3, 4, 1], [1], [5, 2, 5, 5, 1]]
    assert opened(folder / "b.txt", tmp_path) == [[4, 3, 1]]
    assert not holds_ids(folder, DataConfig())


def test_a_text_is_in_the_field_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.ndjson").write_text('{"content": "one"}')
    assert opened(tmp_path / "x.ndjson", tmp_path, field="content") == [[3, 1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "one"}\n{"txt": "one"}', r'x\.jsonl, line 2: should be an object with a text as "text"'),
        (b'["one"]', r'line 1: should be an object with a text as "text"'),
        (b'{"text": 3}', "line 1: should be"),
        (b'{"text": "one \\ud800"}', "line 1: should be"),
        (b'\n{"text": "one"', "line 2: is no JSON: "),
        (b"[" * 10**5, "line 1: is no JSON: "),
        (b'{"text": "one", "n": ' + b"9" * 5000 + b"}", "line 1: is no JSON: "),
        (b'{"text": "\xff"}', r"x\.jsonl: is no UTF-8 text: .* position 10"),
        (b"", r"x\.jsonl: there is not one token in it"),
    ],
)
def test_wrong_lines_are_named_and_leave_nothing(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "x.jsonl", tmp_path)
    assert not content or {path.suffix for path in tmp_path.glob("cache/*")} <= {".lock"}


@pytest.mark.parametrize(
    ("end", "model", "found"),
    [
        ("</s>", {}, 1),
        ({"content": "</s>", "lstrip": False}, {}, 1),
        (None, {"eos_token_id": 1}, 1),
        (None, {"eos_token_id": [2, 1]}, 2),
        (None, {"eos_token_id": None}, None),
        (None, {}, None),
    ],
)
def test_the_folder_names_the_end_of_a_text(
    tmp_path: Path, end: object, model: dict[str, object], found: object
) -> None:
    tokenizer(tmp_path, end=end)
    (tmp_path / "config.json").write_text(json.dumps(model))
    opened = Tokenizer(tmp_path)
    assert opened.end == found
    assert list(opened.encode(["one", "two two"])) == [
        [3, *([found] if found else [])],
        [4, 4, *([found] if found else [])],
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "<end>"},
        {"pad_token": {"content": "<end>", "special": True}, "eos_token": "</s>", "add_bos_token": True},
        {"added_tokens_decoder": {"0": {"content": "<s>"}, "6": {"content": "<end>"}}},
        {"additional_special_tokens": ["one", "<end>"]},
        {"extra_special_tokens": {"image_token": "<end>"}},
    ],
)
def test_tokens_that_the_library_would_add_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"config\.json names tokens that tokenizer\.json lacks: '<end>'; .*save_pr"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("end", "model", "message"),
    [
        (3, {}, r"tokenizer_config\.json: eos_token = 3: should be a text"),
        ({"text": "</s>"}, {}, r"tokenizer_config\.json: eos_token = .*: should be a text"),
        (None, {"eos_token_id": 6}, r"config\.json: eos_token_id = 6: should be the id of a token of tokenizer\.json"),
        (None, {"eos_token_id": -1}, "eos_token_id = -1: should be the id"),
        (None, {"eos_token_id": 1.0}, "eos_token_id = 1.0: should be the id"),
        (None, {"eos_token_id": True}, "eos_token_id = True: should be the id"),
        (None, {"eos_token_id": ["</s>"]}, r"eos_token_id = \['</s>'\]: should be the id"),
    ],
)
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, end: object, model: dict[str, Any], message: str) -> None:
    tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError, match=message):
        Tokenizer(tmp_path)


def test_words_that_a_tokenizer_cannot_encode_are_an_error(tmp_path: Path) -> None:
    LibraryTokenizer(WordLevel({"one": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: tokenizers cannot encode with it: .*[Mm]issing"):
        list(Tokenizer(tmp_path).encode(["two"]))


def test_special_tokens_are_those_of_the_library(tmp_path: Path) -> None:
    assert list(tokenizer(tmp_path, special=True).encode(["one one one one one"])) == [[0, 3, 3, 3, 3, 3, 1]]
    from transformers import PreTrainedTokenizerFast

    library = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert library("one one", truncation=False, padding=False)["input_ids"] == [0, 3, 3, 1]


def test_a_vocabulary_that_is_too_small_is_named(lines: Path, tmp_path: Path) -> None:
    config = DataConfig(cache=str(tmp_path / "cache"))
    with pytest.raises(
        ConfigError, match=r"corpus\.jsonl: token 4 of 9 is 5: the model's vocabulary has 5 entries, 0 to 4"
    ):
        open_data(lines, config, vocabulary=5, tokenizer=tokenizer(tmp_path / "model").folder)


def test_text_needs_a_tokenizer(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r'corpus\.jsonl: is text, and no tokenizer is given: "tokenizer" in the "data"'
    ):
        open_data(lines, vocabulary=6)
    (tmp_path / "vocab.json").touch()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; of another kind of tokenizer .*save_pretrained"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: tokenizers cannot read it"):
        Tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs tokenizers, .* pip install tokenizers"):
        Tokenizer(tmp_path)


# -- what was tokenized once --------------------------------------------------------------------------------


def test_a_text_is_tokenized_once_until_something_changes(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(lines, tmp_path)
    encoded: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda *given: (encoded.append(1), encode(*given))[1])
    assert opened(lines, tmp_path) == [[3, 4, 1], [1], [5, 2, 5, 5, 1]] and not encoded
    os.utime(lines, ns=(0, 0))
    opened(lines, tmp_path)
    assert len(encoded) == 1
    lines.write_text('{"text": "two"}')
    assert opened(lines, tmp_path) == [[4, 1]] and len(encoded) == 2
    config = DataConfig(cache=str(tmp_path / "cache"), tokenizer=str(tokenizer(tmp_path / "other", end="?").folder))
    open_data(lines, config, vocabulary=6, tokenizer="nowhere")
    assert len(encoded) == 3


def test_processes_wait_for_the_one_that_tokenizes(tmp_path: Path) -> None:
    """A second one reads what the first has written, and nothing before that is complete."""
    made, begun, go_on = [], threading.Event(), threading.Event()

    def slow() -> Iterator[list[int]]:
        made.append("first")
        yield [1, 2]
        begun.set()
        assert go_on.wait(60)
        yield [3]

    def other() -> Iterator[list[int]]:
        made.append("second")
        yield [4]

    found: dict[str, list[int]] = {}

    def get(name: str, source: Any) -> None:
        tokens = cache.cached_tokens(tmp_path, "key", source, name=name, dtype="uint16", log_progress=lambda line: None)
        found[name] = tokens.ids.tolist()

    threads = [threading.Thread(target=get, args=pair) for pair in (("a", slow), ("b", other))]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    assert not found
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3]} and made == ["first"]


def test_what_a_killed_process_left_is_made_anew(tmp_path: Path) -> None:
    def get() -> list[int]:
        tokens = cache.cached_tokens(
            tmp_path, "key", lambda: [[7]], name="x", dtype="uint16", log_progress=lambda line: None
        )
        return tokens.ids.tolist()

    get()
    (kept,) = (path for path in tmp_path.iterdir() if path.is_dir())
    kept.rename(f"{kept}.new")  # as one that was not renamed yet
    (Path(f"{kept}.new") / "text.bin").write_bytes(b"")
    assert get() == [7] and [path.name for path in tmp_path.iterdir() if path.is_dir()] == [kept.name]


def test_a_cache_that_has_the_text_is_only_read(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(lines, tmp_path)

    def refuse(path: Path, *given: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(cache, "_alone", refuse)
    monkeypatch.setattr(Path, "mkdir", lambda path, *given, **options: path.is_dir() or refuse(path))
    config = DataConfig(cache=str(tmp_path / "cache"))
    found = open_data(lines, config, vocabulary=6, tokenizer=tmp_path / "model")
    assert documents(found) == [[3, 4, 1], [1], [5, 2, 5, 5, 1]]
    lines.write_text('{"text": "two"}')
    with pytest.raises(ConfigError, match=r"cache: cannot keep what was tokenized: .*Permission denied"):
        open_data(lines, config, vocabulary=6, tokenizer=tmp_path / "model")


def test_a_cache_that_cannot_be_written_is_named(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/cache: cannot keep what was tokenized"):
        opened(lines, tmp_path, cache=str(tmp_path / "file" / "cache"))
