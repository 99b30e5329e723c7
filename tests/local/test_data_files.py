"""Files of token ids: our own, nanoGPT's and Megatron's; what is checked before training."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_dynmo.data import DataConfig, Tokens, check_ids, holds_ids, open_data, read_megatron, read_tokens, write_tokens
from ds_dynmo.data import tokens as checking
from ds_dynmo.errors import ConfigError

DOCUMENTS = [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 9, 0]]
IDS = [token for document in DOCUMENTS for token in document]
STARTS = [0, 4, 6, 12]


def read(tokens: Tokens) -> tuple[list[int], list[int] | None]:
    return tokens.ids.tolist(), None if tokens.starts is None else tokens.starts.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_what_was_written_is_read(tmp_path: Path, dtype: str) -> None:
    write_tokens(tmp_path / "text.bin", [DOCUMENTS[0], [], *DOCUMENTS[1:]], dtype=dtype, vocab_size=10)  # type: ignore[arg-type]
    tokens = read_tokens(tmp_path / "text.bin")
    assert isinstance(tokens.ids, np.memmap) and tokens.ids.dtype == np.dtype(dtype)
    assert read(tokens) == (IDS, STARTS)
    assert json.loads((tmp_path / "text.json").read_text()) == {
        **{"dtype": dtype, "tokens": 12, "vocab_size": 10, "end_of_document": None, "documents": True}
    }


def test_files_are_little_endian(tmp_path: Path) -> None:
    write_tokens(tmp_path / "text.bin", [[1, 258]])
    assert (tmp_path / "text.bin").read_bytes() == b"\x01\x00\x02\x01"
    assert (tmp_path / "text.documents").read_bytes() == struct.pack("<2q", 0, 2)


def test_an_id_that_the_type_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"uint16 holds ids from 0 to 65535, got 3 to 65536"):
        write_tokens(tmp_path / "text.bin", [[3, 65536]])
    with pytest.raises(ConfigError, match="token ids should be integers, got float64"):
        write_tokens(tmp_path / "text.bin", [np.array([0.5])])
    with pytest.raises(ConfigError, match=r"text\.bin: cannot be written"):
        write_tokens(tmp_path / "nowhere" / "text.bin", [[1]])


def nanogpt(folder: Path, name: str = "train.bin", ids: Sequence[int] = IDS) -> Path:
    """Write what nanoGPT writes: no header."""
    np.asarray(ids, dtype=np.uint16).tofile(folder / name)
    return folder / name


def test_a_file_without_a_header_has_the_type_that_is_given(tmp_path: Path) -> None:
    path = nanogpt(tmp_path)
    assert not holds_ids(path, DataConfig()) and holds_ids(path, DataConfig(dtype="uint16"))
    assert read(read_tokens(path, DataConfig(dtype="uint16"))) == (IDS, None)
    with pytest.raises(
        ConfigError, match=r'train\.bin: has no header, and no train\.json beside it: "dtype" in the "d'
    ):
        open_data(path, vocabulary=10)
    path.with_suffix(".json").write_text('{"dtype": "uint16", "end_of_document": 0}')
    assert holds_ids(path, DataConfig())
    assert read(check_ids(read_tokens(path), 10)) == (IDS, STARTS)


def test_nanogpts_folder_has_both_splits(tmp_path: Path) -> None:
    nanogpt(tmp_path)
    nanogpt(tmp_path, "val.bin", [3, 3, 3])
    config = DataConfig(dtype="uint16")
    assert holds_ids(tmp_path, config)
    data = open_data(tmp_path, config, vocabulary=10)
    assert data.validation is not None
    assert (data.tokens.ids.tolist(), data.validation.ids.tolist()) == (IDS, [3, 3, 3])


def test_validation_on_nanogpts_folder_is_on_its_val_bin(tmp_path: Path) -> None:
    for name, train, validation in (("a", [1, 1, 1], [2, 2]), ("b", [3, 3], [4, 4])):
        (tmp_path / name).mkdir()
        nanogpt(tmp_path / name, ids=train)
        nanogpt(tmp_path / name, "val.bin", validation)
    config = DataConfig(dtype="uint16", validation=str(tmp_path / "b"))
    data = open_data(tmp_path / "a", config, vocabulary=10)
    assert data.validation is not None
    assert (data.tokens.ids.tolist(), data.validation.ids.tolist()) == ([1, 1, 1], [4, 4])
    (tmp_path / "b" / "val.bin").unlink()
    with pytest.raises(ConfigError, match=r"b/train\.bin: files of token ids are not read as text"):
        open_data(tmp_path / "a", config, vocabulary=10)


@pytest.mark.parametrize("name", ["val.bin", "deep/corpus.idx", "part.BIN"])
def test_token_files_among_text_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"12")
    for given in (DataConfig(dtype="uint16"), DataConfig()):
        assert not holds_ids(tmp_path, given)
    with pytest.raises(ConfigError, match=f"{name}: files of token ids are not read as text: give the file itself"):
        open_data(tmp_path, vocabulary=10, tokenizer="nowhere")


def test_what_is_said_of_bin_files_is_refused_for_other_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one")
    for given, named in (
        ({"dtype": "uint16"}, r"data\.dtype"),
        ({"dtype": "uint16", "end_of_document": 0}, r"data\.dtype, data\.end_of_document"),
    ):
        for path in (tmp_path / "text.txt", megatron(tmp_path)):
            with pytest.raises(ConfigError, match=f"{named}: says how a .bin file without an index is read"):
                open_data(path, DataConfig.model_validate(given), vocabulary=10, tokenizer="nowhere")


@pytest.mark.parametrize(
    ("header", "config", "message"),
    [
        ({"dtyp": "uint16"}, {}, r"train\.json\.dtyp.*dtype"),
        ({"dtype": "float32"}, {}, r"train\.json\.dtype"),
        ({"dtype": "uint16", "tokens": 11}, {}, r"train\.bin: holds 12 tokens of uint16, train\.json says 11"),
        ({"dtype": "uint32"}, {"dtype": "uint16"}, r'data\.dtype = "uint16": .*train\.json says "uint32"'),
        (
            {"dtype": "uint16", "end_of_document": 0},
            {"end_of_document": 9},
            r"data\.end_of_document = 9: .*train\.json says 0",
        ),
        ({"dtype": "uint16", "documents": True}, {}, r"train\.documents: cannot be read"),
    ],
)
def test_wrong_headers_are_refused(
    tmp_path: Path, header: dict[str, object], config: dict[str, object], message: str
) -> None:
    nanogpt(tmp_path).with_suffix(".json").write_text(json.dumps(header))
    with pytest.raises(ConfigError, match=message):
        read_tokens(tmp_path / "train.bin", DataConfig.model_validate(config))


def test_a_size_that_is_no_number_of_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"12345")
    with pytest.raises(ConfigError, match="5 bytes are no multiple of 4, the bytes of a uint32"):
        read_tokens(tmp_path / "train.bin", DataConfig(dtype="uint32"))


@pytest.mark.parametrize("starts", [[], [1, 12], [0, 11], [0, 8, 4, 12]])
def test_documents_that_are_not_in_the_text_are_refused(tmp_path: Path, starts: list[int]) -> None:
    write_tokens(tmp_path / "text.bin", DOCUMENTS)
    np.asarray(starts, dtype="<i8").tofile(tmp_path / "text.documents")
    with pytest.raises(ConfigError, match=r"text\.documents: should hold where documents begin, from 0 up to 12"):
        read_tokens(tmp_path / "text.bin")


# -- Megatron's format --------------------------------------------------------------------------------------


def megatron(
    folder: Path,
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
    places: Sequence[int] = (0, 8, 12),
    documents: Sequence[int] = (0, 2, 3),
) -> Path:
    """Write three sequences, of which the first two are one document."""
    np.asarray(IDS, dtype="<u2").tofile(folder / "corpus.v1_text.bin")
    index = struct.pack("<9sQBQQ", magic, version, code, 3, len(documents))
    index += struct.pack("<3i", 4, 2, 6) + struct.pack("<3q", *places) + struct.pack(f"<{len(documents)}q", *documents)
    (folder / "corpus.v1_text.idx").write_bytes(index)
    return folder / "corpus.v1_text.idx"


@pytest.mark.parametrize("suffix", [".idx", ".bin", ""])
def test_megatrons_format_is_read_by_either_name_and_by_its_prefix(tmp_path: Path, suffix: str) -> None:
    megatron(tmp_path)
    path = f"{tmp_path}/corpus.v1_text{suffix}"
    assert holds_ids(path, DataConfig())
    assert read(open_data(path, vocabulary=10).tokens) == (IDS, [0, 6, 12])
    (tmp_path / "corpus.v1_text.idx").write_text("something else")
    with pytest.raises(ConfigError, match=r"corpus\.v1_text\.idx: 14 bytes are too few for an index"):
        open_data(path, vocabulary=10)


def test_wrong_indices_are_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"magic": b"TNTIDX\x00\x00\x00"}, r"corpus\.v1_text\.idx: is no index of Megatron's: begins with b'TNTIDX"),
        ({"version": 2}, r"corpus\.v1_text\.idx: version 2 of Megatron's index: should be 1"),
        ({"code": 7}, "type 7 of the ids: should be one of 1, 2, 3, 4, 5, 8"),
        ({"code": 4}, r"do not follow each other in corpus\.v1_text\.bin"),
        ({"places": (0, 12, 8)}, r"do not follow each other in corpus\.v1_text\.bin"),
        ({"documents": (0, 4)}, "documents should begin at sequences 0 to 3"),
        ({"documents": (1, 3)}, "documents should begin at sequences 0 to 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_megatron(megatron(tmp_path, **changes))  # type: ignore[arg-type]
    index = megatron(tmp_path)
    whole = index.read_bytes()
    index.write_bytes(whole[:40])
    with pytest.raises(ConfigError, match="40 bytes, its 3 sequences need 94"):
        read_megatron(index)
    index.write_bytes(whole)
    with index.with_suffix(".bin").open("ab") as file:
        file.write(b"12")
    with pytest.raises(ConfigError, match=r"holds 13 tokens of uint16, corpus\.v1_text\.idx says 12"):
        read_megatron(index)


# -- the check ----------------------------------------------------------------------------------------------


def test_every_id_is_checked_and_the_first_wrong_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "TOKENS_AT_ONCE", 5)
    for place in (0, 4, 5, 11):
        ids = list(IDS)
        ids[place] = 10
        path = nanogpt(tmp_path, ids=ids)
        with pytest.raises(
            ConfigError,
            match=rf"train\.bin: token {place} of 12 is 10: the model's vocabulary has 10 entries, 0 to 9",
        ):
            open_data(path, DataConfig(dtype="uint16"), vocabulary=10)
    with pytest.raises(ConfigError, match="token 2 of 3 is -1"):
        check_ids(Tokens(np.array([1, 2, -1]), "x"), 10)
    with pytest.raises(ConfigError, match="x: end_of_document = 10: the model's vocabulary has 10 entries, 0 to 9"):
        check_ids(Tokens(np.array([1, 2]), "x", end_of_document=10), 10)
    with pytest.raises(ConfigError, match="x: there is not one token in it"):
        check_ids(Tokens(np.array([], dtype=np.uint16), "x"), 10)


def test_the_check_finds_documents_over_chunks_and_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "TOKENS_AT_ONCE", 5)
    monkeypatch.setattr(checking, "SECONDS_PER_LINE", 0.0)
    lines: list[str] = []
    found = check_ids(Tokens(np.array([*IDS, 5]), "x", end_of_document=0), 10, lines.append)
    assert read(found) == ([*IDS, 5], [*STARTS, 13])
    assert lines == [
        f"x: checked {done} of 13 tokens ({share})" for done, share in ((5, "38%"), (10, "77%"), (13, "100%"))
    ]
    monkeypatch.setattr(checking, "SECONDS_PER_LINE", 60.0)
    check_ids(found, 10, lines.append)
    assert len(lines) == 3
    nowhere = check_ids(Tokens(np.array(IDS), "x", end_of_document=77), 78)
    assert read(nowhere) == (IDS, [0, 12])


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a sparse file of more ids than are read at every start, of which every reading says so."""
    monkeypatch.setattr(checking, "SECONDS_PER_LINE", 0.0)
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(2 * (2**24 + 9))
    return tmp_path / "train.bin"


