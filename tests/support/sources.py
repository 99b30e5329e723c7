"""The source as syntax trees: each file is parsed once, for all tests of the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file's tree, as :func:`ast.walk` does."""
    return tuple(ast.walk(tree_of(path)))
