"""``DeepSpeedZeroOptimizer`` stage 1, laid out anew around other parameters, in place (read in DeepSpeed 0.19.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import nn

from ds_dynmo.engine.deepspeed.flat_adapter import REPLICA_OWN, FlatOptimizerAdapter, Groups, HeldGradients


class ZeroAdapter(FlatOptimizerAdapter):
    """``DeepSpeedZeroOptimizer`` stage 1: each rank reduces and keeps the gradients of its shard."""

    wraps = DeepSpeedZeroOptimizer
    shards_gradients = True
    _wrapper: DeepSpeedZeroOptimizer

    @property
    def sums_apart(self) -> bool:  # type: ignore[override]
        return bool(self._wrapper.use_grad_accum_attribute)

    @property
    def masters(self) -> list[torch.Tensor]:
        return list(self._wrapper.single_partition_of_fp32_groups)

    @property
    def groups(self) -> Groups:
        return list(self._wrapper.bit16_groups)

    @property
    def flats(self) -> list[torch.Tensor]:
        return list(self._wrapper.bit16_groups_flat)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        return None

    @property
    def holds_gradients(self) -> bool:
        held = (*self._wrapper.averaged_gradients.values(), *self._wrapper.all_grad_tensors.values())
        return any(gradients is not None for gradients in held)

    @property
    def holds_own_gradients(self) -> bool:
        parameters = (parameter for group in self.groups for parameter in group)
        left = any(p.grad is not None or p.grad_accum is not None for p in parameters)  # type: ignore[attr-defined]
        return left or any(bucket.elements for bucket in self._wrapper.ipg_buckets.values())

    def free_gradients(self) -> None:
        self._wrapper.averaged_gradients.clear()
        self._wrapper.all_grad_tensors.clear()

    def free_weights(self) -> None:
        self._wrapper.bit16_groups_flat.clear()
        self._wrapper.parallel_partitioned_bit16_groups.clear()

    def use_grid(self, grid: Any, rank_alone: Callable[[], Any]) -> None:
        super().use_grid(grid, rank_alone)
        if self.per_replica_groups:
            self._wrapper.expert_dp_process_group = {REPLICA_OWN: rank_alone()}
        self._wrapper.model_parallel_group = grid.get_model_parallel_group()
        self._wrapper.model_parallel_world_size = grid.get_model_parallel_world_size()
        self._wrapper.model_parallel_rank = bwc_tensor_model_parallel_rank(grid)

    def rewrap(self, groups: Groups, flats: list[torch.Tensor]) -> None:
        wrapper = self._wrapper
        self._vacate_hooks()
        wrapper.bit16_groups[:], wrapper.round_robin_bit16_groups[:] = groups, groups
        wrapper.round_robin_bit16_indices[:] = [list(range(len(group))) for group in groups]
        wrapper.round_robin_bit16_meta[:] = [[torch.zeros_like(p.data, device="meta") for p in g] for g in groups]
        wrapper.round_robin_bit16_padding[:] = [[0] * len(group) for group in groups]
        wrapper.round_robin_bit16_offsets[:] = [_offsets(group) for group in groups]
        self.free_gradients()
        self.free_weights()
        wrapper.bit16_groups_flat[:] = flats
        for table in (
            wrapper.groups_padding,
            wrapper.partition_size,
            wrapper.params_in_partition,
            wrapper.params_not_in_partition,
            wrapper.first_offset,
        ):
            table.clear()
        for i, (group, flat, master) in enumerate(zip(groups, flats, self.masters)):
            shard = master.numel()
            index = self._position_in(i)
            used = sum(parameter.numel() for parameter in group)
            wrapper.parallel_partitioned_bit16_groups.append(wrapper.get_data_parallel_partitions(flat, i))
            wrapper.groups_padding.append(min(max((index + 1) * shard - used, 0), shard))
            wrapper.partition_size.append(shard)
            inside, outside, first = wrapper.get_partition_info(group, shard, index)
            wrapper.params_in_partition.append(inside)
            wrapper.params_not_in_partition.append(outside)
            wrapper.first_offset.append(first)
            for position, parameter in enumerate(group):
                parameter.grad_accum = None  # type: ignore[attr-defined]
                parameter.param_idx_in_group = position  # type: ignore[attr-defined]
                if i in self.per_replica_groups:  # divided as the others, but summed over a separate group
                    parameter.allreduce, parameter.group_name = False, REPLICA_OWN  # type: ignore[attr-defined]
        self._number_parameters()
        wrapper.initialize_gradient_partitioning_data_structures()
        wrapper.reset_partition_gradient_structures()
        if wrapper.use_grad_accum_attribute or wrapper.contiguous_gradients:
            self._register_hooks(wrapper.create_gradient_handling_hooks)
        self._link()

    def _number_parameters(self) -> None:
        wrapper = self._wrapper
        parameters = [parameter for group in wrapper.bit16_groups for parameter in group]
        wrapper.param_dict = dict(enumerate(parameters))
        wrapper.param_id = {id(parameter): number for number, parameter in enumerate(parameters)}
        wrapper.params_already_reduced = [False] * len(parameters)
        wrapper.is_param_in_current_partition = {
            wrapper.param_id[id(parameter)]: here
            for here, partitions in ((True, wrapper.params_in_partition), (False, wrapper.params_not_in_partition))
            for partition in partitions
            for parameter in partition
        }

    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        wrapper = self._wrapper
        for i, inside in enumerate(wrapper.params_in_partition):
            yield from zip(inside, wrapper.averaged_gradients[i])

    def export_gradients(self) -> HeldGradients:
        wrapper, shards = self._wrapper, {}
        for number, size in enumerate(wrapper.partition_size):
            parts = wrapper.averaged_gradients.get(number)
            if parts is None:
                parts = [self.masters[number].new_zeros(size, dtype=wrapper.gradient_accumulation_dtype)]
            whole = getattr(parts, "flat_partition", None)
            shards[number] = [whole] if whole is not None else list(parts)
        return HeldGradients(shards=shards)

    def import_gradients(self, held: HeldGradients) -> None:
        wrapper = self._wrapper
        for number, parts in held.shards.items():
            *carried, padding = parts
            inside = wrapper.params_in_partition[number]
            if not carried and inside and inside[0].numel():  # the group has no parameter here, only a placeholder
                first, padding = padding.split([inside[0].numel(), padding.numel() - inside[0].numel()])
                carried = [first]
            waiting = iter(carried)
            found = [next(waiting) if parameter.numel() else padding[:0] for parameter in inside]
            assert next(waiting, None) is None, "a part for each parameter with elements, and the padding"
            wrapper.averaged_gradients[number] = [*found, padding]

    def clip_by(self, norm: Callable[[], torch.Tensor]) -> None:
        def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
            """Return the norm, or -1 for an invalid one, which DeepSpeed's function copies from the host."""
            assert norm_type == 2
            total = norm()
            return total.masked_fill_(~total.isfinite(), -1.0)

        self._wrapper.scaled_global_norm = scaled_global_norm


def _offsets(group: list[nn.Parameter]) -> list[int]:
    offsets, total = [], 0
    for parameter in group:
        offsets.append(total)
        total += parameter.numel()
    return offsets
