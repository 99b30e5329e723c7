"""Write and read optimizer state in flat shards, saved by any number of stages and replicas.

DeepSpeed writes one file per rank with its shard of every group. A file of ours beside it has what that lacks: shards
of frozen parameters, and options and step counts of all groups, also of those that are empty on the rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ds_dynmo.engine.deepspeed_adapter.loss_scale import saved_loss_scale, set_loss_scale_state
from ds_dynmo.engine.deepspeed_adapter.universal import MOMENTS
from ds_dynmo.engine.move.layout import cut_one, shard_size
from ds_dynmo.engine.save.layout import (
    FLAT,
    UNSHARDED_FP16,
    Slot,
    StageLayout,
    flat_file,
    stage_file,
)
from ds_dynmo.engine.save.optimizer_files import (
    LoadedFlat,
    Named,
    OptimizerFiles,
    PerParameter,
    Saved,
    in_memory,
    steps_of_groups,
)
from ds_dynmo.engine.save.unsharded_fp16 import read_unsharded
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state.flat_shards import Pieces
from ds_dynmo.engine.state.flat_state import FlatState
from ds_dynmo.engine.state.keys import MASTER, ParamKey
from ds_dynmo.engine.state.parameter_groups import options_of
from ds_dynmo.errors import CheckpointError


class FlatFiles:
    """The state of ``BF16_Optimizer`` and of ``DeepSpeedZeroOptimizer`` stage 1.

    Args:
        optimizer: DeepSpeed's wrapper.
        name_parameters: names the parameters, some of which are new objects, before state is restored.
    """

    kind = FLAT
    reads: tuple[str, ...] = (FLAT, UNSHARDED_FP16)

    def __init__(
        self, state: FlatState, optimizer: Any, device: torch.device, name_parameters: Callable[[], None]
    ) -> None:
        self._state, self._optimizer, self._device = state, optimizer, device
        self._name_parameters = name_parameters

    # -- writing --------------------------------------------------------------------------------------

    def layout(self, named: Named) -> StageLayout:
        slots: list[Slot] = []
        files = [number for number, members in enumerate(self._state.shards.members) if members]
        for parked, groups in ((False, self._state.shards.members), (True, self._state.shards.parked)):
            for number, members in enumerate(groups):
                index, offset = files.index(number) if number in files and not parked else -1, 0
                for key, parameter in members.items():
                    slots.append(Slot(*key, number, index, offset, parameter.numel(), parked))
                    offset += parameter.numel()
        shards, parked_shards = self._state.shards.numels
        return StageLayout(tuple(slots), shards, parked_shards)

    def extras(self) -> dict[str, Any]:
        return self._state.shards.extras()

    # -- reading --------------------------------------------------------------------------------------

    def read(self, saved: Saved, wanted: Mapping[ParamKey, ParamKey], stage: int) -> LoadedFlat:
        if saved.manifest.optimizer == UNSHARDED_FP16:
            return read_unsharded(saved, wanted, stage, len(self._state.shards.numbers), self._device)
        loaded = LoadedFlat(loss_scale=saved_loss_scale(_content(saved, stage, 0)))
        places = saved.layout.slots(prefer=stage)
        sources = {stage: None}  # stages, each once, in this order
        for key, saved_as in wanted.items():
            if saved_as not in places:
                continue
            source, slot = places[saved_as]
            sources[source] = None
            loaded.groups[key] = slot.group
            rows: Pieces = {}
            for shard, interval in cut_one(key, slot.numel, slot.offset, self._shard_numel(saved, source, slot)):
                replica = self._state.replica if slot.group in self._state.shards.own_groups else shard
                stop = interval.offset + interval.numel
                for name, tensor in self._tensors(saved, source, replica, slot).items():
                    if tensor.numel() < stop:
                        raise CheckpointError(
                            f"{saved.path(_rank_file(saved, source, replica))}: {name} of parameter group "
                            f"{slot.group} has {tensor.numel()} elements, expected {stop} at least: layer "
                            f"{slot.layer}'s {slot.name} under the partition {saved.manifest.placement}"
                        )
                    rows.setdefault(name, []).append((interval.start, tensor[interval.offset : stop]))
            loaded.pieces[key] = rows
        for number, values, options, kinds in self._groups(saved, sources):
            loaded.options.setdefault(number, options)
            if kinds:  # a stage may lack state that another one has
                device = self._device
                scalars = {name: in_memory(name, value, options, device) for name, value in values.items()}
                loaded.scalars.setdefault(number, scalars)
                loaded.kinds.setdefault(number, set()).update(kinds)
        return loaded

    def _shard_numel(self, saved: Saved, stage: int, slot: Slot) -> int:
        layout = saved.layout.stages[stage]
        if slot.parked:
            return layout.parked_numels[slot.group]
        if not saved.manifest.stock:
            return layout.shard_numels[slot.group]
        total = sum(other.numel for other in layout.slots if other.group == slot.group and not other.parked)
        return shard_size(total, int(saved.read(stage_file(saved.layout.numbers[stage]))["dp_world_size"]))

    def _tensors(self, saved: Saved, stage: int, shard: int, slot: Slot) -> dict[str, torch.Tensor]:
        """Read one rank's shards of the group of ``slot``."""
        if slot.parked:
            parked = saved.read(flat_file(stage, shard, saved.slice_index))["parked"]
            tensors: dict[str, torch.Tensor] = parked[slot.group]
            return tensors
        masters, base = _state_dict(saved, stage, shard)
        if saved.manifest.stock:
            expected = len({other.group for other in saved.layout.stages[stage].slots if not other.parked})
            if len(masters) != expected:
                raise CheckpointError(
                    f"{saved.path(_rank_file(saved, stage, shard))}: has {len(masters)} parameter groups, expected "
                    f"{expected}"
                )
        values = base["state"].get(slot.index, {})
        return {MASTER: masters[slot.index], **{name: value for name, value in values.items() if _is_row(value)}}

    def _groups(
        self, saved: Saved, sources: Iterable[int]
    ) -> Iterator[tuple[int, dict[str, Any], dict[str, Any], set[str]]]:
        """Read the parameter groups of stages: number, scalars, options, kinds of state beside the fp32 weights."""
        if not saved.manifest.stock:
            for source in sources:
                name = flat_file(source, 0, saved.slice_index)
                extras = saved.read(name)
                if len(extras["options"]) != len(self._state.shards.members):
                    raise CheckpointError(
                        f"{saved.path(name)}: has {len(extras['options'])} parameter groups, expected "
                        f"{len(self._state.shards.members)}"
                    )
                for number, scalars in extras["scalars"].items():
                    yield number, scalars, dict(extras["options"][number]), {*extras["kinds"][number]} - {MASTER}
            return
        seen: set[int] = set()
        for source, layout in enumerate(saved.layout.stages):
            for slot in layout.slots:
                if slot.parked or slot.group in seen:
                    continue
                seen.add(slot.group)
                _, base = _state_dict(saved, source, 0)
                values = base["state"].get(slot.index, {})
                scalars = {name: value for name, value in values.items() if not _is_row(value)}
                options = options_of(base["param_groups"][slot.index])
                yield slot.group, scalars, options, values.keys() - scalars.keys()

    def assemble(
        self,
        values: Mapping[ParamKey, Mapping[str, torch.Tensor]],
        steps: Mapping[ParamKey, Any],
        groups: Mapping[ParamKey, int],
        options: Mapping[int, dict[str, Any]],
    ) -> LoadedFlat:
        loaded = LoadedFlat(options=dict(options))
        for key, tensors in values.items():
            loaded.pieces[key] = {name: [(0, tensor.reshape(-1))] for name, tensor in tensors.items()}
        for number, step in steps_of_groups(steps, groups).items():
            loaded.scalars[number] = {"step": in_memory("step", step, options[number], self._device)}
            loaded.kinds[number] = set(MOMENTS)
        return loaded

    # -- putting back ---------------------------------------------------------------------------------

    def restore(self, before: Named, after: Named, loaded: LoadedFlat | None) -> None:
        self._name_parameters()
        if loaded is None:
            self._state.weights_loaded(before, after)
            return
        groups = {
            key: number
            for key, parameter in before.items()
            if (number := self._state.shards.membership.group(parameter)) is not None
        }
        groups.update(loaded.groups)
        members = {
            key: (parameter, groups[key], loaded.pieces.get(key, {}))
            for key, parameter in after.items()
            if key in groups
        }
        for parameter in before.values():
            if not any(parameter is other for other in after.values()):
                self._state.drop([parameter])
        self._state.load(members, loaded.kinds, loaded.scalars, loaded.options)
        set_loss_scale_state(self._optimizer, loaded.loss_scale)


