"""Read what stock DeepSpeed wrote of a pipeline, at any number of stages.

Its optimizer files have parameters by their position. Which parameters a saved stage had is in its file under ZeRO,
by name. Elsewhere it follows from how many each group has: stages hold consecutive layers, and a group lists its
parameters in the order of the module.
"""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import replace
from itertools import chain
from typing import Any

from ds_dynmo.engine.deepspeed.files import groups_of_stage
from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.context import CheckpointContext
from ds_dynmo.engine.save.importers.universal import names_of
from ds_dynmo.engine.save.manifest import MANIFEST, UNSHARDED_FP16, Manifest, SliceManifest, stage_file
from ds_dynmo.engine.save.matching import check_slices
from ds_dynmo.engine.save.safe_load import safe_load
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.pieces import FLAT, Slot, StageSlots
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files.checkpoints import FOLDER
from ds_dynmo.placement import Placement

Groups = list[list[ParamKey]]  # per parameter group that a stage has something of, its parameters in their order


def how_it_is_read(folder: str) -> str:
    """Describe how a checkpoint without a manifest is read."""
    return (
        f"{folder}: has no folder {FOLDER}/, so it is read as stock DeepSpeed's. If ds_dynmo wrote it, copy it with "
        "that folder"
    )


def stock_manifest(
    context: CheckpointContext, folder: str, names: list[str], slices: tuple[SliceManifest, ...], options: LoadOptions
) -> Manifest:
    """Infer the manifest of a checkpoint that stock DeepSpeed wrote of this model.

    Args:
        names: of the files in ``folder``, as all ranks see them.
        slices: what DeepSpeed would write of the pipeline that this engine was constructed with.

    Raises:
        CheckpointError: it has other files, or is of other parameters.
    """
    if context.stage.replicas_differ:
        raise CheckpointError(
            f"{how_it_is_read(folder)}. It has no place for parameters that each replica has of its own "
            "(moe.expert_parallel)"
        )
    of_layers = fnmatch.filter(names, "layer_*-model_states.pt")
    cut = {found.group() for name in of_layers if (found := re.search(r"-model_\d+-", name))}
    check_slices(context, len(cut) or 1, folder)
    stages = fnmatch.filter(names, "mp_rank_*_model_states.pt")
    kind = _storage(context, names)
    expected = sorted(stage_file(number) for of_slice in slices for number in of_slice.numbers)
    if not (options.module_only and stages):
        mine = slices[context.here.tp_rank]
        saved = _SavedPipeline(context, mine).find(folder, stages, strict=options.optimizer)
        if saved is None and stages != expected:
            raise CheckpointError(
                f"{folder}: written by stock DeepSpeed with the stage files {stages}, expected {expected}. Without a "
                f"{MANIFEST} optimizer state loads at another number of stages only if parameter groups list "
                "parameters in the order of the module, and the files say how many there are of each group; "
                "load_module_only=True loads weights"
            )
        if saved is not None:
            return _manifest(kind, *saved, slices)
    return _manifest(kind, context.origin.placement, None, slices)


def _manifest(
    kind: str, placement: Placement, groups: list[Groups] | None, slices: tuple[SliceManifest, ...]
) -> Manifest:
    """Make the manifest; ``kind``: of optimizer; ``groups``: per saved stage; None: as this engine was constructed."""
    if groups is None:
        held = [_trained(of_slice) for of_slice in slices]
    else:
        numbers = [_numbers(len(groups), len(slices), place) for place in range(len(slices))]
        held = [_at(of_slice, of_files, groups, kind) for of_slice, of_files in zip(slices, numbers)]
    return Manifest(
        placement=placement,
        replicas=0,
        optimizer=kind,
        optimizer_class="",
        slices=tuple(held),
        frozen_excluded=False,
        files={},
        state={},
    )


def _storage(context: CheckpointContext, names: list[str]) -> str:
    """Find out how stock DeepSpeed kept optimizer state: as this engine does, but fp16 also without ZeRO's shards."""
    storage = context.stage.state.storage
    shards = fnmatch.filter(names, "*zero_pp_rank_*_optim_states.pt")
    return UNSHARDED_FP16 if storage == FLAT and context.engine.fp16_enabled() and not shards else storage


# -- which stage had which parameters -----------------------------------------------------------------


