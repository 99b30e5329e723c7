"""Data of the training command: what becomes token ids and what bytes, and what is refused before training."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ds_dynmo.cli.training.data import identity_of
from ds_dynmo.cli.training.options import TrainingRun, prepare
from ds_dynmo.data import TokenData, Tokens
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ByteText, load_text
from ds_dynmo.models.huggingface.trial import random_model
from tests.local.huggingface_families import tiny_values
from tests.local.test_data_text import tokenizer
from tests.saved_runs import save_metadata

OURS = {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 4}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of a model without a tokenizer, whose vocabulary is that of the tests' tokenizer."""
    folder = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=6, max_position_embeddings=8)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """Make the same with a tokenizer."""
    tokenizer(tmp_path / "model")
    for file in plain.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "model"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("one two three " * 100)
    return tmp_path / "text.txt"


def prepared(folder: Path, model: dict[str, Any], *flags: str, **data: Any) -> TrainingRun:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD"},
        "dynmo": {},
        "model": model,
        **({"data": {"cache": str(folder / "cache"), **data}} if data else {}),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return prepare(["--deepspeed_config", str(folder / "config.json"), *flags])


def huggingface(path: Path, **changes: Any) -> dict[str, Any]:
    return {"huggingface": str(path), "sequence_length": 4, **changes}


def test_our_own_gpt_reads_bytes_by_default(tmp_path: Path, text: Path) -> None:
    for given in (text, tmp_path):  # a folder too, whatever is in it
        run = prepared(tmp_path, OURS, "--data", str(given))
        assert isinstance(run.text, ByteText)
        assert bytes(run.text.tokens[len(run.text.tokens) - 14 + torch.arange(14)].tolist()) == b"one two three "
    assert isinstance(prepared(tmp_path, OURS).text, ByteText)


def test_a_bin_file_is_bytes_only_where_they_are_asked_for(tmp_path: Path) -> None:
    ids = tmp_path / "nanogpt" / "train.bin"
    ids.parent.mkdir()
    np.zeros(500, dtype=np.uint16).tofile(ids)
    for given in (ids, ids.parent):
        with pytest.raises(ConfigError, match=r'train\.bin: token ids need "dtype" in the "data" section.*train\.json'):
            prepared(tmp_path, OURS, "--data", str(given))
        run = prepared(tmp_path, {**OURS, "tokens": "bytes"}, "--data", str(given))
        assert isinstance(run.text, ByteText) and len(run.text.tokens) == 1000


def test_token_files_in_a_folder_are_bytes_only_where_they_are_asked_for(tmp_path: Path, text: Path) -> None:
    (tmp_path / "val.bin").write_bytes(b"12")
    with pytest.raises(ConfigError, match=r'val\.bin: files of token ids are not read as text.*"tokens": "bytes"'):
        prepared(tmp_path, OURS, "--data", str(tmp_path))
    prepared(tmp_path, {**OURS, "tokens": "bytes"}, "--data", str(tmp_path))
    with pytest.raises(ConfigError, match='--data "": should name a file or a folder'):
        prepared(tmp_path, OURS, "--data", "")


