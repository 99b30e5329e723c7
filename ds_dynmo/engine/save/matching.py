"""Check that a checkpoint is of this model and optimizer, and find which of its files belong to a layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.context import CheckpointContext
from ds_dynmo.engine.save.manifest import Manifest
from ds_dynmo.errors import CheckpointError, counted

_OF_OTHER_PIECES = (
    "with other vocabulary_slices or split_blocks a model begins from its export (ds-dynmo-export), which is whole"
)
_LAYER_BY_LAYER = (
    "layer_NN-model_states.pt in the checkpoint has the weights of layer NN, for its load_state_dict before initialize"
)
_LOADS_THE_REST = "load_module_strict=False loads what both have"

_Shapes = Mapping[str, list[int]]  # of a layer's parameters, by name


def check_model(context: CheckpointContext, manifest: Manifest, path: str, options: LoadOptions) -> None:
    """Refuse a checkpoint of another model, or of another optimizer if that is loaded.

    Raises:
        CheckpointError: with what was found and what was expected.
    """
    check_slices(context, len(manifest.slices), path)
    _check_replicas(manifest, context.here.replicas, context.stage.replicas_differ, path)
    saved = manifest.slices[context.here.tp_rank].shapes
    _check_number_of_layers(context, manifest.placement.num_layers, saved, path)
    for index, origin in context.origin.layers.items():
        found = saved.get(index)
        if found is None:
            raise CheckpointError(f"{path}: layer {index} has no parameters there, expected {origin.shapes}")
        names = [name for name in found if options.strict or name in origin.shapes]
        names += [name for name in origin.shapes if options.strict and name not in found]
        differ, expected = _differing(found, origin.shapes, names)
        if differ:
            here = {number: layer.shapes for number, layer in context.origin.layers.items()}
            in_both = any(name in found and name in origin.shapes for name in differ)
            remedy = _OF_OTHER_PIECES if _are_pieces(saved, here, index) else "" if in_both else _LOADS_THE_REST
            raise CheckpointError(
                f"{path}: layer {index} was built with parameters of shapes {differ}, expected {expected}"
                f"{remedy and f'; {remedy}'}"
            )
    if options.strict:
        _check_no_more_layers(context, manifest, path)
    if options.module_only or not options.optimizer:
        return
    inner = context.stage.optimizer.inner
    present_class, present_storage = type(inner).__name__ if inner is not None else "", context.stage.state.storage
    saved_class, saved_storage = manifest.optimizer_class, manifest.optimizer
    if saved_class != present_class or saved_storage != present_storage:
        raise CheckpointError(
            f"{path}: optimizer state of {saved_class or 'none'} ({saved_storage}), expected "
            f"{present_class or 'none'} ({present_storage}); load_optimizer_states=False loads the rest"
        )


def _check_number_of_layers(
    context: CheckpointContext, num_saved: int, saved: Mapping[int, _Shapes], path: str
) -> None:
    """Refuse a model of other layers than are here: name the first that differs."""
    num_layers = context.stage.layers.num_layers
    if num_saved == num_layers:
        return
    here = {index: origin.shapes for index, origin in context.origin.layers.items()}
    index = next(
        number
        for number in range(max(num_saved, num_layers))
        if number in (num_saved, num_layers) or saved.get(number, {}) != here.get(number, {})
    )
    found, expected = _differing(saved.get(index, {}), here.get(index, {}))
    raise CheckpointError(
        f"{path}: a model of {counted(num_saved, 'layer')}, expected {num_layers}: the first that differs is layer "
        f"{index}, with parameters of shapes {found} there, expected {expected}; "
        f"{_OF_OTHER_PIECES if _are_pieces(saved, here, index) else _LAYER_BY_LAYER}"
    )


def _differing(found: _Shapes, expected: _Shapes, names: Iterable[str] | None = None) -> tuple[Any, Any]:
    """Return the shapes in which two layers differ, by name; None: one has no such parameter."""
    differ = [name for name in names or {**found, **expected} if found.get(name) != expected.get(name)]
    return {name: found.get(name) for name in differ}, {name: expected.get(name) for name in differ}


def _are_pieces(saved: Mapping[int, _Shapes], here: Mapping[int, _Shapes], index: int) -> bool:
    """Return whether a layer may be a piece of the other model's: rows of its matrix, or the first of its halves."""
    one, other = saved.get(index, {}), here.get(index, {})
    if not (one and other):
        return False
    if one.keys() == other.keys():
        return all(len(one[name]) > 1 and one[name][1:] == other[name][1:] for name in one)
    return {**one, **saved.get(index + 1, {})} == other or {**other, **here.get(index + 1, {})} == one


def _check_no_more_layers(context: CheckpointContext, manifest: Manifest, path: str) -> None:
    """Refuse a checkpoint in which a layer has parameters that here belong to another layer, or to none."""
    for index, found in manifest.slices[context.here.tp_rank].shapes.items():
        if found and index not in context.origin.layers:
            raise CheckpointError(
                f"{path}: layer {index} has parameters {found} there, expected none of its own; {_LOADS_THE_REST}"
            )


def check_slices(context: CheckpointContext, found: int, path: str) -> None:
    """Refuse files of so many tensor-parallel slices, unless they are as many as here.

    Raises:
        CheckpointError: naming both.
    """
    expected = context.here.tp_size
    if found != expected:
        raise CheckpointError(
            f"{path}: written with {found} tensor-parallel slices, expected {expected}, the ranks on the topology's "
            "'model' axis: DeepSpeed cuts what ds_to_universal makes of it into other slices, without the \"dynmo\" "
            "section"
        )


def check_common(context: CheckpointContext, common: Any, path: str, options: LoadOptions) -> None:
    """Refuse a file of DeepSpeed's that lacks counters, or the scheduler if that is loaded.

    Raises:
        CheckpointError: with what it lacks.
    """
    found = common.keys() if isinstance(common, dict) else set()
    lacking = {"global_steps", "skipped_steps", "dp_world_size", "mp_world_size"} - found
    if lacking:
        raise CheckpointError(f"{path}: lacks {sorted(lacking)}")
    schedules = options.scheduler and not options.module_only and context.engine.lr_scheduler is not None
    if schedules and not isinstance(common.get("lr_scheduler"), dict):
        raise CheckpointError(
            f"{path}: holds no LR scheduler, but this engine has one; load_lr_scheduler_states=False loads the rest"
        )


def _check_replicas(manifest: Manifest, replicas: int, differ: bool, path: str) -> None:
    """Refuse another number of replicas if replicas differ, there or here (``differ``), and other replicas.

    Raises:
        CheckpointError: naming both.
    """
    if (manifest.replicas_differ or differ) and manifest.replicas != replicas:
        raise CheckpointError(
            f"{path}: written with {manifest.replicas} data-parallel replicas, expected {replicas}: each holds "
            "parameters of its own (such as its share of experts), which cannot be distributed over others"
        )
    if manifest.replicas_differ != differ:
        holds = {True: "has parameters of its own (moe.expert_parallel)", False: "has the same parameters"}
        raise CheckpointError(
            f"{path}: written by a model of which every data-parallel replica {holds[manifest.replicas_differ]}, "
            f"expected one of which every replica {holds[differ]}"
        )
