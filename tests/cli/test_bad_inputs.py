"""What the training command says to wrong input: its first line, its exit code, and what it leaves behind.

Each row of the table is an input and the line that refuses it. One process runs them all, in a folder of its own each:
the error stream has that line alone, the exit code is 2, and the folder is as it was.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.harness import run

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
MODEL = {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 16, "tied_embedding": False}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": ADAMW, "dynmo": {}}


class Row(NamedTuple):
    """An input, and a pattern of what is said to it after the name of the command.

    Attributes:
        settings: changes of the configuration, a key that is None is left out; text: the file as it is; None: no file.
        files: more files, by name.
    """

    settings: dict[str, Any] | str | bytes | None
    flags: tuple[str, ...]
    says: str
    files: dict[str, str | bytes] = {}  # noqa: RUF012


def block(says: str, **keys: Any) -> Row:
    return Row({"dynmo": keys}, (), says)


def model(says: str, **keys: Any) -> Row:
    return Row({"model": {**MODEL, **keys}}, (), says)


def deepspeed(says: str, **keys: Any) -> Row:
    return Row(keys, (), says)


def flags(says: str, *given: str, **files: str | bytes) -> Row:
    return Row({}, given, says, {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()})


def saved(content: Any) -> bytes:
    """Return the file that ``torch.save`` would write."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def checkpoint(file: str | bytes) -> dict[str, str | bytes]:
    """Return the files of a folder in which the first stage's file of the latest checkpoint is this one."""
    return {"here__a__mp_rank_00_model_states_dot_pt": file, "here__latest": "a"}