NO_TEXT = {
    "text.jsonl.gz": gzip.compress(b"".join(b'{"text": "%d"}\n' % number for number in range(999))),
    "table.parquet": b"PAR1\x15\x04\x15\xc0" + bytes(500),
    "zeros.dat": b"one" + bytes(500),
    "deep/utf16.txt": "one two three ".encode("utf-16") * 100,
    "late.txt": b"one two three " * 4000 + b"\xff" * 500,
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_file_that_is_no_text_is_bytes_only_where_they_are_asked_for(name: str, tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "data" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(NO_TEXT[name])
    for given in (file, tmp_path / "data"):
        for model, remedy in ((OURS, '.*"tokens": "bytes"'), (huggingface(folder), "")):
            with pytest.raises(ConfigError, match=f"{name}: is no UTF-8 text: .*decompress it, .*JSON lines{remedy}"):
                prepared(tmp_path, model, "--data", str(given))
        run = prepared(tmp_path, {**OURS, "tokens": "bytes"}, "--data", str(given))
        assert isinstance(run.text, ByteText) and len(run.text.tokens) == len(NO_TEXT[name])


def test_text_is_known_by_its_beginning_also_where_that_ends_in_a_character(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" + "é" * 2**16, encoding="utf-8-sig")
    prepared(tmp_path, OURS, "--data", str(tmp_path / "text.txt"))


def test_a_folders_own_tokenizer_reads_text(tmp_path: Path, folder: Path, text: Path, capsys: Any) -> None:
    run = prepared(tmp_path, huggingface(folder), "--data", str(text), field="text")
    assert isinstance(run.text, TokenData) and run.text.tokens.ids.tolist() == [*[3, 4, 5] * 100, 1]
    assert capsys.readouterr().out == f"{text}: 301 tokens\n"
    run = prepared(tmp_path, huggingface(folder, tokens=None), "--data", str(text), documents="joined")
    assert isinstance(run.text, TokenData)


SHIPPED = json.loads((Path(__file__).parents[2] / "ds_configs" / "finetune.json").read_text())["data"]


def lines_of(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text('{"text": "one two three"}\n' * 60)
    return tmp_path / "text.jsonl"


def test_separate_documents_are_packed_where_the_model_keeps_them_apart(
    tmp_path: Path, folder: Path, capsys: Any
) -> None:
    assert SHIPPED == {"documents": "separate"}
    run = prepared(tmp_path, huggingface(folder), "--data", str(lines_of(tmp_path)), **SHIPPED)
    assert run.packed and run.text.documents == "packed" and '"separate"' not in capsys.readouterr().out
    run = prepared(tmp_path, huggingface(folder, verified=False), "--data", str(lines_of(tmp_path)), **SHIPPED)
    assert not run.packed and run.text.documents == "padded"
    assert '"separate": "padded", one document in each sequence: model.verified = false\n' in capsys.readouterr().out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_separate_documents_are_padded_where_packed_ones_would_see_each_other(
    rank: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    tokenizer(tmp_path / "model")
    random_model(tiny_values("gpt_oss"), "eager").save_pretrained(tmp_path / "model")
    model, given = huggingface(tmp_path / "model"), ("--data", str(lines_of(tmp_path)))
    run = prepared(tmp_path, model, *given, **SHIPPED)
    assert not run.packed and run.text.documents == "padded"
    said = [line for line in capsys.readouterr().out.splitlines() if '"separate"' in line]
    assert len(said) == (1 if rank == "0" else 0)
    assert all(': "padded", one document' in line and "gpt_oss" in line for line in said)
    with pytest.raises(ConfigError, match=r'packed documents see each other.*should be "padded".* or "joined"'):
        prepared(tmp_path, model, *given, documents="packed")
    own = {**OURS, "case": {"kind": "early_exit", "method": "calm", "depths": [1]}}
    data = {"tokenizer": str(tmp_path / "model")}
    assert prepared(tmp_path, own, *given, **SHIPPED, **data).text.documents == "padded"
    with pytest.raises(ConfigError, match=r'early_exit cannot be combined with packed .*should be "padded"'):
        prepared(tmp_path, own, *given, documents="packed", **data)


def test_our_own_gpt_reads_text_with_a_tokenizer_that_is_named(tmp_path: Path, folder: Path, text: Path) -> None:
    run = prepared(tmp_path, OURS, "--data", str(text), tokenizer=str(folder))
    assert isinstance(run.text, TokenData) and run.text.tokens.ids.tolist() == [*[3, 4, 5] * 100, 1]


def test_bytes_can_be_asked_for(tmp_path: Path, folder: Path, text: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size 6: should be at least 256"):
        prepared(tmp_path, huggingface(folder, tokens="bytes"), "--data", str(text))
    run = prepared(tmp_path, {**OURS, "tokens": "bytes"}, "--data", str(text))
    assert isinstance(run.text, ByteText)


@pytest.mark.parametrize("kind", ["own", "plain", "folder"])
def test_token_ids_are_read_by_any_model(kind: str, tmp_path: Path, plain: Path, folder: Path) -> None:
    np.asarray([1, 2, 3, 4, 5] * 100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    model = {"own": OURS, "plain": huggingface(plain), "folder": huggingface(folder)}[kind]
    run = prepared(tmp_path, model, "--data", str(tmp_path / "train.bin"), dtype="uint16")
    assert isinstance(run.text, TokenData) and len(run.text.tokens.ids) == 500


def test_what_cannot_be_trained_is_refused_with_the_numbers(
    tmp_path: Path, plain: Path, folder: Path, text: Path
) -> None:
    ids = tmp_path / "train.bin"
    np.asarray([1, 2, 3, 4, 300] * 100, dtype=np.uint16).tofile(ids)

    def refused(message: str, model: dict[str, Any], *flags: str, **data: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            prepared(tmp_path, model, *flags, **data)

    given = ("--data", str(text))
    no_tokenizer = (
        r'model\.huggingface = ".*": {}, which text needs: "tokenizer" in the "data" section .*"tokens": "bytes"'
    )
    refused(no_tokenizer.format("has no tokenizer"), huggingface(plain), *given)
    refused(no_tokenizer.format("has no tokenizer"), huggingface(plain))
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    refused(
        no_tokenizer.format(r"holds a tokenizer \(tokenizer_config\.json, vocab\.json\) but no tokenizer\.json"),
        huggingface(folder),
        *given,
    )
    (folder / "vocab.json").rename(folder / "tokenizer.json")
    refused("--data: should name text or token ids for a model with a tokenizer", huggingface(folder))
    refused(
        r"train\.bin: token 4 of 500 is 300: .* has 6 entries", huggingface(plain), "--data", str(ids), dtype="uint16"
    )
    refused(r"train\.bin: token 4 of 500 is 300: .* has 256 entries", OURS, "--data", str(ids), dtype="uint16")
    refused(r"train\.bin: has no header", huggingface(folder), "--data", str(ids))
    refused("sequence_length 9: the model has 8 positions", huggingface(folder, sequence_length=9), *given)
    refused(
        "100 tokens are too few: .* 8 tokens in the 5%",
        huggingface(folder, sequence_length=8),
        "--data",
        str(short(text)),
    )
    refused(r"data\.cache, data\.documents: cannot be given for raw bytes", OURS, *given, documents="packed")
    refused(r'data\.documents = "pack": .*packed', huggingface(folder), *given, documents="pack")
    refused(r"data\.fields = .*: unknown key.*field", huggingface(folder), *given, fields="x")
    refused("nowhere: no such file or folder", huggingface(folder), "--data", "nowhere")
    refused(r"nowhere: has no tokenizer\.json", OURS, *given, tokenizer="nowhere")
    refused("nowhere: no such file or folder", huggingface(folder), *given, validation="nowhere")


def test_a_model_can_be_named_by_a_change_and_exported(tmp_path: Path, folder: Path, text: Path) -> None:
    block, given = {"sequence_length": 4}, ("--data", str(text), "--set", f"model.huggingface={folder}")
    run = prepared(tmp_path, {**block, "huggingface": "nowhere"}, *given)
    assert run.model.huggingface == str(folder) and run.export is None
    run = prepared(tmp_path, block, *given, "--set", "model.peft={}")
    assert run.model.peft == {}
    save, out = ("--save", str(tmp_path / "run")), tmp_path / "out"
    assert prepared(tmp_path, block, *given, *save, "--export", str(out)).export == out
    out.mkdir()
    (out / "config.json").touch()
    for model, flags, message in (
        (block, ("--set", "model.huggingface=nowhere"), r"model\.huggingface: nowhere: there is no such folder"),
        ({**block, "layers": 2}, given, "model.*huggingface.*layers"),
        (block, (*given, "--export", str(tmp_path / "new")), "--export .*new: needs --save DIR"),
        (block, (*given, *save, "--export", str(out)), "--export .*out: is there already"),
        (
            OURS,
            (*save, "--export", str(tmp_path / "new")),
            "--export .*new: needs a Hugging Face model: --set model.huggingface=FOLDER",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            prepared(tmp_path, model, *flags)


def save_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Let ``folder`` hold a checkpoint whose run has these facts."""
    save_metadata(folder / "global_step5", facts)


def short(text: Path) -> Path:
    """Give a text of 100 tokens."""
    path = text.with_name("short.txt")
    path.write_text("one two three " * 33)
    return path


def test_a_run_is_resumed_on_the_same_tokens(tmp_path: Path, folder: Path, text: Path) -> None:
    model = huggingface(folder)
    run = prepared(tmp_path, model, "--data", str(text), documents="joined")
    said = {"step": 5, "steps": 8, "partition": [0, 4], "cases": {}}
    said["model"] = run.model.model_dump(mode="json")
    resume = ("--resume", str(tmp_path))
    assert isinstance(run.text, TokenData)
    for kept in ({}, {"data": run.text.identity}):  # saved before there was such a key, and since
        save_facts(tmp_path, {**said, **kept})
        prepared(tmp_path, model, "--data", str(text), *resume, documents="joined")
    (other := run.text.tokens.ids.copy())[150] ^= 1
    others = {**run.text.identity, "tokens": 300}, TokenData(replace(run.text.tokens, ids=other)).identity
    assert others[1]["sample"] != run.text.identity["sample"]
    older = {key: value for key, value in run.text.identity.items() if key != "boundaries"}
    save_facts(tmp_path, {**said, "data": older})
    prepared(tmp_path, model, "--data", str(text), *resume, documents="joined")
    for data, was in (
        (others[0], "other data than this run has: tokens was 300, is 301$"),
        (others[1], "other data than this run has: sample was [0-9a-f]*, is [0-9a-f]*$"),
        (None, "raw bytes, this run has token ids$"),
    ):
        save_facts(tmp_path, {**said, "data": data})
        with pytest.raises(ConfigError, match=f"--resume .*: was trained on {was}"):
            prepared(tmp_path, model, "--data", str(text), *resume, documents="joined")


def test_a_run_is_resumed_on_the_same_documents_if_they_are_kept_apart() -> None:
    ids, starts = np.arange(100), np.array([0, 40, 100])
    identities = [
        TokenData(Tokens(ids, "x", beginnings), documents=kind).identity  # type: ignore[arg-type]
        for kind in ("joined", "packed")
        for beginnings in (starts, np.array([0, 50, 100]))
    ]
    assert identities[0] == identities[1] and identities[2] != identities[3]
    data = [TokenData(Tokens(ids, "x"), validation=Tokens(other, "x")) for other in (ids, ids[::-1])]
    assert data[0].identity == data[1].identity and data[0].digest != data[1].digest


def test_a_resume_file_with_other_things_in_it_is_refused(tmp_path: Path, text: Path) -> None:
    said: dict[str, Any] = {"step": 5, "steps": 8, "partition": [0, 4], "cases": {}}
    said["model"] = prepared(tmp_path, OURS, "--data", str(text)).model.model_dump(mode="json")
    for change, message in (
        ({"step": "5"}, r"mp_rank_00_model_states\.pt: lacks step"),
        ({"steps": None, "cases": []}, r"mp_rank_00_model_states\.pt: lacks cases, steps"),
        ({"data": "x"}, "was trained on token ids, this run has raw bytes"),
    ):
        save_facts(tmp_path, {**said, **change})
        with pytest.raises(ConfigError, match=message):
            prepared(tmp_path, OURS, "--data", str(text), "--resume", str(tmp_path))


def test_an_empty_path_is_refused(tmp_path: Path) -> None:
    for option in ("--save", "--resume", "--export", "--report", "--record"):
        with pytest.raises(ConfigError, match=f'argument {option}: should name a file or a folder, got ""'):
            prepared(tmp_path, OURS, option, "")


def test_a_run_on_bytes_is_resumed_on_the_same_bytes(tmp_path: Path, text: Path) -> None:
    run = prepared(tmp_path, OURS, "--data", str(text))
    said = {"step": 5, "steps": 8, "partition": [0, 4], "cases": {}}
    said |= {"model": run.model.model_dump(mode="json"), "data": identity_of(run.text)}
    for kept in (said, {**said, "data": None}):  # None: saved by an earlier version
        save_facts(tmp_path, kept)
        prepared(tmp_path, OURS, "--data", str(text), "--resume", str(tmp_path))
    save_facts(tmp_path, said)
    text.write_text("two one three " * 100)
    with pytest.raises(ConfigError, match=r"on other data than this run has: sha256 was [0-9a-f]*, is [0-9a-f]*$"):
        prepared(tmp_path, OURS, "--data", str(text), "--resume", str(tmp_path))


def test_bytes_of_a_large_text_are_hashed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    with text.open("wb") as file:
        file.truncate(2**25)
    expected = {"bytes": 2**25, "sha256": hashlib.sha256(bytes(2**25)).hexdigest()[:16]}
    assert identity_of(load_text(text)) == expected
    (kept,) = (tmp_path / "cache").rglob("*.npz")
    written = kept.stat().st_mtime_ns
    assert identity_of(load_text(text)) == expected and kept.stat().st_mtime_ns == written
    with text.open("r+b") as file:
        file.seek(3)
        file.write(b"x")
    changed = hashlib.sha256(b"\0\0\0x" + bytes(2**25 - 4)).hexdigest()[:16]
    assert identity_of(load_text(text)) == {"bytes": 2**25, "sha256": changed}
    assert len([*(tmp_path / "cache").rglob("*.npz")]) == 2
