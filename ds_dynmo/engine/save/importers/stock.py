"""Read what stock DeepSpeed wrote of a pipeline, at any number of stages.

Its optimizer files identify parameters by their position alone. Which parameters a saved stage had follows from how
many its groups have: stages hold consecutive layers, and a group lists its parameters in the order of the module.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ds_dynmo.engine.deepspeed_adapter.files import counts_of_groups
from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.context import CheckpointContext
from ds_dynmo.engine.save.initial_model import LayerOrigin
from ds_dynmo.engine.save.layout import MANIFEST, UNSHARDED_FP16, Manifest, SliceLayout, stage_file
from ds_dynmo.engine.save.matching import check_slices
from ds_dynmo.engine.save.safe_load import safe_load
from ds_dynmo.engine.save.saved_files import SavedCheckpoint
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.pieces import FLAT, Slot, StageLayout
from ds_dynmo.errors import CheckpointError
from ds_dynmo.placement import Placement


def stock_manifest(
    context: CheckpointContext, folder: str, slices: tuple[SliceLayout, ...], options: LoadOptions
) -> Manifest:
    """Make up the manifest of a checkpoint that stock DeepSpeed wrote of this model.

    Args:
        slices: what DeepSpeed would write of the pipeline that this engine was constructed with.

    Raises:
        CheckpointError: it has other files.
    """
    names = glob.glob(os.path.join(glob.escape(folder), "layer_*-model_states.pt"))
    cut = {found.group() for name in names if (found := re.search(r"-model_\d+-", os.path.basename(name)))}
    check_slices(context, len(cut) or 1, folder)
    pattern = os.path.join(glob.escape(folder), "mp_rank_*_model_states.pt")
    stages = sorted(map(os.path.basename, glob.glob(pattern)))
    expected = sorted(stage_file(number) for layout in slices for number in layout.numbers)
    placement, kind = context.origin.placement, _kind(context, folder)
    if not (options.module_only and stages):
        saved = _partition(context, folder, slices, len(stages))
        if saved is None and stages != expected:
            raise CheckpointError(
                f"{folder}: written by stock DeepSpeed with the stage files {stages}, expected {expected}. Without a "
                f"{MANIFEST} optimizer state loads at another number of stages only if parameter groups list "
                "parameters in the order of the module, and the files say how many there are of each group; "
                "load_module_only=True loads weights"
            )
        if saved is not None:
            placement = saved
            slices = tuple(_at(context, layout, number, placement, kind) for number, layout in enumerate(slices))
    return Manifest(
        placement=placement,
        replicas=0,
        optimizer=kind,
        optimizer_class="",
        slices=slices,
        frozen_excluded=False,
        files={},
        state={},
    )


def _kind(context: CheckpointContext, folder: str) -> str:
    """Find out how stock DeepSpeed kept optimizer state: as this engine does, but fp16 also without ZeRO's shards."""
    kind = context.stage.state.kind
    shards = glob.glob(os.path.join(glob.escape(folder), "*zero_pp_rank_*_optim_states.pt"))
    return UNSHARDED_FP16 if kind == FLAT and context.engine.fp16_enabled() and not shards else kind


# -- which stage had which parameters -----------------------------------------------------------------


