"""Read a universal checkpoint, DeepSpeed's format with whole parameters: any pipeline, data and tensor degree.

Every rank reads the parameters of the layers that it has now, and cuts its tensor-parallel slice from each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynmo.engine.deepspeed import universal
from ds_dynmo.engine.deepspeed.universal import FP32_WEIGHT_KEY, MOMENTS, STEP
from ds_dynmo.engine.save.applying import Loaded, LoadOptions
from ds_dynmo.engine.save.context import CheckpointContext
from ds_dynmo.engine.save.importers.universal_folder import UniversalFolder
from ds_dynmo.engine.save.importers.universal_slices import Shape
from ds_dynmo.engine.save.layer_content import LoadedLayer
from ds_dynmo.engine.save.matching import check_common
from ds_dynmo.engine.save.safe_load import safe_load
from ds_dynmo.engine.state.keys import MASTER, ParamKey
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.engine.state.pieces import FLAT, StatePieces, steps_of_groups
from ds_dynmo.errors import CheckpointError


@dataclass(frozen=True)
class WholeModel:
    """The parameters of the whole model, the same on every rank.

    Attributes:
        names: per parameter, what a universal checkpoint may call it.
        shapes: per parameter, its shape on each tensor-parallel slice when it was built.
        groups: the number of its parameter group, unless no optimizer has it.
    """

    names: dict[ParamKey, tuple[str, ...]]
    shapes: dict[ParamKey, list[Shape]]
    groups: dict[ParamKey, int]

    @classmethod
    def gather(cls, context: CheckpointContext) -> WholeModel:
        """Gather what every rank knows of its layers. Collective."""
        stage, origins = context.stage, context.origin.layers
        slots = stage.state.slots(stage.layers.named_parameters())
        every = stage.comm.gather_objects(
            (
                context.here.tp_rank,
                {index: origins[index].shapes for index in stage.layers.counted_modules()},
                {slot.key: slot.group for slot in slots.slots},
            )
        )
        shapes: dict[ParamKey, dict[int, Shape]] = {}
        for slice_index, layers, _ in every:
            for index, found in layers.items():
                for name, shape in found.items():
                    shapes.setdefault(ParamKey(index, name), {})[slice_index] = shape
        return cls(
            names={key: tuple(names_of(context, *key)) for key in shapes},
            shapes={key: [shape for _, shape in sorted(of_slices.items())] for key, of_slices in shapes.items()},
            groups={key: number for *_, groups in every for key, number in groups.items()},
        )


def names_of(context: CheckpointContext, index: int, name: str) -> Iterator[str]:
    """Find DeepSpeed's names of a parameter of layer ``index``: with the number of the layer, or the key of a tie."""
    key = context.stage.layers.key(index)
    yield f"{index}.{name}" if key is None else f"tied_modules.{key}.{name}"


@dataclass(frozen=True)
class ReadState:
    """The values that one rank read of its parameters.

    Attributes:
        layers: by the number of the layer that owns them here.
        values: per parameter with optimizer state, fp32 weight and moments.
        steps: per parameter with moments, the count of its steps.
    """

    layers: dict[int, LoadedLayer]
    values: dict[ParamKey, dict[str, torch.Tensor]]
    steps: dict[ParamKey, float]


def read_universal(context: CheckpointContext, path: str, options: LoadOptions) -> Loaded:
    """Read everything that this rank needs where layers are now. Nothing changes. Collective.

    Raises:
        CheckpointError: on every rank, naming the file or the parameter.
    """
    comm = context.stage.comm
    with_state = options.optimizer and not options.module_only and context.stage.optimizer.inner is not None
    model = WholeModel.gather(context)

    def read() -> tuple[UniversalFolder, ReadState]:
        folder = UniversalFolder(path)
        _check(context, folder, model, strict=options.strict, with_state=with_state)
        return folder, _read_parameters(context, folder, model, strict=options.strict, with_state=with_state)

    folder, found = context.everywhere(read)
    steps = {key: step for of_rank in comm.gather_objects(found.steps) for key, step in of_rank.items()}

    def finish() -> Loaded:
        state = _optimizer_state(context, folder, model, found, steps) if with_state else None
        source, common, groups = _common(context, folder, model, options)
        return Loaded(source, found.layers, state, common, None, groups)

    return context.everywhere(finish)


def _check(
    context: CheckpointContext, folder: UniversalFolder, model: WholeModel, *, strict: bool, with_state: bool
) -> None:
    """Refuse what cannot be loaded, before anything is read."""
    if context.stage.replicas_differ:
        raise CheckpointError(f"{folder.path()}: has no place for parameters that each replica has of its own")
    optimizer = context.stage.optimizer.inner
    if with_state and not universal.keeps_moments(optimizer):
        amsgrad = " with amsgrad" if any(group.get("amsgrad") for group in optimizer.param_groups) else ""
        raise CheckpointError(
            f"{folder.path()}: has the moments of Adam, but this engine trains with {type(optimizer).__name__}"
            f"{amsgrad}; load_optimizer_states=False loads the rest"
        )
    known = {name for names in model.names.values() for name in names}
    unknown = [name for name in folder.parameters() if name not in known]
    if strict and unknown:
        raise CheckpointError(f"{folder.path()}: has parameters that this model lacks: {unknown}")


