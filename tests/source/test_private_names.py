"""DeepSpeed's private names are used in engine/deepspeed/ and nowhere else.

These count as private:

- names with a leading underscore of DeepSpeed's pipeline modules, engines, optimizer wrappers and grids;
- names without one that the adapter's table lists, except those in ``OPEN``, which StageContext gives to the parts of
  the engine or which users of DeepSpeed read;
- modules of DeepSpeed that are not in ``MODULES``.

These count as uses: an attribute, an argument of getattr and the like, a method of that name, an import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import nn

from ds_dynmo.engine.deepspeed.names import NEEDED
from ds_dynmo.engine.deepspeed.probe import _mentioned
from tests.support.sources import tree_of

PACKAGE = Path(__file__).parents[2] / "ds_dynmo"
ADAPTER = PACKAGE / "engine" / "deepspeed"

MODULES = {
    "deepspeed",
    "deepspeed.accelerator",
    "deepspeed.comm",
    "deepspeed.moe.layer",
    "deepspeed.ops.adam",
    "deepspeed.pipe",
    "deepspeed.runtime.pipe.schedule",
    "deepspeed.runtime.pipe.topology",
    "deepspeed.utils",
}
OF_MODELS = {"deepspeed.pipe", "deepspeed.accelerator", "deepspeed.utils"}
OPEN = {
    # of PipelineModule and the specs of its layers
    *(
        "activation_checkpoint_interval",
        "base_seed",
        "build",
        "forward_fn",
        "forward_funcs",
        "key",
        "num_stages",
        "parts",
    ),
    *("stage_id", "tied_modules", "tied_weight_attr", "typename", "world_size", "global_rank"),
    # of the engine
    *("basic_optimizer", "client_lr_scheduler", "data_iterator", "device", "dynamic_shape", "get_data_types"),
    "is_pipe_partitioned",
    *("mpu", "optimizer", "param_names", "skipped_steps", "state_dict", "training_data", "using_bf16_optimizer"),
    *("get_cuda_rng_tracker",),  # of Megatron, too
}
OBJECTS = {"engine", "grid", "model", "module", "pipeline", "wrapper", "p2p", "groups", "self", "super()"}
TORCHS = {name for name in {*dir(nn.Module()), *_mentioned(nn.Module)} if name.startswith("_")} | {
    "_asdict",
    "_replace",
}


def private_names() -> set[str]:
    """Return DeepSpeed's private names."""
    kinds: list[Any] = [PipelineEngine, PipelineModule, PipelineParallelGrid, BF16_Optimizer, DeepSpeedZeroOptimizer]
    found = {name for kind in kinds for name in {*dir(kind), *_mentioned(kind)}} | {*dir(groups), *dir(p2p)}
    underscored = {name for name in found if name.startswith("_") and not name.startswith("__")} - TORCHS
    return underscored | {name.name for name in NEEDED} - OPEN


def trees() -> dict[Path, ast.Module]:
    return {path: tree_of(path) for path in PACKAGE.rglob("*.py") if ADAPTER not in path.parents}


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that one of our files defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and base_of(node) == "self":
            yield node.attr


def base_of(node: ast.Attribute) -> str:
    """Return the last name before an attribute, without its leading underscore."""
    return ast.unparse(node.value).rpartition(".")[2].lstrip("_")


def used(tree: ast.AST, private: set[str], ours: set[str]) -> Iterator[tuple[int, str]]:
    """Yield uses of DeepSpeed's private names in a file. Names in ``ours`` count only on DeepSpeed's objects."""
    overrides = {
        id(member)
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef) and any("Engine" in ast.unparse(base) for base in kind.bases)
        for member in kind.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            if node.attr not in ours or base_of(node) in OBJECTS - {"self"}:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.FunctionDef) and node.name in private and id(node) in overrides:
            yield node.lineno, f"def {node.name}"
        elif isinstance(node, ast.Constant) and node.value in private and str(node.value).startswith("_"):
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("deepspeed"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in private)


def test_only_the_adapter_uses_private_names() -> None:
    found, private = trees(), private_names()
    ours = {name for tree in found.values() for name in defined(tree)}
    uses = [
        f"{p.relative_to(PACKAGE)}:{line}: {what}"
        for p, tree in found.items()
        for line, what in used(tree, private, ours)
    ]
    assert not uses, "\n".join(uses)


def test_only_documented_modules_of_deepspeed_are_imported() -> None:
    for path, tree in trees().items():
        allowed = OF_MODELS if PACKAGE / "models" in path.parents else MODULES
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                names = [names[0]] if names[0] in allowed else [name for name in names[1:] if name not in allowed]
            assert {name for name in names if name.split(".")[0] == "deepspeed"} <= allowed, (path, names)