WHOLE = {"here__a__dynmo__manifest_dot_json": "", "here__latest": "a"}
SAVED = r"--resume here/a/mp_rank_00_model_states\.pt"
TABLE = (
    # the file
    Row(None, (), r"config\.json: cannot be read: No such file or directory"),
    Row("", (), r"config\.json: .*"),
    Row("{", (), r"config\.json: .*"),
    Row("[]", (), r"config\.json: .*"),
    Row("7", (), r"config\.json: .*"),
    Row(b"\xff\xfe\x00", (), r"config\.json: .*"),
    Row('{"dynmo": {"interval": 1, "interval": 2}}', (), r"config\.json: .*interval.*"),
    Row({}, ("--deepspeed_config", "."), r"\.: cannot be read: .*"),
    # the "dynmo" section
    Row({"dynmo": True}, (), r"dynmo.*"),
    Row({"dynmo": []}, (), r"dynmo.*"),
    Row({"dynamo": {}}, (), r"dynamo.*dynmo.*"),
    block(r"dynmo\.intervall.*interval.*", intervall=5),
    block(r"dynmo\.interval = -1.*", interval=-1),
    block(r"dynmo\.interval = .*ten.*", interval="ten"),
    block(r"dynmo\.interval = 1\.5.*", interval=1.5),
    block(r"dynmo\.balancer = .*partitoin.*partition.*", balancer="partitoin"),
    block(r"dynmo\.balance_by.*tiem.*time.*", balance_by="tiem"),
    block(r"dynmo\.memory_limit = 2.*", memory_limit=2),
    block(r"dynmo\.memory_limit = -1.*", memory_limit=-1),
    block(r"dynmo\.memory_limit = .*30 bananas.*", memory_limit="30 bananas"),
    block(r"dynmo\.memory_limit = .*0%.*", memory_limit="0%"),
    block(r"dynmo\.memory_limit = 1\.5.*", memory_limit=1.5),
    block(r"dynmo\.schedule.*zero_buble.*zero_bubble.*", schedule="zero_buble"),
    block(r"dynmo\.schedule\.kind.*1f1.*", schedule={"kind": "1f1"}),
    block(r"dynmo\.min_improvement = 2.*", min_improvement=2),
    block(r"dynmo\.initial_partition.*", initial_partition=[0, 3, 3]),
    block(r"dynmo\.initial_partition.*", initial_partition="evenly"),
    block(r"dynmo\.repack\.enabled.*", repack={"enabled": "maybe"}),
    block(r"dynmo\.repack\.enable.*enabled.*", repack={"enable": True}),
    block(r"dynmo\.profile\.batches = 0.*", profile={"batches": 0}),
    block(r"dynmo\.timeout_seconds = 0.*", timeout_seconds=0),
    block(r"dynmo\.randomness\.seed.*", randomness={"seed": "x"}),
    block(r"dynmo\.start_step = -1.*", start_step=-1),
    block(r"dynmo\.trace.*", trace={"path": "t.json", "steps": [5, 4]}),
    block(r"dynmo\.compile.*", compile="perhaps"),
    block(r"dynmo\.report.*|--report.*", report="/dev/null/report.jsonl"),
    block(r"dynmo\.keep_together.*", keep_together=[[0, 99]]),
    # DeepSpeed's keys
    deepspeed(r".*optimizer.*", optimizer=None),
    deepspeed(r".*optimizer.*", optimizer={"type": "Adamm"}),
    deepspeed(r".*optimizer.*", optimizer="AdamW"),
    deepspeed(r".*gradient_accumulation_steps.*", gradient_accumulation_steps="8"),
    deepspeed(r".*gradient_accumulation_steps.*", gradient_accumulation_steps=0),
    deepspeed(r".*gradient_accumulation_steps.*", gradient_accumulation_steps=-2),
    deepspeed(r".*train_micro_batch_size_per_gpu.*", train_micro_batch_size_per_gpu=None),
    deepspeed(r".*train_micro_batch_size_per_gpu.*", train_micro_batch_size_per_gpu=0),
    deepspeed(r".*train_batch_size.*7.*", train_batch_size=7),
    deepspeed(r".*zero.*2.*", zero_optimization={"stage": 2}),
    deepspeed(r".*zero.*3.*", zero_optimization={"stage": 3}),
    deepspeed(r".*zero.*", zero_optimization={"stage": 7}),
    deepspeed(r".*fp16.*bf16.*|.*bf16.*fp16.*", fp16={"enabled": True}, bf16={"enabled": True}),
    deepspeed(r".*scheduler.*", scheduler={"type": "WarmUp"}),
    deepspeed(r".*gradient_clipping.*", gradient_clipping="strong"),
    deepspeed(r"step_per_print = 5: .*steps_per_print.*", step_per_print=5),
    deepspeed(r"interval = 5: .*dynmo.*", interval=5),
    # the "model" section
    Row({"model": []}, (), r"model.*"),
    Row({"model": "gpt"}, (), r"model.*"),
    model(r"model\.head.*heads.*", head=2),
    model(r"model\.layers = 0.*", layers=0),
    model(r"model\.heads.*3.*", heads=3),
    model(r"model\.hidden_size = -16.*", hidden_size=-16),
    model(r"model\.sequence_length = 0.*", sequence_length=0),
    model(r"model\.dropout = 2.*", dropout=2),
    model(r"model\.case\.experts.*", case={"kind": "moe", "experts": 0}),
    model(r"model\.case\.top_k.*", case={"kind": "moe", "experts": 2, "top_k": 3}),
    model(r"model\.case.*\n.*unknown key.*", case={"kind": "freezing", "unknown": 1}),
    model(r"model\.case\.final_sparsity.*", case={"kind": "pruning", "final_sparsity": 2}),
    model(r"model = .*layers.*cannot be given beside huggingface.*", huggingface="nowhere"),
    deepspeed(r".*nowhere.*", model={"huggingface": "nowhere"}),
    # options
    flags(r"unrecognized arguments: --zzz; should be one of .*--data.*", "--zzz"),
    flags(r'unrecognized arguments: --report-file r; did you mean "--report"\?', "--report-file", "r"),
    flags(r"--steps 0: should be at least 1", "--steps", "0"),
    flags(r".*--steps.*x.*", "--steps", "x"),
    flags(r"--stop-at 9: should be in 1 to 8.*", "--steps", "8", "--stop-at", "9"),
    flags(r"--stop-at 0: should be in 1 to 150.*", "--stop-at", "0"),
    flags(r"--save-interval 3: needs --save.*", "--save-interval", "3"),
    flags(r"--keep 0: should be at least 1", "--save", "unused", "--keep", "0"),
    flags(r"--keep 2: needs --save DIR.*", "--keep", "2"),
    flags(r"--keep 2: needs a .dynmo. section.*", "--set", "dynmo=null", "--save", "unused", "--keep", "2"),
    flags(r"--take-over: needs --save DIR.*", "--take-over"),
    flags(r"--newest-whole: needs --resume DIR.*", "--newest-whole"),
    flags(
        r"--save here: has checkpoints of another run \(a\): name another folder; --take-over .*",
        "--save",
        "here",
        **WHOLE,
    ),
    block(r"dynmo\.checkpoint\.keep = 0.*", checkpoint={"keep": 0}),
    flags(r"--save-interval 0: should be at least 1", "--save", "unused", "--save-interval", "0"),
    flags(r"--save /dev/null/checkpoints: cannot be written: Not a directory", "--save", "/dev/null/checkpoints"),
    flags(r"--save file: cannot be written: File exists", "--save", "file", file="text"),
    flags(r".*--save.*", "--save", ""),
    Row({"optimizer": {"type": "Adamm"}}, ("--save", "saved"), r".*optimizer.*"),
    flags(r"--stages 3: should divide the number of processes, 1: start 3 or .*--num_gpus 3.*", "--stages", "3"),
    flags(r"--stages 0: should be at least 1", "--stages", "0"),
    flags(r"/does/not/exist: no such file or folder", "--data", "/does/not/exist"),
    flags(r".*empty.*", "--data", "empty", empty=""),
    flags(r".*short.*", "--data", "short", short="a few words"),
    flags(r"ids\.bin: files of token ids: withdrawn; .*", "--data", "ids.bin", ids_dot_bin=bytes(400)),
    flags(r"t\.zip: is compressed \(zip\): decompress it.*", "--data", "t.zip", t_dot_zip=b"PK\x03\x04" + bytes(400)),
    flags(r"t\.pdf: is no UTF-8 text: .*JSON lines.*", "--data", "t.pdf", t_dot_pdf=b"PDF\x15\xc0" * 200),
    flags(r"--resume /does/not/exist: no such folder", "--resume", "/does/not/exist"),
    flags(r"--resume here: holds no checkpoint of ds-dynmo-train", "--resume", "here", here__file="text"),
    flags(rf"{SAVED}: cannot be read.*", "--resume", "here", **checkpoint("{")),
    flags(rf"{SAVED}: lacks .*", "--resume", "here", **checkpoint(saved({}))),
    flags(rf"{SAVED}: lacks .*", "--resume", "here", **checkpoint(saved([1]))),
    flags(r"--tag a: needs --resume DIR.*", "--tag", "a"),
    flags(r".*--report.*", "--report", ""),
    flags(r"--report /dev/null/r: cannot be written: File exists", "--report", "/dev/null/r"),
    flags(r"--record /dev/null/r: cannot be written: File exists", "--record", "/dev/null/r"),
    flags(r"--export out: needs --save DIR.*", "--export", "out"),
    flags(r"model = .*cannot be given beside huggingface.*", "--set", "model.huggingface=nowhere"),
    flags(r"model\.seed = -1: .*", "--set", "model.seed=-1"),
    flags(r"model\.seed = 4294967296: .*", "--set", "model.seed=4294967296"),
)


