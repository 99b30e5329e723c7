"""``BF16_Optimizer``, laid out anew around other parameters, in place (read in DeepSpeed 0.19.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from ds_dynmo.engine.deepspeed.flat_adapter import FlatOptimizerAdapter, Groups, HeldGradients


class Bf16Adapter(FlatOptimizerAdapter):
    """``BF16_Optimizer``: gradients are accumulated in buffers of the wrapper."""

    wraps = BF16_Optimizer
    shards_gradients = False
    _wrapper: BF16_Optimizer

    @property
    def masters(self) -> list[torch.Tensor]:
        return list(self._wrapper.fp32_groups_flat_partition)

    @property
    def groups(self) -> Groups:
        return list(self._wrapper.bf16_groups)

    @property
    def flats(self) -> list[torch.Tensor]:
        return list(self._wrapper.bf16_groups_flat)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        dtype: torch.dtype = self._wrapper.grad_acc_dtype
        return dtype

    @property
    def holds_gradients(self) -> bool:
        return any(any(held) for held in self._wrapper.fp32_groups_has_gradients)

    @property
    def holds_own_gradients(self) -> bool:
        return False  # DeepSpeed drops them when the next backward pass begins, or counts them at once: holds_gradients

    def free_gradients(self) -> None:
        wrapper = self._wrapper
        for table in (
            wrapper.fp32_groups_gradients,
            wrapper.fp32_groups_gradients_flat,
            wrapper.fp32_groups_actual_gradients_flat,
            wrapper.fp32_groups_gradient_flat_partition,
            wrapper.non_expert_gradients,
        ):
            table.clear()
        wrapper.fp32_groups_gradient_dict.clear()
        for master in self.masters:
            master.grad = None
        for group in self.groups:
            for parameter in group:
                vars(parameter).pop("_hp_grad", None)

    def free_weights(self) -> None:
        self._wrapper.bf16_groups_flat.clear()
        self._wrapper.bf16_partitioned_groups.clear()

    def rewrap(self, groups: Groups, flats: list[torch.Tensor]) -> None:
        wrapper = self._wrapper
        self._vacate_hooks()
        self.free_gradients()
        self.free_weights()
        wrapper.bf16_groups[:], wrapper.bf16_groups_flat[:] = groups, flats
        wrapper.fp32_groups_has_gradients.clear()
        wrapper.group_paddings.clear()
        for i, (group, flat, master) in enumerate(zip(groups, flats, self.masters)):
            shard, count = master.numel(), flat.numel() // master.numel()
            index = self._position_in(i)
            sizes = [parameter.numel() for parameter in group]
            gradients = torch.zeros_like(flat, dtype=wrapper.grad_acc_dtype)
            wrapper.bf16_partitioned_groups.append([flat.narrow(0, j * shard, shard) for j in range(count)])
            wrapper.fp32_groups_gradients_flat.append(gradients)
            if i not in self.per_replica_groups:
                wrapper.non_expert_gradients.append(gradients)
            wrapper.fp32_groups_gradients.append(wrapper._split_flat_tensor(gradients, sizes))
            wrapper.fp32_groups_gradient_dict[i] = wrapper.fp32_groups_gradients[i]
            wrapper.fp32_groups_actual_gradients_flat.append(gradients.narrow(0, 0, sum(sizes)))
            wrapper.fp32_groups_gradient_flat_partition.append(gradients.narrow(0, index * shard, shard))
            wrapper.fp32_groups_has_gradients.append([False] * len(group))
            wrapper.group_paddings.append(flat.numel() - sum(sizes) if index == count - 1 else 0)
        if wrapper.immediate_grad_update:
            self._register_hooks(wrapper.create_grad_acc_hooks)
        self._link()

    def use_grid(self, grid: Any, rank_alone: Callable[[], Any]) -> None:
        super().use_grid(grid, rank_alone)
        wrapper = self._wrapper
        stock = type(wrapper).get_grads_for_reduction

        def get_grads_for_reduction() -> Any:
            """List the gradients to average, once per batch; divide per-replica ones, which are sums over replicas."""
            for number in self.per_replica_groups:
                wrapper.fp32_groups_gradients_flat[number].div_(grid.data_parallel_size)
            return stock(wrapper)

        wrapper.get_grads_for_reduction = get_grads_for_reduction

    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """List all sums, also where DeepSpeed notes no gradient: zeros, or those of other uses of a tied layer."""
        for group, gradients in zip(self._wrapper.bf16_groups, self._wrapper.fp32_groups_gradients):
            yield from zip(group, gradients)

    def export_gradients(self) -> HeldGradients:
        return HeldGradients(whole={id(parameter): gradient for parameter, gradient in self.gradients()})

    def import_gradients(self, held: HeldGradients) -> None:
        wrapper = self._wrapper
        for number, (group, gradients) in enumerate(zip(wrapper.bf16_groups, wrapper.fp32_groups_gradients)):
            for place, (parameter, gradient) in enumerate(zip(group, gradients)):
                if id(parameter) in held.whole:
                    gradient.copy_(held.whole[id(parameter)].view_as(gradient))
                    wrapper.fp32_groups_has_gradients[number][place] = True

    def clip_by(self, norm: Callable[[], torch.Tensor]) -> None:
        wrapper = self._wrapper

        def one_number(for_clipping: bool = False) -> Any:
            """Return the norm on one rank and 0 on the others: DeepSpeed takes the 2-norm of them over all stages."""
            if for_clipping:
                return [gradient for _, gradient in self.gradients()]
            value = norm().float()
            return [value if wrapper.mpu.get_model_parallel_rank() == 0 else torch.zeros_like(value)], {}

        wrapper.get_grads_for_norm = one_number

    def mark_tied(self, parameters: Iterable[nn.Parameter]) -> None:
        buffers = {id(parameter): gradient for parameter, gradient in self.gradients()}
        for parameter in parameters:
            parameter._hp_grad = buffers.get(id(parameter))  # type: ignore[attr-defined]  # None where it is frozen
