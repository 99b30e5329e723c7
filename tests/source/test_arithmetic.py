"""Every rank decides from the same numbers, so what decides uses arithmetic that is the same on every processor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import tree_of

PACKAGE = Path(__file__).parents[2] / "ds_dynmo"
DECIDE = ["partitioners", "schedules", "plan", "engine/decide", "engine/resize", "placement.py", "layer_groups.py"]
# Of C and numpy: by processor, another algorithm or another order of additions.
DIFFER = {
    "math": {"cbrt", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "sin", "cos", "tan", "tanh"},
    "np": {
        *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "power", "float_power", "cbrt"),
        *("dot", "vdot", "inner", "matmul", "tensordot", "einsum", "linalg", "polyfit", "corrcoef", "cov", "convolve"),
    },
}
DIFFER["numpy"] = DIFFER["np"]


def differing(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield lines with arithmetic that differs between processors."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                differs = name in DIFFER.get(module, ())
            case ast.ImportFrom(module=module, names=names):
                differs = any(name.name in DIFFER.get(module or "", ()) for name in names)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                differs = not isinstance(left, ast.Constant) or not isinstance(right, ast.Constant)
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult() | ast.Pow()):
                differs = True
            case _:
                continue
        if differs:
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("place", DECIDE)
def test_decisions_use_arithmetic_that_is_the_same_everywhere(place: str) -> None:
    path = PACKAGE / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files
    found = [f"{file.relative_to(PACKAGE)}:{line}: {what}" for file in files for line, what in differing(tree_of(file))]
    assert not found, "use ds_dynmo.partitioners.portable, products and sums:\n" + "\n".join(found)
