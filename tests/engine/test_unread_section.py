"""A "dynmo" section that only ``ds_dynmo.initialize`` reads is refused by ``deepspeed.initialize``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_dynmo import unread_section
from ds_dynmo.errors import ConfigError

ROOT = Path(__file__).parents[2]
IGNORED = r'"dynmo": deepspeed.initialize builds .* ignores this section: call ds_dynmo.initialize'
ENGINE = """
class DeepSpeedEngine:
    def __init__(self, args, model, config=None):
        self.model = model

class PipelineEngine(DeepSpeedEngine):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
"""


@pytest.mark.parametrize("first", ["deepspeed", "ds_dynmo"])
def test_it_is_refused_whichever_is_imported_first(tmp_path: Path, first: str) -> None:
    """A module stands in for DeepSpeed's, which takes seconds to import."""
    (tmp_path / "deepspeed" / "runtime").mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").write_text("from deepspeed.runtime.engine import PipelineEngine\n")
    (tmp_path / "deepspeed" / "runtime" / "engine.py").write_text(ENGINE)
    code = f"""
import inspect, sys
import {first}
import ds_dynmo
assert {first!r} == "deepspeed" or "deepspeed" not in sys.modules
from deepspeed import PipelineEngine
for config in ({{}}, {{"dynmo": {{"enabled": False}}}}, None):
    assert PipelineEngine(None, "model", config=config).model == "model"
assert "class DeepSpeedEngine" in inspect.getsource(sys.modules["deepspeed.runtime.engine"])
assert not any(type(finder).__module__ == "ds_dynmo.unread_section" for finder in sys.meta_path)
PipelineEngine(None, "model", {{"dynmo": {{}}}})
"""
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "ConfigError" in done.stderr.splitlines()[-1] and "call ds_dynmo.initialize" in done.stderr, done.stderr


@pytest.mark.parametrize("kind", [DeepSpeedEngine, PipelineEngine])
def test_engines_of_deepspeed_refuse_it_before_anything_is_built(kind: Any) -> None:
    with pytest.raises(ConfigError, match=IGNORED):
        kind(args=None, model=None, config={"dynmo": {"interval": 10}})


def test_our_engine_reads_it() -> None:
    class Stock:
        def __init__(self, model: Any, *, config: Any = None) -> None:
            self.model = model

    class Ours(Stock):
        def __init__(self, **given: Any) -> None:
            self.dynmo = "read"
            super().__init__(**given)

    unread_section._wrap(Stock)
    assert Ours(model=3, config={"dynmo": {}}).model == 3
    with pytest.raises(ConfigError, match=IGNORED):
        Stock(3, config={"dynmo": {"interval": 10}})
