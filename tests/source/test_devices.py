"""Tensors of the engine's own say where they are: a program may have set another default device of torch."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.sources import nodes_of

ENGINE = Path(__file__).parents[2] / "ds_dynmo" / "engine"
MAKERS = {  # functions of torch that make a tensor on the default device
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def makes_on_default_device(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and all(keyword.arg != "device" for keyword in node.keywords)
    )


def test_tensors_of_the_engine_name_their_device() -> None:
    found = [
        f"{path.relative_to(ENGINE)}:{node.lineno} {ast.unparse(node)}"
        for path in sorted(ENGINE.rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and makes_on_default_device(node)
    ]
    assert not found, "\n".join(found)
