"""Read a universal checkpoint, DeepSpeed's format with whole parameters: any pipeline, data and tensor degree.

Every rank reads the parameters of the layers that it has now, and cuts its tensor-parallel slice from each.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynmo.engine.checkpoint.applying import Loaded, LoadOptions
from ds_dynmo.engine.checkpoint.context import CheckpointContext, together
from ds_dynmo.engine.checkpoint.flat_files import optimizer_files
from ds_dynmo.engine.checkpoint.layer_content import LoadedLayer
from ds_dynmo.engine.checkpoint.layout import Key
from ds_dynmo.engine.checkpoint.matching import check_common
from ds_dynmo.engine.checkpoint.optimizer_files import named_parameters
from ds_dynmo.engine.checkpoint.safe_load import safe_load
from ds_dynmo.engine.checkpoint.universal_slices import Shape, cut_slice
from ds_dynmo.engine.deepspeed_adapter import universal
from ds_dynmo.engine.deepspeed_adapter.files import GROUP_OPTIONS, slice_number
from ds_dynmo.engine.deepspeed_adapter.universal import FP32_WEIGHT_KEY, MOMENTS, STEP, WholeParameter
from ds_dynmo.engine.optimizer.flat_layout import MASTER
from ds_dynmo.engine.optimizer.parameter_groups import options_of
from ds_dynmo.errors import CheckpointError

_STAGE_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt$")


def is_universal(folder: str) -> bool:
    """Tell whether ``ds_to_universal`` wrote a folder."""
    return os.path.isfile(os.path.join(folder, universal.OPTIMIZER))


@dataclass(frozen=True)
class WholeModel:
    """The parameters of the whole model, the same on every rank.

    Attributes:
        names: per parameter, what a universal checkpoint may call it.
        shapes: per parameter, its shape on each tensor-parallel slice when it was built.
        groups: the number of its parameter group, unless no optimizer has it.
    """

    names: dict[Key, tuple[str, ...]]
    shapes: dict[Key, list[Shape]]
    groups: dict[Key, int]

    @classmethod
    def gather(cls, context: CheckpointContext) -> WholeModel:
        """Gather what every rank knows of its own layers. Collective."""
        stage, origins = context.stage, context.origin.layers
        layout = optimizer_files(stage).layout(named_parameters(stage.layers))
        every = stage.comm.gather_objects(
            (
                context.engine.grid.get_slice_parallel_rank(),
                {index: origins[index].shapes for index in stage.layers.counted_modules()},
                {slot.key: slot.group for slot in layout.slots},
            )
        )
        shapes: dict[Key, dict[int, Shape]] = {}
        for slice_index, layers, _ in every:
            for index, found in layers.items():
                for name, shape in found.items():
                    shapes.setdefault((index, name), {})[slice_index] = shape
        return cls(
            names={key: tuple(_names(context, *key)) for key in shapes},
            shapes={key: [shape for _, shape in sorted(of_slices.items())] for key, of_slices in shapes.items()},
            groups={key: number for *_, groups in every for key, number in groups.items()},
        )


def _names(context: CheckpointContext, index: int, name: str) -> Iterator[str]:
    """Find DeepSpeed's names of a parameter of layer ``index``: with the number of the layer, or the key of a tie."""
    layers = context.stage.layers
    key, tie = layers.key(index), layers.tie_of(index)
    if key is not None:
        yield f"tied_modules.{key}.{name}"
        return
    yield f"{index}.{name}"
    if tie is None:
        return
    if name in tie.weights[index]:  # DeepSpeed has the first use on a stage under the key, and any copy will do
        position = tie.weights[index].index(name)
        for use in tie.uses:
            yield f"tied_modules.{tie.key}.{tie.weights[use][position]}"
            yield f"{use}.{tie.weights[use][position]}"
    elif not any(name in context.origin.layers[use].shapes for use in tie.uses if use != index):
        yield f"tied_modules.{tie.key}.{name}"