def _state_dict(saved: Saved, stage: int, shard: int) -> tuple[Any, Any]:
    content = _content(saved, stage, shard)
    return content["single_partition_of_fp32_groups"], content["base_optimizer_state"]


def _content(saved: Saved, stage: int, shard: int) -> dict[str, Any]:
    """Read what DeepSpeed's wrapper saved of one rank."""
    name = _rank_file(saved, stage, shard)
    try:
        content: dict[str, Any] = saved.read(name)["optimizer_state_dict"]
        lacking = {"single_partition_of_fp32_groups", "base_optimizer_state"} - content.keys()
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{saved.path(name)}: holds no state of a flat optimizer: {error!r}") from error
    if lacking:
        raise CheckpointError(f"{saved.path(name)}: holds no state of a flat optimizer: lacks {sorted(lacking)}")
    return content


def _rank_file(saved: Saved, stage: int, shard: int) -> str:
    """Find DeepSpeed's file of a rank; its name begins with "bf16_" if weights are bf16."""
    number = saved.layout.numbers[stage]
    names = [f"{prefix}zero_pp_rank_{shard}_mp_rank_{number:02d}_optim_states.pt" for prefix in ("bf16_", "")]
    return names[0] if os.path.isfile(saved.path(names[0])) else names[1]


def _is_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def optimizer_files(stage: StageContext) -> OptimizerFiles:
    """Choose the implementation for the optimizer of a stage."""
    if isinstance(stage.state, FlatState):
        return FlatFiles(stage.state, stage.engine.optimizer, stage.engine.device, stage.optimizer.name_parameters)
    return PerParameter(stage.engine.basic_optimizer, stage.engine.device)
