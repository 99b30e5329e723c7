"""Data of the training command: what becomes token ids and what bytes, and what is refused before training."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from ds_dynmo.cli.training.data import identity_of
from ds_dynmo.cli.training.options import TrainingRun, prepare
from ds_dynmo.data import Column, TokenData, Tokens
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ByteText, load_text
from ds_dynmo.models.huggingface.trial import random_model
from tests.support.huggingface_families import tiny_values
from tests.support.saved_runs import save_metadata
from tests.support.words import word_tokenizer

OURS = {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 4}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
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
    word_tokenizer(tmp_path / "model")
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
        assert bytes(run.text.read(len(run.text) - 14, len(run.text))) == b"one two three "
    assert isinstance(prepared(tmp_path, OURS).text, ByteText)


NO_TEXT = {
    "train.bin": bytes(1000),
    "text.txt.gz": gzip.compress(b"one two three " * 999),
    "late.txt": b"one two three " * 4000 + b"\xff" * 500,
    "table.parquet": b"PAR1",
    "chat.jsonl": b'{"messages": []}\n' * 100,
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_file_that_is_no_text_is_bytes_only_where_they_are_asked_for(name: str, tmp_path: Path) -> None:
    file = tmp_path / "data" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(NO_TEXT[name])
    for given in (file, tmp_path / "data"):
        with pytest.raises(ConfigError, match=name):
            prepared(tmp_path, {**OURS, "vocab_size": 256}, "--data", str(given))
        if name in ("train.bin", "late.txt"):
            run = prepared(tmp_path, {**OURS, "tokens": "bytes"}, "--data", str(given))
            assert isinstance(run.text, ByteText) and len(run.text.tokens) == len(NO_TEXT[name])
    with pytest.raises(ConfigError, match='--data "": should name a file or a folder'):
        prepared(tmp_path, OURS, "--data", "")


def test_what_is_no_text_says_how_its_bytes_are_trained(tmp_path: Path) -> None:
    for name in ("train.bin", "late.txt"):
        (tmp_path / name).write_bytes(NO_TEXT[name])
        with pytest.raises(ConfigError, match=rf'{name}: .*; "tokens": "bytes" in the "model" section trains on'):
            prepared(tmp_path, OURS, "--data", str(tmp_path / name))


def test_a_folders_own_tokenizer_reads_text(tmp_path: Path, folder: Path, text: Path, capsys: Any) -> None:
    run = prepared(tmp_path, huggingface(folder), "--data", str(text), field="text")
    assert isinstance(run.text, TokenData) and run.text.tokens.ids.read(0, 301).tolist() == [*[3, 4, 5] * 100, 1]
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
    word_tokenizer(tmp_path / "model")
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
    assert isinstance(run.text, TokenData) and run.text.tokens.ids.read(0, 301).tolist() == [*[3, 4, 5] * 100, 1]


def test_bytes_can_be_asked_for(tmp_path: Path, folder: Path, text: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size 6: should be at least 256"):
        prepared(tmp_path, huggingface(folder, tokens="bytes"), "--data", str(text))
    run = prepared(tmp_path, {**OURS, "tokens": "bytes"}, "--data", str(text))
    assert isinstance(run.text, ByteText)


@pytest.mark.parametrize("kind", ["own", "plain", "folder"])
def test_token_ids_are_read_by_any_model(kind: str, tmp_path: Path, plain: Path, folder: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2, 3, 4, 5]}\n' * 100)
    model = {"own": OURS, "plain": huggingface(plain), "folder": huggingface(folder)}[kind]
    run = prepared(tmp_path, model, "--data", str(tmp_path / "ids.jsonl"), documents="packed")
    assert isinstance(run.text, TokenData) and len(run.text.tokens.ids) == 500


def test_what_cannot_be_trained_is_refused_with_the_numbers(
    tmp_path: Path, plain: Path, folder: Path, text: Path
) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [1, 2, 3, 4, 300]}\n' * 100)

    def refused(message: str, model: dict[str, Any], *flags: str, **data: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            prepared(tmp_path, model, *flags, **data)

    given = ("--data", str(text))
    no_tokenizer = r'text\.txt: is text, and no tokenizer is given: "tokenizer" in the "data" section names a folder'
    refused(no_tokenizer, huggingface(plain), *given, documents="packed")
    refused("--data: should name text for a model with a tokenizer", huggingface(folder))
    for model, vocabulary in ((huggingface(plain), 6), (OURS, 256)):
        message = rf"ids\.jsonl, line 1: token 4 of 5 is 300: .* has {vocabulary} entries"
        refused(message, model, "--data", str(ids), documents="packed")
    withdrawn = "withdrawn; give rows with input_ids, as JSON lines, Parquet or by Dataset"
    refused(rf"data\.dtype: {withdrawn}", OURS, "--data", str(ids), dtype="uint16")
    refused(rf"data\.end_of_document: {withdrawn}", OURS, "--data", str(ids), end_of_document=1)
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
    refused("nowhere: there is no such folder", OURS, *given, tokenizer="nowhere")
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
    said = {"step": 5, "steps": 8, "stages": 1, "partition": [0, 4], "cases": {}}
    said |= {"model": run.model.model_dump(mode="json"), "config": run.config}
    resume = ("--resume", str(tmp_path))
    assert isinstance(run.text, TokenData)
    for kept in ({}, {"data": run.text.identity}):  # saved before there was such a key, and since
        save_facts(tmp_path, {**said, **kept})
        prepared(tmp_path, model, "--data", str(text), *resume, documents="joined")
    (other := run.text.tokens.ids.read(0, 301).copy())[150] ^= 1
    changed = replace(run.text.tokens, ids=Column([pyarrow.array(other)]))
    others = {**run.text.identity, "tokens": 300}, TokenData(changed).identity
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

    def tokens(ids: Any, starts: Any, trained: int | None = None) -> Tokens:
        return Tokens("x", Column([pyarrow.array(ids)]), starts, None, trained)

    identities = [
        TokenData(tokens(ids, beginnings), documents=kind).identity  # type: ignore[arg-type]
        for kind in ("joined", "packed")
        for beginnings in (starts, np.array([0, 50, 100]))
    ]
    assert identities[0] == identities[1] and identities[2] != identities[3]
    data = [TokenData(tokens(ids, starts), validation=tokens(other, starts)) for other in (ids, ids[::-1])]
    assert data[0].identity == data[1].identity and data[0].digest != data[1].digest
    assert TokenData(tokens(ids, starts, 9)).identity != data[0].identity


def test_a_resumed_run_keeps_its_loss(tmp_path: Path, folder: Path, capsys: Any) -> None:
    model, given = huggingface(folder), ("--data", str(lines_of(tmp_path)))
    run = prepared(tmp_path, model, *given, documents="packed")
    assert isinstance(run.text, TokenData) and run.text.loss == run.text.identity["loss"] == "token_mean"
    said = {"step": 5, "steps": 8, "stages": 1, "partition": [0, 4], "cases": {}}
    said |= {"model": run.model.model_dump(mode="json"), "config": run.config}
    new, old = run.text.identity, {key: value for key, value in run.text.identity.items() if key != "loss"}
    resume = ("--resume", str(tmp_path))
    line = 'data.loss = "micro_batch_mean", as in the run that is resumed; new runs have "token_mean"\n'
    for kept, loss, other in (
        (new, "token_mean", "micro_batch_mean"),
        (old, "micro_batch_mean", "token_mean"),  # saved before there was such a key
        ({**new, "loss": "micro_batch_mean"}, "micro_batch_mean", "token_mean"),
    ):
        save_facts(tmp_path, {**said, "data": kept})
        capsys.readouterr()
        for asked in ({}, {"loss": loss}):
            resumed = prepared(tmp_path, model, *given, *resume, documents="packed", **asked)
            assert isinstance(resumed.text, TokenData) and resumed.state_dict()["data"]["loss"] == loss
        assert capsys.readouterr().out.count(line) == (loss != "token_mean")
        refusal = f'data.loss = "{other}": the run that is resumed has "{loss}": should be that, or left out'
        with pytest.raises(ConfigError, match=refusal):
            prepared(tmp_path, model, *given, *resume, documents="packed", loss=other)
    joined = prepared(tmp_path, model, *given, documents="joined").text
    assert isinstance(joined, TokenData) and joined.identity["loss"] is None


def test_a_resume_file_with_other_things_in_it_is_refused(tmp_path: Path, text: Path) -> None:
    said: dict[str, Any] = {"step": 5, "steps": 8, "stages": 1, "partition": [0, 4], "cases": {}}
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
    said = {"step": 5, "steps": 8, "stages": 1, "partition": [0, 4], "cases": {}}
    said |= {"model": run.model.model_dump(mode="json"), "data": identity_of(run.text)}
    for kept in (said, {**said, "data": None}):  # None: saved by an earlier version
        save_facts(tmp_path, kept)
        prepared(tmp_path, OURS, "--data", str(text), "--resume", str(tmp_path))
    save_facts(tmp_path, said)
    text.write_text("two one three " * 100)
    with pytest.raises(ConfigError, match=r"on other data than this run has: sha256 was [0-9a-f]*, is [0-9a-f]*$"):
        prepared(tmp_path, OURS, "--data", str(text), "--resume", str(tmp_path))


def test_bytes_of_a_large_text_are_compared_in_pieces(tmp_path: Path) -> None:
    text, found = tmp_path / "text.txt", []
    with text.open("wb") as file:
        file.truncate(2**25)
    for place in (2**24, 2**25 - 2**13):
        found.append(identity_of(load_text(text)))
        with text.open("r+b") as file:
            file.seek(place)
            file.write(b"x" * 2**13)
    found.append(identity_of(load_text(text)))
    assert [each["bytes"] for each in found] == [2**25] * 3 and len({each["sha256"] for each in found}) == 3
