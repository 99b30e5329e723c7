"""Names of the package, and imports that users wrote for earlier versions."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ds_dynmo
from ds_dynmo import old_names, partitioners
from ds_dynmo.engine.comm import hosts
from ds_dynmo.engine.elastic import release
from ds_dynmo.partitioners import ties

# Module and name that users wrote, what to write instead, and the object that both import.
IMPORTS = [
    ("ds_dynmo.engine.elastic.release", "Place", "ds_dynmo.engine.elastic.release.RankLocation", release.RankLocation),
    ("ds_dynmo.engine.hosts", "check_launch", "ds_dynmo.engine.comm.hosts.check_launch", hosts.check_launch),
    ("ds_dynmo.partitioners", "shortest", "ds_dynmo.partitioners.makespan", partitioners.makespan),
    ("ds_dynmo.partitioners.even_out", "even_out", "ds_dynmo.partitioners.ties.even_out", ties.even_out),
    ("ds_dynmo.partitioners.move_costs", "MoveCosts", "ds_dynmo.partitioners.MoveCosts", partitioners.MoveCosts),
    ("ds_dynmo.partitioners.shortest", "shortest", "ds_dynmo.partitioners.makespan", partitioners.makespan),
    ("ds_dynmo.partitioners.uniform", "uniform", "ds_dynmo.partitioners.uniform", partitioners.uniform),
    ("ds_dynmo.shm_operator", "skip_shm_operator", "ds_dynmo.skip_shm_operator", ds_dynmo.skip_shm_operator),
]


@pytest.mark.parametrize(("module", "name", "new", "expected"), IMPORTS)
def test_an_old_import_works_and_names_the_new_one(module: str, name: str, new: str, expected: Any) -> None:
    found: dict[str, Any] = {}
    message = rf"{module}\.{name} is an old name: write {new}$"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        exec(f"from {module} import {name}", found)
    assert found[name] is expected
    assert warned[0].filename == "<string>"  # the user's line, not ours


def test_every_old_name_is_tested() -> None:
    table = old_names.MODULES | old_names.NAMES
    assert {(module, name) for module in table for name in table[module]} == {row[:2] for row in IMPORTS}


def test_an_old_module_is_an_attribute_of_its_package_and_covers_nothing_new() -> None:
    code = (
        "import ds_dynmo.shm_operator, ds_dynmo.partitioners.uniform;"
        "assert callable(ds_dynmo.shm_operator.skip_shm_operator);"
        "assert ds_dynmo.partitioners.uniform(2, 2) == [0, 1, 2]"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize("module", ["ds_dynmo", "ds_dynmo.engine", "ds_dynmo.partitioners", "ds_dynmo.shm_operator"])
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
