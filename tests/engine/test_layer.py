"""What a layer may tell the engine is in one list, ``ds_dynmo.Layer``."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ds_dynmo import layer

ENGINE = Path(layer.__file__).parent / "engine"
API = Path(__file__).parents[2] / "docs" / "api.md"
OF_OTHERS = {"deepspeed_config", "model_config", "loss_fn", "get_cuda_rng_tracker"}  # of a tracker's module
OF_OTHERS |= {"variable"}  # of a node of autograd's graph


def names(kind: type) -> set[str]:
    return {name for name in (*vars(kind), *kind.__annotations__) if not name.startswith("_")}


def asked_of_objects(path: Path) -> set[str]:
    """Return the names that a module of the engine looks for, and that may be missing."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {
        str(call.args[1].value)
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in ("getattr", "hasattr")
        and isinstance(call.args[1], ast.Constant)
    }


def test_the_engine_asks_layers_for_nothing_else() -> None:
    asked = {
        name
        for path in sorted(ENGINE.rglob("*.py"))
        if "deepspeed" not in path.parts
        for name in asked_of_objects(path)
    }
    known = names(layer.Layer) | names(layer.LayerParameter)
    assert {name for name in asked if not name.startswith("_")} - OF_OTHERS <= known


def test_the_page_lists_all_of_them() -> None:
    rows = re.findall(r"^\| ((?:`\w+(?:\(\w*\))?`(?:, )?)+) \|", API.read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert names(layer.Layer) | names(layer.LayerParameter) <= listed
