"""Describe what stock DeepSpeed wrote of a pipeline by a manifest.

Its optimizer files have parameters by their position. So they load at the layout that they were written at, which has
to be that of this engine's construction: stages, partition and replicas. Its files of weights are per layer.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ds_dynmo.engine.deepspeed.files import names_of_groups
from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.context import CheckpointContext
from ds_dynmo.engine.save.importers.per_parameter import torch_optimizer
from ds_dynmo.engine.save.layer_content import LoadedLayer
from ds_dynmo.engine.save.manifest import Manifest, SliceManifest, stage_file
from ds_dynmo.engine.save.matching import check_slices
from ds_dynmo.engine.save.saved_files import SavedCheckpoint
from ds_dynmo.engine.state.keys import MASTER
from ds_dynmo.engine.state.pieces import PER_PARAMETER, StageSlots, StatePieces
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files.checkpoints import FOLDER
from ds_dynmo.placement import Placement


def how_it_is_read(folder: str) -> str:
    """Describe how a checkpoint without a manifest is read."""
    return (
        f"{folder}: has no folder {FOLDER}/, so it is read as stock DeepSpeed's: at the stages, partition and replicas "
        "that it was written at, or weights alone (load_module_only=True) at any. If ds_dynmo wrote it, copy it with "
        "that folder"
    )


def stock_manifest(
    context: CheckpointContext, folder: str, names: list[str], slices: tuple[SliceManifest, ...], options: LoadOptions
) -> Manifest:
    """Make the manifest of a checkpoint that stock DeepSpeed wrote of this model.

    Of weights alone it is that of one stage, whose file every pipeline has.

    Args:
        names: of the files in ``folder``, as all ranks see them.
        slices: what DeepSpeed would write of the pipeline that this engine was constructed with.

    Raises:
        CheckpointError: it has other files.
    """
    if context.stage.replicas_differ:
        raise CheckpointError(
            f"{how_it_is_read(folder)}. It has no place for parameters that each replica has of its own "
            "(moe.expert_parallel)"
        )
    of_layers = fnmatch.filter(names, "layer_*-model_states.pt")
    cut = {found.group() for name in of_layers if (found := re.search(r"-model_\d+-", name))}
    check_slices(context, len(cut) or 1, folder)
    if options.module_only:
        placement = Placement.chain([0, context.stage.layers.num_layers])
        slices = tuple(replace(each, stages=(StageSlots(()),), numbers=each.numbers[:1]) for each in slices)
    else:
        placement, slices = context.origin.placement, tuple(map(_trained, slices))
        stages = fnmatch.filter(names, "mp_rank_*_model_states.pt")
        expected = sorted(stage_file(number) for of_slice in slices for number in of_slice.numbers)
        if stages != expected:
            raise CheckpointError(f"{how_it_is_read(folder)}. It has the stage files {stages}, expected {expected}")
    return Manifest(
        placement=placement,
        replicas=0,
        optimizer=context.stage.state.storage,
        optimizer_class="",
        slices=slices,
        frozen_excluded=False,
        files={},
        state={},
    )


def _trained(of_slice: SliceManifest) -> SliceManifest:
    """Leave out parameters that were frozen at construction: DeepSpeed writes none of them."""
    return replace(
        of_slice,
        stages=tuple(
            replace(stage, slots=tuple(slot for slot in stage.slots if not slot.detached)) for stage in of_slice.stages
        ),
    )


def at_saved_layout(context: CheckpointContext, saved: SavedCheckpoint) -> SavedCheckpoint:
    """Return the checkpoint of stock DeepSpeed with the places of parameters in the files of its optimizer.

    Raises:
        CheckpointError: a file was written with other replicas, or is of other parameters than this stage's.
    """
    stages = tuple(_stage_slots(context, saved, stage) for stage in range(saved.manifest.num_stages))
    slices = list(saved.manifest.slices)
    slices[saved.slice_index] = replace(saved.slice, stages=stages)
    return saved.described_by(replace(saved.manifest, slices=tuple(slices)))


def _stage_slots(context: CheckpointContext, saved: SavedCheckpoint, stage: int) -> StageSlots:
    """Find the places of a stage's parameters: DeepSpeed's flat buffers have the user's order, this engine's not."""
    of_stage, file = saved.slice.stages[stage], stage_file(saved.slice.numbers[stage])
    path, content = saved.path(file), saved.open(file).content
    expected = f"those of stage {stage} under the partition {saved.manifest.placement}"
    if content.get("dp_world_size") != context.here.replicas:
        raise CheckpointError(
            f"{path}: written with {content.get('dp_world_size')} data-parallel replicas, expected "
            f"{context.here.replicas}"
        )
    groups = [[slot for slot in of_stage.slots if slot.group == number] for number in of_stage.trained_groups]
    names = names_of_groups(content)
    counts = None if names is None else [len(group) for group in names]
    if names is None and groups and saved.manifest.optimizer == PER_PARAMETER:
        counts = [len(g["params"]) for g in torch_optimizer(saved, stage)[1]["param_groups"] if g["params"]]
        _check_shapes(saved, stage)
    if counts is not None and counts != [len(group) for group in groups]:
        raise CheckpointError(
            f"{path}: has parameter groups of {counts} parameters, expected {[len(group) for group in groups]}: "
            f"{expected}, with the same layers frozen"
        )
    if names is None:
        return of_stage
    slots = []
    for in_file, group in zip(names, groups):
        slot_of = {name: slot for slot in group for name in _names_of(context, *slot.key)}
        offset = 0
        for name in in_file:
            if name not in slot_of:
                raise CheckpointError(f"{path}: has {name} in the parameter group of {min(slot_of)}: {expected}")
            slots.append(replace(slot_of[name], offset=offset))
            offset += slot_of[name].numel
    return replace(of_stage, slots=tuple(slots))


def check_masters(saved: SavedCheckpoint, layers: Mapping[int, LoadedLayer], pieces: StatePieces) -> None:
    """Refuse fp32 weights of which a layer's weights are not the rounded ones: files do not name them without ZeRO.

    Args:
        layers: by the number that ``pieces`` have.

    Raises:
        CheckpointError: naming the weight.
    """
    for (index, name), kinds in pieces.elements.items():
        if name not in layers[index].state:
            continue
        weight = layers[index].state[name].flatten()
        for start, values in kinds[MASTER]:
            if not values.to(weight.dtype).equal(weight[start : start + len(values)]):
                raise CheckpointError(
                    f"{saved.path('')}: the optimizer's fp32 weights of layer {index}'s {name} are not its weights: it "
                    f"was saved at another partition than {saved.manifest.placement}, or its parameter groups list "
                    "parameters in another order than the module"
                )


def _check_shapes(saved: SavedCheckpoint, stage: int) -> None:
    """Refuse state of a torch optimizer of other shapes than its parameters."""
    states = torch_optimizer(saved, stage)[1]["state"]
    for slot in saved.slice.stages[stage].slots:
        shape = saved.slice.shapes[slot.layer][slot.name]
        for what, value in (states.get(slot.index) or {}).items():
            comparable = isinstance(value, torch.Tensor) and value.dim() == len(shape)
            if comparable and any(size not in (1, full) for size, full in zip(value.shape, shape)):
                raise CheckpointError(
                    f"{saved.path(stage_file(saved.slice.numbers[stage]))}: {what} of parameter {slot.index} has shape "
                    f"{list(value.shape)}, expected {shape}: layer {slot.layer}'s {slot.name} under the partition "
                    f"{saved.manifest.placement}"
                )


def _names_of(context: CheckpointContext, index: int, name: str) -> Iterator[str]:
    """Find DeepSpeed's names of a parameter of layer ``index``: with the number of the layer, or the key of a tie."""
    key = context.stage.layers.key(index)
    yield f"{index}.{name}" if key is None else f"tied_modules.{key}.{name}"