class UniversalFolder:
    """The files of a universal checkpoint."""

    def __init__(self, folder: str) -> None:
        if not os.path.isdir(folder):
            raise CheckpointError(f"{folder}: there is no such folder")
        if not is_universal(folder):
            raise CheckpointError(
                f"{os.path.join(folder, universal.OPTIMIZER)}: there is no such file, so this is no universal "
                "checkpoint, which checkpoint.load_universal = true expects; ds_to_universal makes one"
            )
        self._folder = folder
        self._parameters = os.path.join(folder, universal.PARAMETERS)
        pattern = os.path.join(glob.escape(folder), "mp_rank_*_model_states.pt")
        numbered = {int(found.group(1)): name for name in glob.glob(pattern) if (found := _STAGE_FILE.search(name))}
        self.stage_files = [path for _, path in sorted(numbered.items())]
        if not self.stage_files:
            raise CheckpointError(f"{pattern}: there is no such file")

    def path(self, parameter: str = "", what: str = "") -> str:
        return os.path.join(self._parameters, parameter, f"{what}.pt" if what else "")

    def parameters(self) -> list[str]:
        return sorted(name for name in os.listdir(self._parameters) if os.path.isdir(self.path(name)))

    def cut(self, parameter: str, what: str, shapes: list[Shape], tp_rank: int) -> torch.Tensor:
        """Cut one slice's part from a weight or a moment; it is left in the file where that is possible."""
        path = self.path(parameter, what)
        whole = WholeParameter.of(safe_load(path, mapped=True))
        if whole is None:
            raise CheckpointError(f"{path}: holds no whole parameter as ds_to_universal writes it for a pipeline")
        return cut_slice(whole, shapes, tp_rank, path)

    def has_moments(self, parameter: str) -> bool:
        return any(os.path.exists(self.path(parameter, what)) for what in MOMENTS)

    def step(self, parameter: str) -> float:
        path = self.path(parameter, STEP)
        saved = safe_load(path)
        try:
            return float(saved)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: holds {saved!r}, expected a count of steps") from error

    def groups(self, stage_file: str) -> list[tuple[list[str], dict[str, Any] | None]]:
        """Read the parameter groups that a saved stage had: names of its parameters, options.

        Stock DeepSpeed keeps the options of the first stage alone; None: they are not known.
        """
        content = safe_load(stage_file, mapped=True)
        shapes = content.get(universal.PARAM_SHAPES) if isinstance(content, dict) else None
        if not isinstance(shapes, list):
            raise CheckpointError(f"{stage_file}: lacks {universal.PARAM_SHAPES}")
        options: list[Any] = content.get(GROUP_OPTIONS, [None] * len(shapes))
        if GROUP_OPTIONS not in content and stage_file == self.stage_files[0]:
            common = safe_load(os.path.join(self._folder, universal.OPTIMIZER))
            options = common.get(universal.PARAM_GROUPS, []) if isinstance(common, dict) else []
        if len(options) != len(shapes):
            raise CheckpointError(
                f"{stage_file}: {universal.PARAM_SHAPES} has {len(shapes)} parameter groups, but there are options of "
                f"{len(options)}"
            )
        return [(list(names), known and options_of(known)) for names, known in zip(shapes, options)]


@dataclass(frozen=True)
class ReadState:
    """What one rank read of its parameters.

    Attributes:
        layers: by the number of the layer that owns them here.
        values: per parameter with optimizer state, fp32 weight and moments.
        steps: per parameter with moments, the count of its steps.
    """

    layers: dict[int, LoadedLayer]
    values: dict[Key, dict[str, torch.Tensor]]
    steps: dict[Key, float]


def read_universal(context: CheckpointContext, path: str, options: LoadOptions) -> Loaded:
    """Read everything that this rank needs where layers are now. Nothing changes. Collective.

    Raises:
        CheckpointError: on every rank, naming the file or the parameter.
    """
    comm = context.stage.comm
    with_state = options.optimizer and not options.module_only and context.engine.basic_optimizer is not None
    model = WholeModel.gather(context)

    def read() -> tuple[UniversalFolder, ReadState]:
        folder = UniversalFolder(path)
        _check(context, folder, model, strict=options.strict, with_state=with_state)
        return folder, _read_parameters(context, folder, model, strict=options.strict, with_state=with_state)

    folder, found = together(comm, read)
    steps = {key: step for of_rank in comm.gather_objects(found.steps) for key, step in of_rank.items()}

    def finish() -> Loaded:
        state = _optimizer_state(context, folder, model, found, steps) if with_state else None
        source, common, groups = _common(context, folder, model, options)
        return Loaded(source, found.layers, state, common, None, groups)

    return together(comm, finish)