class _SavedPipeline:
    """Finds the partition at which this model was saved.

    Args:
        built: what DeepSpeed would write of this rank's slice, as this engine was constructed.
    """

    def __init__(self, context: CheckpointContext, built: SliceManifest) -> None:
        self._context, self._layers, self._built = context, context.stage.layers, built
        self._slots = {slot.key: slot for stage in _trained(built).stages for slot in stage.slots}

    def find(self, folder: str, files: list[str], *, strict: bool) -> tuple[Placement, list[Groups]] | None:
        """Return the partition, and what groups the saved stages had; None: the files do not say.

        Raises:
            CheckpointError: ``strict``, and they have other parameters than this model has at any partition.
        """
        slices, mine = self._context.here.tp_size, self._context.here.tp_rank
        names = [stage_file(number) for number in _numbers(len(files) // slices, slices, mine)]
        by_stage = _numbers(len(self._built.stages), slices, mine) == self._built.numbers
        if not self._context.origin.placement.is_chain:
            return None
        if not (by_stage and names and set(names) <= set(files)):
            return None
        paths = [os.path.join(folder, name) for name in names]
        saved = [groups_of_stage(safe_load(path, mapped=True, checks_values=False)) for path in paths]
        stages = [stage for stage in saved if stage is not None]
        is_named = any(isinstance(group, list) for stage in stages for group in stage)
        if len(stages) < len(saved) or not (is_named or self._is_in_order()):
            return None
        keys = {name: key for key in self._slots for name in names_of(self._context, *key)} if is_named else {}
        known = [[[keys.get(n) for n in g] if isinstance(g, list) else g for g in stage] for stage in stages]
        placement = self._placement(known)
        if placement is None and not strict:
            return None
        if placement is None:
            raise CheckpointError(
                f"{how_it_is_read(folder)}. Its stages have groups of {[list(map(_length, s)) for s in stages]} "
                "parameters, and those of this model at no partition (parameters that are frozen only here or only "
                "there?); load_optimizer_states=False loads the rest"
            )
        if is_named:  # in their order in the flat buffer
            return placement, known  # type: ignore[return-value]
        return placement, [self._groups(placement, stage) for stage in placement.stages]

    def _placement(self, saved: list[list[Any]]) -> Placement | None:
        """Find a partition of which the stages have such groups: that of this engine's construction if that does."""
        built = self._context.origin.placement  # among partitions that differ by layers without parameters
        if len(saved) == built.num_stages and all(
            _are_alike(self._groups(built, stage), groups) for stage, groups in enumerate(saved)
        ):
            return built
        num_layers = self._layers.num_layers
        reached: dict[int, tuple[int, ...]] = {0: (0,)}  # by the end of a stage: the ends up to there
        for groups in saved:
            ends: dict[int, tuple[int, ...]] = {}
            for start, before in reached.items():
                for end in range(start + 1, num_layers + 1):
                    boundaries = sorted({0, start, end, num_layers})
                    if _are_alike(self._groups(Placement.of(boundaries), boundaries.index(start)), groups):
                        ends.setdefault(end, (*before, end))
            reached = ends
        found = reached.get(num_layers)
        return None if found is None else Placement.of(found)

    def _groups(self, placement: Placement, stage: int) -> Groups:
        """List the parameters of each group of a stage, in the order of DeepSpeed's module."""
        groups: dict[int, list[ParamKey]] = {}
        for index in self._layers.first_uses_at(placement, stage):
            for key in (ParamKey(index, name) for name in self._built.shapes.get(index, ())):
                if key in self._slots:
                    groups.setdefault(self._slots[key].group, []).append(key)
        return [keys for _, keys in sorted(groups.items())]

    def _is_in_order(self) -> bool:
        """Return whether groups list parameters in the order of the module, as this engine got them."""
        return all(
            [slot.key for slot in stage.slots] == [*chain(*self._groups(self._context.origin.placement, number))]
            for number, stage in enumerate(_trained(self._built).stages)
        )


def _are_alike(groups: Groups, saved: list[Any]) -> bool:
    """Return whether groups have the saved parameters, or as many if only the number is known."""
    return len(groups) == len(saved) and all(
        len(keys) == theirs if isinstance(theirs, int) else set(keys) == set(theirs)
        for keys, theirs in zip(groups, saved)
    )


def _length(group: list[str] | int) -> int:
    return group if isinstance(group, int) else len(group)


def _numbers(stages: int, slices: int, mine: int) -> tuple[int, ...]:
    """List the numbers of the stages of slice ``mine`` in the names of DeepSpeed's files."""
    return tuple(stage * slices + mine for stage in range(stages))


def _trained(of_slice: SliceManifest) -> SliceManifest:
    """Leave out parameters that were frozen at construction: DeepSpeed writes none of them."""
    return replace(
        of_slice,
        stages=tuple(
            replace(stage, slots=tuple(slot for slot in stage.slots if not slot.parked)) for stage in of_slice.stages
        ),
    )


def _at(of_slice: SliceManifest, numbers: tuple[int, ...], groups: list[Groups], kind: str) -> SliceManifest:
    """Describe what DeepSpeed writes of a slice, of which each stage has these ``groups``."""
    known = {slot.key: slot for stage in _trained(of_slice).stages for slot in stage.slots}
    stages = []
    for of_stage in groups:
        slots: list[Slot] = []
        for number, keys in enumerate(of_stage):
            offset = 0
            for key in keys:
                index = number if kind == FLAT else len(slots)
                slots.append(replace(known[key], index=index, offset=offset))
                offset += known[key].numel
        stages.append(StageSlots(tuple(slots)))
    return replace(of_slice, stages=tuple(stages), numbers=numbers)
