"""Which package may import which (docs/internals/design.md), and that only one communicates."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import ds_dynmo
import ds_dynmo.models
from tests.support.sources import nodes_of, tree_of

PACKAGE = Path(__file__).parents[2] / "ds_dynmo"
TESTS = Path(__file__).parents[1]


@cache
def imports(path: Path) -> set[str]:
    return {name for node in nodes_of(path) for name in imported(node)}


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def forbidden(folder: str, *prefixes: str) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for name in sorted(imports(path))
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
    ]


@pytest.mark.parametrize("folder", ["partitioners", "schedules"])
def test_packages_without_processes_are_pure(folder: str) -> None:
    allowed = {"numpy", "ds_dynmo", *sys.stdlib_module_names}
    for path in (PACKAGE / folder).rglob("*.py"):
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path
    assert not forbidden(folder, "ds_dynmo.engine", "ds_dynmo.models", "multiprocessing", "subprocess")


def test_schedules_import_only_placements() -> None:
    """Partitioners may import them, never the reverse."""
    allowed = ("ds_dynmo.schedules", "ds_dynmo.errors", "ds_dynmo.placement")
    for path in (PACKAGE / "schedules").rglob("*.py"):
        ours = {name for name in imports(path) if name.split(".")[0] == "ds_dynmo"}
        assert all(name.startswith(allowed) for name in ours), path


def test_models_import_neither_engine_nor_partitioners() -> None:
    """Except for the adapter's module that reads the layers of a ``PipelineModule``."""
    names = forbidden("models", "ds_dynmo.engine", "ds_dynmo.partitioners")
    assert not [name for name in names if " imports ds_dynmo.engine.deepspeed.module" not in name]


def test_data_imports_neither_engine_nor_models() -> None:
    assert not forbidden("data", "ds_dynmo.engine", "ds_dynmo.models", "ds_dynmo.partitioners", "deepspeed")


def test_the_engine_imports_no_model() -> None:
    assert not forbidden("engine", "ds_dynmo.models")


def test_only_commands_import_commands() -> None:
    assert not [name for name in forbidden("", "ds_dynmo.cli") if not name.startswith("cli/")]


def test_nothing_imports_a_file_of_tests() -> None:
    """What several of them use is in tests/support."""
    for path in TESTS.rglob("*.py"):
        found = {name for name in imports(path) if name.startswith("tests.") and ".test_" in name}
        assert not found, path


COMMUNICATES = PACKAGE / "engine" / "comm"
FORMS_WORLDS = PACKAGE / "engine" / "resize" / "world.py"  # and sends nothing in them
OF_DEEPSPEED = PACKAGE / "engine" / "deepspeed"
PRIVATE_OF_TORCH = PACKAGE / "torch_private.py"
NO_NAMES_OF_TORCH = {  # of classes of ours, of Python's, of DeepSpeed's (engine/deepspeed has those) and others
    "_replace", "_asdict", "_fields", "_count", "_found", "_constants", "_hand_over", "_value", "_wait",
    "_attn_implementation", "_init_weights", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_unexpected",
    "_model_mapping", "_supports_sdpa", "_apply", "_exit",
}  # fmt: skip


def test_private_names_of_torch_are_in_one_module() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == PRIVATE_OF_TORCH:
            continue
        found += [f"{path}: {name}" for name in imports(path) if name.startswith("torch") and "._" in name]
        for node in nodes_of(path):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            owner = ast.unparse(node.value)
            of_others = owner in ("self", "cls") or node.attr in NO_NAMES_OF_TORCH or path.parent == OF_DEEPSPEED
            if owner.split(".")[0] in ("torch", "dist", "nn") or not of_others:
                found.append(f"{path}:{node.lineno}: {owner}.{node.attr}")
    assert not found


READS_BACKEND = PACKAGE / "engine" / "deepspeed" / "shm_operator.py"  # what operators it has loaded


def test_one_package_of_the_engine_communicates() -> None:
    for path in (PACKAGE / "engine").rglob("*.py"):
        if path.parent != COMMUNICATES and path not in (FORMS_WORLDS, READS_BACKEND):
            names = imports(path)
            assert not {n for n in names if n.startswith(("torch.distributed", "deepspeed.comm"))}, path
            assert not any(
                isinstance(node, ast.Attribute)
                and node.attr in ("distributed", "comm")
                and isinstance(node.value, ast.Name)
                and node.value.id in ("torch", "deepspeed")
                for node in nodes_of(path)
            ), path


def test_the_module_that_forms_worlds_sends_nothing() -> None:
    used = {
        node.attr
        for node in nodes_of(FORMS_WORLDS)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "deepspeed.comm")
    }
    groups = {"init_process_group", "destroy_process_group", "new_group"}
    facts = {
        "get_rank",
        "get_world_size",
        "get_backend",
        "get_backend_config",
        "distributed_c10d",
        "DistNetworkError",
    }
    assert used <= groups | facts


# Per package of an extra, the modules that import it.
USERS = {
    "transformers": ("huggingface/configs.py", "data/encoding.py", "trainer/*.py"),
    "datasets": ("data/sources.py",),
    "pyarrow": ("data/sources.py", "trainer/rows.py"),
}


def test_few_modules_import_a_package_of_an_extra_and_only_when_it_is_used() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = {name.split(".")[0] for name in imports(path)}
        assert all(name not in names or any(map(path.match, users)) for name, users in USERS.items()), path
        at_once = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name.split(".")[0] for node in at_once for name in imported(node)}
        assert not names & {*USERS, "safetensors"} or path.match("trainer/*.py"), path


LIGHT = [
    *("ds_dynmo", "ds_dynmo.config", "ds_dynmo.partitioners", "ds_dynmo.schedules"),
    "ds_dynmo.engine.decide.decision",  # decisions are pure
    *("ds_dynmo.models", "ds_dynmo.models.config"),
    *("ds_dynmo.cli.plot", "ds_dynmo.cli.simulate"),
]


def test_light_modules_load_no_torch() -> None:
    """Reading the description of a model is light, too."""
    case = [{"kind": kind} for kind in ("moe", "mod")] + [{"kind": "sparse_attention", "pattern": "hash"}]
    code = f"""
import importlib, sys

def check(what):
    assert not {{"torch", "deepspeed"}} & set(sys.modules), what

for module in {LIGHT}:
    importlib.import_module(module)
    check(module)
assert len(sys.modules["ds_dynmo.models"].read_model_config({{"model": {{"case": {case}}}}}).case) == 3
check("read_model_config")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [ds_dynmo, ds_dynmo.models], ids=lambda package: package.__name__)
def test_no_lazy_name_is_a_module_s(package: ModuleType) -> None:
    """Importing a module sets its name in the package, where a name of the same spelling would not be looked up."""
    folder = Path(str(package.__file__)).parent
    assert not {name for name in package.__all__ if (folder / name).is_dir() or (folder / f"{name}.py").is_file()}


def test_decisions_need_numpy_alone() -> None:
    packages = ("deepspeed", "psutil", "pydantic", "torch")
    modules = "ds_dynmo, ds_dynmo.partitioners, ds_dynmo.plan, ds_dynmo.schedules"
    code = f"import sys; sys.modules.update(dict.fromkeys({packages})); import {modules}"  # None: importing it fails
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_package_metadata() -> None:
    written = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'\nversion = "{ds_dynmo.__version__}"\n' in written
