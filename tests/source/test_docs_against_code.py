"""The documentation against code that needs torch: the tables of keys, the flags in commands."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

import key_tables
from ds_dynmo import DynMoPipelineEngine
from ds_dynmo.config import load_settings, read_dynmo_config
from ds_dynmo.interface import INTERFACE
from ds_dynmo.launch import OF_MEETING, OF_RANK
from ds_dynmo.models import model_layers, read_model_config
from tests.support.pages import PAGES, ROOT, names


def test_functions_that_write_tables() -> None:
    assert doctest.testmod(key_tables).failed == 0


class Small(BaseModel):
    kind: Literal["small"]
    size: int = Field(default=1, description="how small")


class Large(BaseModel):
    kind: Literal["large"]
    name: Literal["a", "b"] = Field(default="a", description='not "b"')


class Whole(BaseModel):
    case: Small | Large | list[Small | Large] | None = Field(default=None, description="what changes")


def test_a_key_that_takes_one_of_several_objects_has_a_table_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(key_tables.OBJECTS, "whole", Whole)
    head = "| key | default | meaning |\n| --- | --- | --- |\n"
    small = head + '| `kind` | required | one of `"small"` |\n| `size` | `1` | how small |\n'
    large = head + '| `kind` | required | one of `"large"` |\n| `name` | `"a"` | not `"b"`; one of `"a"`, `"b"` |\n'
    assert key_tables.tables("whole", "case") == head + "| `case` | `null` | what changes |\n"
    assert key_tables.tables("whole", "case=*") == small + "\n" + large
    assert key_tables.tables("whole", "case=large.*") == large


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_tables_of_keys_are_those_of_the_models(page: Path) -> None:
    assert key_tables.with_tables(page.read_text()) == page.read_text(), "python scripts/key_tables.py rewrites it"


@pytest.mark.parametrize("name", sorted(key_tables.OBJECTS))
def test_every_key_is_in_one_table(name: str) -> None:
    tables = [table for page in PAGES for table in key_tables.TABLE.findall(page.read_text()) if table[1] == name]
    listed = [key for _, _, patterns, *_ in tables for key, _ in key_tables.chosen_keys(name, patterns)]
    assert sorted(listed) == sorted(key for key, _ in key_tables.keys_of(key_tables.OBJECTS[name]))


def test_the_readme_has_the_defaults_of_the_keys_that_matter() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (`[^`]+`) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    fields = dict(key_tables.keys_of(key_tables.OBJECTS["dynmo"]))
    assert rows and dict(rows) == {key: key_tables.default_of(fields[key]) for key, _ in rows}


MADE_BY_COMMANDS = ("model", "trained")  # folders of Hugging Face models


def test_every_variant_that_a_command_makes_is_a_valid_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files beside it are those that its page shows."""
    variants = 0
    for page in PAGES:
        saved = re.findall(r"With this as `(\w+\.json)`.*?```json\n(.*?)```", page.read_text(), re.DOTALL)
        for name, content in saved:
            (tmp_path / name).write_text(content)
        for words in commands(page):
            changes = [given for option, given in zip(words, words[1:]) if option == "--set"]
            if changes and "--deepspeed_config" in words:
                settings = load_settings(ROOT / words[words.index("--deepspeed_config") + 1], changes)
                read_dynmo_config(settings)
                with monkeypatch.context() as there:
                    there.chdir(tmp_path)
                    model = read_model_config(settings)
                    if model.huggingface not in MADE_BY_COMMANDS:
                        model_layers(model)
                variants += 1
    assert variants >= 8


INSTANCE = {
    "global_steps",
    "grid",
    "loss",
    "module",
    "optimizer",
    "pipe_buffers",
    "released",
}  # set in the constructor, most by DeepSpeed


def test_every_name_of_the_engine_that_is_documented_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"`engine\.([a-z_]+)[\[(`.]", page.read_text())}
    assert {"rebalance", "repack", "reports"} <= named
    assert not [name for name in named - INSTANCE if not hasattr(DynMoPipelineEngine, name)]


def commands(page: Path) -> set[tuple[str, ...]]:
    """Return the words, from the script on, of every command in the page that runs one of ours."""
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"(?:deepspeed|python) [^`\n|;&]*?((?:scripts|examples)/\S+\.py(?: [^`\n|;&]*)?)", text)
    lines += re.findall(r"(ds-dynmo-[a-z]+(?: [^`\n|;&]*)?)", text)
    return {tuple(shlex.split(line, comments=True)) for line in lines}


def asked(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the script and its subcommand, which accept ``--help``."""
    flags = [number for number, word in enumerate(words) if word.startswith("--")]
    return words[: flags[0] if flags else len(words)]


EVERY = sorted({command for page in PAGES for command in commands(page)})
HELPED = sorted({asked(command) for command in EVERY})


@pytest.mark.parametrize("script", HELPED, ids=" ".join)
def test_every_flag_of_a_command_is_one_of_its_script(
    script: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*OF_RANK, *OF_MEETING, INTERFACE):  # a command would set them, for all tests
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    path, *subcommand = script
    if path.startswith("ds-dynmo-"):
        module = importlib.import_module(f"ds_dynmo.cli.{path.removeprefix('ds-dynmo-')}")
    else:
        module = importlib.import_module(Path(path).stem)
        assert module.__file__ == str(ROOT / path)
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main([*subcommand, "--help"])
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    given = {word for command in EVERY if asked(command) == script for word in command if word.startswith("--")}
    assert given <= known