# -- parameters ---------------------------------------------------------------------------------------


def _read_parameters(
    context: CheckpointContext, folder: UniversalFolder, model: WholeModel, *, strict: bool, with_state: bool
) -> ReadState:
    """Read the parameters of this rank's layers."""
    layers, tp_rank = context.stage.layers, context.here.tp_rank
    read = ReadState({}, {}, {})
    for index, module in layers.modules().items():
        weights: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            key = ParamKey(layers.first_use(index), name)
            _check_as_built(model, key, parameter, tp_rank, folder)
            saved = next((found for found in model.names[key] if os.path.isdir(folder.path(found))), None)
            if saved is None and strict:
                raise CheckpointError(
                    f"{folder.path(model.names[key][0])}: there is no such folder; ds_to_universal leaves out what was "
                    "frozen or had not trained when it was saved; load_module_strict=False keeps the present weights"
                )
            if saved is None:
                continue
            weights[name] = folder.cut(saved, FP32_WEIGHT_KEY, model.shapes[key], tp_rank)
            if not with_state or key not in model.groups:
                continue
            read.values[key] = {MASTER: weights[name]}
            if parameter.requires_grad or folder.has_moments(saved):
                read.values[key] |= {what: folder.cut(saved, what, model.shapes[key], tp_rank) for what in MOMENTS}
                read.steps[key] = folder.step(saved)
        read.layers[index] = LoadedLayer(weights, None)
    return read


def _check_as_built(
    model: WholeModel, key: ParamKey, parameter: torch.Tensor, tp_rank: int, folder: UniversalFolder
) -> None:
    """Refuse to load a layer that changed: what changed beside its parameters is not in the folder."""
    built = model.shapes[key][tp_rank] if key in model.shapes else None
    if list(parameter.shape) != built:
        raise CheckpointError(
            f"{folder.path()}: layer {key[0]}'s {key[1]} had shape {built} when it was built and has "
            f"{list(parameter.shape)} now; load into an engine in which no layer has changed"
        )


# -- optimizer, counters and client state -------------------------------------------------------------


def _optimizer_state(
    context: CheckpointContext,
    folder: UniversalFolder,
    model: WholeModel,
    found: ReadState,
    steps: dict[ParamKey, float],
) -> StatePieces:
    """Put together what the optimizer will hold; ``steps``: of the whole model's parameters."""
    optimizer = context.stage.optimizer.inner
    options = {number: options_of(group) for number, group in enumerate(optimizer.param_groups)}
    missing = set(options)  # a group whose options no file has keeps those that it has here
    for stage_file in folder.stage_files:
        if missing:
            numbers = _group_numbers(folder, stage_file, model)
            for number, group in zip(numbers, folder.groups(stage_file)):
                if number in missing and group.options is not None:
                    options[number] |= options_of(group.options)
                    missing.remove(number)
    counts = {key: universal.count_of_steps(optimizer, step) for key, step in steps.items()}
    of_groups = steps_of_groups(counts, model.groups) if context.stage.state.storage == FLAT else {}
    return StatePieces(
        elements={key: {name: [(0, v)] for name, v in tensors.items()} for key, tensors in found.values.items()},
        values={key: {STEP: counts[key]} for key in found.values if key in counts},
        kinds={number: set(MOMENTS) for number in of_groups},
        scalars={number: {STEP: count} for number, count in of_groups.items()},
        options=options,
        loss_scale=folder.loss_scale(),
    )


def _common(
    context: CheckpointContext, folder: UniversalFolder, model: WholeModel, options: LoadOptions
) -> tuple[str, dict[str, Any], list[int | None]]:
    """Read counters, scheduler and client state: the file's path, its content, and the groups of its scheduler."""
    path = folder.stage_files[universal.source_file(context.engine, len(folder.stage_files))]
    common = safe_load(path)
    check_common(context, common, path, options)
    schedules = options.scheduler and not options.module_only and context.engine.lr_scheduler is not None
    return path, common, _group_numbers(folder, path, model) if schedules else []


def _group_numbers(folder: UniversalFolder, stage_file: str, model: WholeModel) -> list[int | None]:
    """Find the number here of each parameter group that a saved stage had; None: it had nothing of this model."""
    number_of = {name: model.groups[key] for key, names in model.names.items() if key in model.groups for name in names}
    found: list[int | None] = []
    for position, group in enumerate(folder.groups(stage_file)):
        numbers = {number_of[name] for name in group.names if name in number_of}
        if len(numbers) > 1 or numbers & set(found):
            raise CheckpointError(
                f"{stage_file}: parameter group {position} there is not one group here but (part of) "
                f"{sorted(numbers)}; load_optimizer_states=False and load_lr_scheduler_states=False load the rest"
            )
        found.append(next(iter(numbers), None))
    return found