def _partition(
    context: CheckpointContext, folder: str, slices: tuple[SliceLayout, ...], num_files: int
) -> Placement | None:
    """Find the partition that was saved, from the files of this rank's slice; None: they do not say."""
    mine = context.engine.grid.get_slice_parallel_rank()
    layers, layout = context.stage.layers, slices[mine]
    if layers.own_uses or num_files % len(slices) or not _is_in_order(context, layout):
        return None
    names = [stage_file(number) for number in _numbers(num_files // len(slices), len(slices), mine)]
    paths = [os.path.join(folder, name) for name in names]
    if not all(map(os.path.isfile, paths)):
        return None
    saved = [counts_of_groups(safe_load(path, mapped=True, checks_values=False)) for path in paths]
    group_of = {slot.key: slot.group for stage in layout.stages for slot in stage.slots if not slot.parked}
    built = context.origin.placement  # among partitions that differ by layers without parameters
    if [_counts(layers, layout, group_of, run.start, run.stop) for run in map(built.run_of, built.stages)] == saved:
        return built
    reached: dict[int, tuple[int, ...]] = {0: (0,)}  # by the end of a stage: the ends up to there
    for counts in saved:
        ends: dict[int, tuple[int, ...]] = {}
        for start, before in reached.items():
            for end in range(start + 1, layers.num_layers + 1):
                if _counts(layers, layout, group_of, start, end) == counts:
                    ends.setdefault(end, (*before, end))
        reached = ends
    found = reached.get(layers.num_layers)
    return None if found is None else Placement.of(found)


def _numbers(stages: int, slices: int, mine: int) -> Iterable[int]:
    """List the numbers of the stages of slice ``mine`` in the names of DeepSpeed's files."""
    return (stage * slices + mine for stage in range(stages))


def _is_in_order(context: CheckpointContext, layout: SliceLayout) -> bool:
    """Tell whether groups list parameters in the order of the module, and files are numbered stage by stage."""
    placement, mine = context.origin.placement, context.engine.grid.get_slice_parallel_rank()
    numbers = _numbers(len(layout.stages), context.engine.grid.slice_parallel_size, mine)
    if tuple(numbers) != layout.numbers or not placement.is_chain:
        return False
    for number, stage in enumerate(layout.stages):
        group_of = {slot.key: slot.group for slot in stage.slots if not slot.parked}
        order = _in_module(context.stage.layers, layout, placement, number)
        if [*group_of] != sorted((key for key in order if key in group_of), key=group_of.__getitem__):
            return False
    return True


def _in_module(layers: StageLayers, layout: SliceLayout, placement: Placement, stage: int) -> list[ParamKey]:
    """List the parameters of a stage in the order of DeepSpeed's module."""
    order = layers.first_uses_at(placement, stage)
    return [ParamKey(index, name) for index in order for name in layout.shapes.get(index, ())]


def _counts(
    layers: StageLayers, layout: SliceLayout, group_of: Mapping[ParamKey, int], start: int, end: int
) -> list[int]:
    """Count the parameters that each group has on a stage of layers ``start`` to ``end``; without groups of none."""
    bounds = sorted({0, start, end, layers.num_layers})
    order = _in_module(layers, layout, Placement.of(bounds), bounds.index(start))
    groups = [group_of[key] for key in order if key in group_of]
    return [groups.count(number) for number in sorted(set(groups))]


def _at(context: CheckpointContext, layout: SliceLayout, mine: int, placement: Placement, kind: str) -> SliceLayout:
    """Describe what DeepSpeed writes of a slice at another partition."""
    known = {slot.key: slot for stage in layout.stages for slot in stage.slots if not slot.parked}
    stages = []
    for number in range(placement.num_stages):
        order = _in_module(context.stage.layers, layout, placement, number)
        slots: list[Slot] = []
        for slot in sorted((known[key] for key in order if key in known), key=lambda slot: slot.group):
            last = slots[-1] if slots else None
            goes_on = last is not None and last.group == slot.group
            offset = last.offset + last.numel if last is not None and goes_on else 0
            index = -1 if last is None else last.index
            slots.append(replace(slot, index=index if goes_on and kind == FLAT else index + 1, offset=offset))
        stages.append(StageLayout(tuple(slots)))
    numbers = _numbers(placement.num_stages, context.engine.grid.slice_parallel_size, mine)
    return replace(layout, stages=tuple(stages), numbers=tuple(numbers))


# -- layers that share weights by a key ---------------------------------------------------------------


def stock_state_of_use(
    saved: SavedCheckpoint, layers: StageLayers, index: int, origins: Mapping[int, LayerOrigin]
) -> tuple[str, dict[str, Any], bool]:
    """Find the state of the tied layer ``index`` in the files of stock DeepSpeed.

    As in DeepSpeed, all uses take the tied weights of the first use that has a file. A use without a file takes all
    weights of that one if they are alike; otherwise its own weights stay.

    Returns:
        The file, the state, and whether that is all of the layer's state.
    """
    tie, files = layers.tie_of(index), saved.layout.weights
    assert tie is not None
    source = next((use for use in tie.uses if layers.stored_use(use) is not None), index)
    first = _state(saved, files[source])
    if source == index or (layers.stored_use(index) is None and tie.alike):
        return files[source], first, True
    has_file = layers.stored_use(index) is not None
    own = dict(_state(saved, files[index])) if has_file else {}
    for name, there in zip(tie.weights[index], tie.weights[source], strict=True):
        if there not in first:
            raise CheckpointError(f"{saved.path(files[source])}: lacks {there}")
        own[name] = first[there]
        own.update({alias: first[there] for alias, of in origins[index].aliases.items() if of == name and alias in own})
    return files[index if has_file else source], own, has_file


def _state(saved: SavedCheckpoint, name: str) -> dict[str, Any]:
    state = saved.read(name)
    if not isinstance(state, dict):
        raise CheckpointError(f"{saved.path(name)}: holds a {type(state).__name__}, expected the state_dict of a layer")
    return state