def _check(
    context: CheckpointContext, folder: UniversalFolder, model: WholeModel, *, strict: bool, with_state: bool
) -> None:
    """Refuse what cannot be loaded, before anything is read."""
    if context.stage.replicas_differ:
        raise CheckpointError(f"{folder.path()}: has no place for parameters that each replica has of its own")
    optimizer = context.engine.basic_optimizer
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
    layers, tp_rank = context.stage.layers, context.engine.grid.get_slice_parallel_rank()
    read = ReadState({}, {}, {})
    for index, module in layers.modules().items():
        weights: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            key = layers.first_use(index), name
            _check_as_built(model, key, parameter, tp_rank, folder)
            saved = next((found for found in model.names[key] if os.path.isdir(folder.path(found))), None)
            if saved is None and strict:
                raise CheckpointError(
                    f"{folder.path(model.names[key][0])}: there is no such folder; ds_to_universal leaves out what was "
                    "frozen when it was saved, and load_module_strict=False keeps the present weights of that"
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
    model: WholeModel, key: Key, parameter: torch.Tensor, tp_rank: int, folder: UniversalFolder
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
    context: CheckpointContext, folder: UniversalFolder, model: WholeModel, found: ReadState, steps: dict[Key, float]
) -> Any:
    """Make what the optimizer's ``restore`` takes; ``steps``: of the whole model's parameters."""
    optimizer = context.engine.basic_optimizer
    options = {number: options_of(group) for number, group in enumerate(optimizer.param_groups)}
    missing = set(options)
    for stage_file in folder.stage_files:
        if missing:
            found_options = _options(folder, stage_file, model)
            for number in missing & found_options.keys():
                options[number] |= found_options[number]
            missing -= found_options.keys()
    counts = {key: universal.count_of_steps(optimizer, step) for key, step in steps.items()}
    return optimizer_files(context.stage).assemble(found.values, counts, model.groups, options)


def _common(
    context: CheckpointContext, folder: UniversalFolder, model: WholeModel, options: LoadOptions
) -> tuple[str, dict[str, Any], list[int | None]]:
    """Read counters, scheduler and client state: the file's path, its content, and the groups of its scheduler."""
    files = folder.stage_files
    path = files[slice_number(context.engine) * len(files) // context.engine.mp_world_size]  # as DeepSpeed chooses
    common = safe_load(path)
    check_common(context, common, path, options)
    schedules = options.scheduler and not options.module_only and context.engine.lr_scheduler is not None
    return path, common, _group_numbers(folder, path, model) if schedules else []


def _options(folder: UniversalFolder, stage_file: str, model: WholeModel) -> dict[int, dict[str, Any]]:
    """Read the options of those groups here that a saved stage had, if they are known."""
    numbers = _group_numbers(folder, stage_file, model)
    known = zip(numbers, (options for _, options in folder.groups(stage_file)))
    return {number: options for number, options in known if number is not None and options is not None}


def _group_numbers(folder: UniversalFolder, stage_file: str, model: WholeModel) -> list[int | None]:
    """Find the number here of each parameter group that a saved stage had; None: it had nothing of this model."""
    number_of = {name: model.groups[key] for key, names in model.names.items() if key in model.groups for name in names}
    found: list[int | None] = []
    for position, (names, _) in enumerate(folder.groups(stage_file)):
        numbers = {number_of[name] for name in names if name in number_of}
        if len(numbers) > 1 or numbers & set(found):
            raise CheckpointError(
                f"{stage_file}: parameter group {position} there is not one group here but (part of) "
                f"{sorted(numbers)}; load_optimizer_states=False and load_lr_scheduler_states=False load the rest"
            )
        found.append(next(iter(numbers), None))
    return found
