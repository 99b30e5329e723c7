"""Names of the package: those that type checkers see, and no others."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

import ds_dynmo


@pytest.mark.parametrize("module", ["ds_dynmo", "ds_dynmo.engine"])
def test_a_name_that_never_was_is_refused(module: str) -> None:
    with pytest.raises(ImportError, match="cannot import name 'longest'"):
        exec(f"from {module} import longest")


def test_every_name_of_the_package_is_the_one_that_type_checkers_see() -> None:
    tree = ast.parse(Path(str(ds_dynmo.__file__)).read_text())
    (seen,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    modules = {
        alias.name: node.module for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted([*modules, "__version__"]) == sorted(ds_dynmo.__all__) and {*modules} <= {*dir(ds_dynmo)}
    for name, module in modules.items():
        assert getattr(ds_dynmo, name) is getattr(importlib.import_module(str(module)), name)
        assert getattr(ds_dynmo, str(module).rpartition(".")[2]) is sys.modules[str(module)]
