"""The diffs of docs/convert.md, applied to scripts, which give the same numbers before and after."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiny_model
from tests.support import harness
from tests.support.trainer_runs import chats_of, differences
from tests.support.words import CHATML

pytestmark = pytest.mark.ranks

pytest.importorskip("transformers")

run = partial(harness.run, backend="gloo")  # the arguments say use_cpu

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "convert"


def hunks_of(title: str) -> list[tuple[str, str]]:
    """Return the lines before and after of each part of the diff under a title of docs/convert.md."""
    section = (ROOT / "docs" / "convert.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    found = []
    for part in block.split("...\n"):
        lines = part.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        found.append((before, after))
    return found


def converted(text: str, title: str, *, back: bool = False) -> str:
    """Apply a diff to a script, or take it back."""
    for before, after in hunks_of(title):
        old, new = (after, before) if back else (before, after)
        assert text.count(old) == 1, f"{title}: is {text.count(old)} times in the script:\n{old}"
        text = text.replace(old, new)
    return text


def call(text: str, *arguments: Any) -> Any:
    """Run a script's ``train``, and return its result, or the logs of a trainer."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # accelerate asks for it; the ranks have met already
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "script", "exec"), names)  # the project's own text
    found = names["train"](*arguments)
    return found.state.log_history if hasattr(found, "state") else found


def folder_of(tmp_path: Path, kind: str) -> tuple[str, str]:
    """Write a model with its tokenizer, and rows. Return the folder and the file."""
    folder, text = tmp_path / "model", tmp_path / "text.jsonl"
    sizes = ["--documents", "40", "--vocab-size", "400", "--layers", "3", "--hidden-size", "16", "--positions", "64"]
    assert tiny_model.main([str(folder), str(text), *sizes]) == 0
    (folder / "chat_template.jinja").write_text(CHATML)
    if kind != "text":
        text.write_text("".join(json.dumps(row) + "\n" for row in chats_of(kind, 60)))
    return str(folder), str(text)


def check(found: list[Any], expected: list[Any]) -> None:
    largest = differences(found, expected)
    assert largest["learning_rate"] == largest["step"] == 0 and largest["loss"] <= 1e-4, largest


def test_a_script_for_the_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    ours = (ROOT / "examples" / "trainer.py").read_text().replace("max_steps=40", "max_steps=20")
    theirs = converted(ours, "transformers' Trainer", back=True)
    assert "ds_dynmo.trainer" not in theirs and "dynmo=" not in theirs
    given = folder_of(tmp_path, "text")
    (expected,) = run(1, call, theirs, *given, str(tmp_path / "theirs"))
    for found in run(2, call, ours, *given, str(tmp_path / "ours")):
        check(found, expected)
    check_alike(tmp_path)


def test_a_script_for_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    theirs = (SCRIPTS / "chats.py").read_text()
    ours = converted(theirs, "TRL's SFTTrainer").replace("-> SFTTrainer", "-> PipelineTrainer")
    given = folder_of(tmp_path, "messages")
    (expected,) = run(1, call, theirs, *given, str(tmp_path / "theirs"))
    for found in run(2, call, ours, *given, str(tmp_path / "ours")):
        check(found, expected)
    check_alike(tmp_path)


def check_alike(tmp_path: Path) -> None:
    """Check that both scripts have written the same model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("theirs", "ours"))
    for name, value in first.state_dict().items():
        assert torch.allclose(second.state_dict()[name].float(), value.float(), atol=1e-3), name
    assert AutoTokenizer.from_pretrained(tmp_path / "ours" / "model").get_vocab()


def test_a_script_with_a_pipeline_module_of_its_own() -> None:
    theirs = (SCRIPTS / "own_module.py").read_text()
    ours = converted(theirs, "Your own PipelineModule").replace(
        "CONFIG = {", 'CONFIG = {\n    "dynmo": {"interval": 2},'
    )
    assert run(2, call, ours) == run(2, call, theirs)