def lines_of(path: Path, vocabulary: int = 10, cache: str = "cache", **config: Any) -> list[str]:
    """Open a file, and return what was said: a line for each of its two chunks that was read."""
    lines: list[str] = []
    settings = DataConfig(dtype="uint16", cache=str(path.parent / cache), **config)
    open_data(path, settings, vocabulary=vocabulary, log_progress=lines.append)
    return lines


def put(path: Path, place: int, value: int, *, later: bool) -> None:
    """Write an id into a file; its time stays as it was, or is a second later."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(2 * place)
        file.write(struct.pack("<H", value))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later * 10**9))


def test_a_large_file_is_read_once_until_it_changes(large: Path) -> None:
    assert len(lines_of(large)) == 2 and lines_of(large) == lines_of(large, vocabulary=11) == []
    put(large, 5, 10, later=True)
    with pytest.raises(ConfigError, match=r"train\.bin: token 5 of 16777225 is 10: .* has 10 entries"):
        lines_of(large)
    assert lines_of(large, vocabulary=11) == []  # what was read then is known too
    with pytest.raises(ConfigError, match=r"token 5 of 16777225 is 10"):
        lines_of(large)
    put(large, 4097 * 4, 12, later=False)  # of those that are compared
    with pytest.raises(ConfigError, match=r"token 16388 of 16777225 is 12: .* has 11 entries"):
        lines_of(large, vocabulary=11)
    with large.open("ab") as file:
        file.write(struct.pack("<H", 13))
    assert len(lines_of(large, vocabulary=14)) == 2


def test_documents_of_a_large_file_are_found_once(large: Path) -> None:
    put(large, 7, 3, later=True)
    put(large, 2**24 + 1, 3, later=True)
    settings = DataConfig(dtype="uint16", end_of_document=3, cache=str(large.parent / "cache"))
    for _ in range(2):
        starts = open_data(large, settings, vocabulary=10).tokens.starts
        assert starts is not None and starts.tolist() == [0, 8, 2**24 + 2, 2**24 + 9]
    assert lines_of(large, end_of_document=3) == [] and len(lines_of(large)) == 2


def test_ranks_of_a_machine_read_a_large_file_once(large: Path) -> None:
    with ThreadPoolExecutor(4) as ranks:
        assert sorted(map(len, ranks.map(lines_of, [large] * 4))) == [0, 0, 0, 2]


def test_a_large_file_is_read_at_every_start_where_nothing_can_be_kept(large: Path) -> None:
    assert [len(lines_of(large, cache="train.bin/cache")) for _ in range(2)] == [2, 2]
    lines_of(large)
    (kept,) = (large.parent / "cache").rglob("*.npz")
    kept.write_bytes(b"")  # damaged
    assert len(lines_of(large)) == 2