def answers(folder: str, rows: list[Row]) -> list[tuple[Any, list[str], list[str]]]:
    """Return, per row, the exit code, the lines of the error stream, and the files that the command made or changed."""
    from ds_dynmo.cli import train

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # of the world that is there; nobody listens
    (Path(folder) / "text.txt").write_text("one two three " * 200)
    found = []
    for number, row in enumerate(rows):
        place = Path(folder, str(number))
        place.mkdir()
        os.chdir(place)
        lay_out(row)
        before, errors = listing(place), io.StringIO()
        given = ["--deepspeed_config", "config.json", *row.flags]
        if "--data" not in given:
            given += ["--data", str(Path(folder, "text.txt"))]
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                code: Any = train.main(given)
            except SystemExit as end:
                code = end.code
            except Exception:
                code = traceback.format_exc()
        found.append((code, errors.getvalue().splitlines(), sorted(set(listing(place)) ^ set(before))))
    return found


def lay_out(row: Row) -> None:
    for name, content in row.files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    config = Path("config.json")
    if isinstance(row.settings, dict):
        settings = {**CONFIG, "model": MODEL, **row.settings}
        config.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    elif row.settings is not None:
        config.write_bytes(row.settings if isinstance(row.settings, bytes) else row.settings.encode())


def listing(folder: Path) -> list[tuple[str, int]]:
    return [(str(path.relative_to(folder)), path.stat().st_size * path.is_file()) for path in folder.rglob("*")]


def test_wrong_input_gets_one_line_exit_code_2_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (found,) = run(1, answers, str(tmp_path), list(TABLE))
    wrong = []
    for row, (code, lines, left) in zip(TABLE, found, strict=True):
        if code != 2 or not re.fullmatch(f"ds-dynmo-train: error: (?:{row.says})", "\n".join(lines)) or left:
            wrong.append(f"{row[:3]}\n    exit {code}, left {left}\n    " + "\n    ".join(lines))
    assert not wrong, f"{len(wrong)} of {len(TABLE)}:\n" + "\n".join(wrong)
