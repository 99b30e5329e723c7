"""DeepSpeed's flat optimizer wrappers, laid out anew around other parameters, in place.

``BF16_Optimizer`` and ``DeepSpeedZeroOptimizer`` (stage 1) set everything up in their constructors and keep the
result for good. Here the same object is pointed at other parameters and buffers, so that whoever holds it, its
parameter groups or its torch optimizer goes on holding the right one. All that is private in the two and depends on
which parameters a stage has is touched here (read in DeepSpeed 0.19.8, runtime/bf16_optimizer.py and
runtime/zero/stage_1_and_2.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import nn

Groups = list[list[nn.Parameter]]

_BOUND = (
    "_hp_mapping",
    "_hp_grad",
    "_dp_group",
    "_index_in_param_group",
    "_zero_optimizer",
    "get_full_hp_param",
    "get_full_hp_grad",
    "set_full_hp_param",
    "set_full_hp_grad",
    "load_hp_checkpoint_state",
    "grad_accum",
    "param_idx_in_group",
)


def bound_by_wrapper(name: str) -> bool:
    """Is ``name`` an attribute that DeepSpeed's wrappers set on their parameters?"""
    return name in _BOUND


def unbind(parameter: nn.Parameter) -> None:
    """Take off what a wrapper bound to a parameter: it holds the wrapper's old buffers by reference cycles."""
    for name in _BOUND:
        vars(parameter).pop(name, None)
    parameter.grad = None


class FlatWrapper(ABC):
    """What moving needs of a wrapper, the same for both."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose groups hold one flat master tensor each."""
        inner: torch.optim.Optimizer = self._wrapper.optimizer
        return inner

    @property
    @abstractmethod
    def masters(self) -> list[torch.Tensor]:
        """Per group, this rank's shard of the fp32 weights."""

    @property
    @abstractmethod
    def groups(self) -> Groups:
        """Per group, the parameters in its flat buffer, a placeholder where there are none."""

    @property
    @abstractmethod
    def flats(self) -> list[torch.Tensor]:
        """Per group, the flat buffer in which its weights lie."""

    @property
    @abstractmethod
    def gradient_bytes_per_element(self) -> int:
        """What the wrapper keeps per parameter element for gradients of its own, in bytes."""

    @abstractmethod
    def free_gradients(self) -> None:
        """Let go of the buffers in which gradients are summed, all zero between two batches; :meth:`rewrap` follows."""

    @abstractmethod
    def free_weights(self) -> None:
        """Let go of the flat weights, in which no parameter lies any more; :meth:`rewrap` follows."""

    @abstractmethod
    def rewrap(self, groups: Groups, flats: list[torch.Tensor]) -> None:
        """Be what the constructor would have made of ``groups``, whose weights lie in ``flats`` already."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Reduced gradients of this rank's parameters, or of the parts of them in this rank's shards."""

    @abstractmethod
    def clip_by(self, norm: Callable[[], float]) -> None:
        """Make the wrapper clip by ``norm`` (called in every step, after gradients were reduced)."""

    def hide(self, members: Callable[[], list[list[nn.Parameter]]]) -> None:
        """Keep groups that have no member here (``members`` tells) out of what DeepSpeed writes to checkpoints."""
        stock = self._wrapper.state_dict

        def state_dict() -> dict[str, Any]:
            return without_groups(stock(), [number for number, group in enumerate(members()) if group])

        self._wrapper.state_dict = state_dict

    def release(self) -> None:
        """Another wrapper has taken over the parameters: react to their gradients no more."""
        self._remove_hooks()

    def use_grid(self, grid: Any) -> None:
        """The ranks are a new world: reduce over its process groups from now on."""
        wrapper, group = self._wrapper, grid.get_data_parallel_group()
        wrapper.dp_process_group = group
        wrapper.real_dp_process_group[:] = [group] * len(wrapper.real_dp_process_group)
        wrapper.partition_count = [grid.data_parallel_size] * len(wrapper.partition_count)
        for members in self.groups:
            for parameter in members:
                if "_dp_group" in vars(parameter):
                    parameter._dp_group = group  # type: ignore[attr-defined]

    def accumulate(self, steps: int) -> None:  # noqa: B027
        """A batch has so many micro-batches on each replica from now on."""

    def mark_tied(self, parameters: Iterable[nn.Parameter]) -> None:  # noqa: B027
        """Parameters of tied layers: let DeepSpeed find the gradients that it sums over their stages."""

    def link_state(self) -> bool:
        """Let ``safe_get_full_optimizer_state`` and its kin find the optimizer's state; False if there is none yet.

        ZeRO does so after the first group's first step, when later groups have no state, and never again.
        """
        self._wrapper._hp_optimizer_states_linked = False
        if not all(self.inner.state.get(master) for master in self.masters):
            return False
        self._wrapper._lazy_init_hp_params_optimizer_state()
        return True

    def _link(self) -> None:
        self._wrapper._link_all_hp_params()
        self._wrapper._enable_universal_checkpoint()
        self._wrapper._param_slice_mappings = self._wrapper._create_param_mapping()
        for master, group in zip(self.masters, self.inner.param_groups):
            group["params"] = [master]

    def _remove_hooks(self) -> None:
        for hook in self._wrapper._grad_acc_hooks:
            hook.remove()
        self._wrapper._grad_acc_hooks = []


class Bf16Wrapper(FlatWrapper):
    """``BF16_Optimizer``: gradients are accumulated in buffers of the wrapper's own."""

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
    def gradient_bytes_per_element(self) -> int:
        return int(self._wrapper.grad_acc_dtype.itemsize)

    def free_gradients(self) -> None:
        wrapper = self._wrapper
        for own in (
            wrapper.fp32_groups_gradients,
            wrapper.fp32_groups_gradients_flat,
            wrapper.fp32_groups_actual_gradients_flat,
            wrapper.fp32_groups_gradient_flat_partition,
            wrapper.non_expert_gradients,
        ):
            own.clear()
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
        self._remove_hooks()
        self.free_gradients()
        self.free_weights()
        wrapper.bf16_groups[:], wrapper.bf16_groups_flat[:] = groups, flats
        wrapper.fp32_groups_has_gradients.clear()
        wrapper.group_paddings.clear()
        for i, (group, flat, master) in enumerate(zip(groups, flats, self.masters)):
            shard, count = master.numel(), flat.numel() // master.numel()
            index = wrapper.mpu.get_data_parallel_rank()
            sizes = [parameter.numel() for parameter in group]
            gradients = torch.zeros_like(flat, dtype=wrapper.grad_acc_dtype)
            wrapper.bf16_partitioned_groups.append([flat.narrow(0, j * shard, shard) for j in range(count)])
            wrapper.fp32_groups_gradients_flat.append(gradients)
            wrapper.non_expert_gradients.append(gradients)
            wrapper.fp32_groups_gradients.append(wrapper._split_flat_tensor(gradients, sizes))
            wrapper.fp32_groups_gradient_dict[i] = wrapper.fp32_groups_gradients[i]
            wrapper.fp32_groups_actual_gradients_flat.append(gradients.narrow(0, 0, sum(sizes)))
            wrapper.fp32_groups_gradient_flat_partition.append(gradients.narrow(0, index * shard, shard))
            wrapper.fp32_groups_has_gradients.append([False] * len(group))
            wrapper.group_paddings.append(flat.numel() - sum(sizes) if index == count - 1 else 0)
        if wrapper.immediate_grad_update:
            wrapper.create_grad_acc_hooks()
        self._link()

    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        wrapper = self._wrapper
        for group, gradients, held in zip(
            wrapper.bf16_groups, wrapper.fp32_groups_gradients, wrapper.fp32_groups_has_gradients
        ):
            yield from ((p, gradient) for p, gradient, has in zip(group, gradients, held) if has)

    def clip_by(self, norm: Callable[[], float]) -> None:
        stock, wrapper = self._wrapper.get_grads_for_norm, self._wrapper

        def one_number(for_clipping: bool = False) -> Any:
            """DeepSpeed takes the 2-norm over all stages of what this gives: the norm on one rank, 0 on the others."""
            if for_clipping:
                return stock(for_clipping=True)
            value = norm()
            mine = value if wrapper.mpu.get_model_parallel_rank() == 0 else 0.0
            return [torch.tensor(mine)], {}

        wrapper.get_grads_for_norm = one_number

    def mark_tied(self, parameters: Iterable[nn.Parameter]) -> None:
        buffers = {
            id(parameter): gradient
            for group, gradients in zip(self._wrapper.bf16_groups, self._wrapper.fp32_groups_gradients)
            for parameter, gradient in zip(group, gradients)
        }
        for parameter in parameters:
            parameter._hp_grad = buffers.get(id(parameter))  # type: ignore[attr-defined]  # None where it is frozen


class ZeroWrapper(FlatWrapper):
    """``DeepSpeedZeroOptimizer`` stage 1: each rank reduces and keeps the gradients of its shard."""

    _wrapper: DeepSpeedZeroOptimizer

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
    def gradient_bytes_per_element(self) -> int:
        return 0

    def accumulate(self, steps: int) -> None:
        self._wrapper.gradient_accumulation_steps = steps

    def free_gradients(self) -> None:
        self._wrapper.averaged_gradients.clear()
        self._wrapper.all_grad_tensors.clear()

    def free_weights(self) -> None:
        self._wrapper.bit16_groups_flat.clear()
        self._wrapper.parallel_partitioned_bit16_groups.clear()

    def use_grid(self, grid: Any) -> None:
        super().use_grid(grid)
        self._wrapper.model_parallel_group = grid.get_model_parallel_group()
        self._wrapper.model_parallel_world_size = grid.get_model_parallel_world_size()
        self._wrapper.model_parallel_rank = bwc_tensor_model_parallel_rank(grid)

    def rewrap(self, groups: Groups, flats: list[torch.Tensor]) -> None:
        wrapper = self._wrapper
        self._remove_hooks()
        wrapper.bit16_groups[:], wrapper.round_robin_bit16_groups[:] = groups, groups
        wrapper.round_robin_bit16_indices[:] = [list(range(len(group))) for group in groups]
        wrapper.round_robin_bit16_meta[:] = [[torch.zeros_like(p.data, device="meta") for p in g] for g in groups]
        if hasattr(wrapper, "round_robin_bit16_padding"):  # not in 0.18.9
            wrapper.round_robin_bit16_padding[:] = [[0] * len(group) for group in groups]
            wrapper.round_robin_bit16_offsets[:] = [_offsets(group) for group in groups]
        self.free_gradients()
        self.free_weights()
        wrapper.bit16_groups_flat[:] = flats
        for own in (
            wrapper.groups_padding,
            wrapper.partition_size,
            wrapper.params_in_partition,
            wrapper.params_not_in_partition,
            wrapper.first_offset,
        ):
            own.clear()
        for i, (group, flat, master) in enumerate(zip(groups, flats, self.masters)):
            shard = master.numel()
            index = wrapper.mpu.get_data_parallel_rank()
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
        self._number_parameters()
        wrapper.initialize_gradient_partitioning_data_structures()
        wrapper.reset_partition_gradient_structures()
        if wrapper.use_grad_accum_attribute or wrapper.contiguous_gradients:
            wrapper.create_gradient_handling_hooks()
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

    def clip_by(self, norm: Callable[[], float]) -> None:
        def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
            assert norm_type == 2
            total = torch.tensor(norm(), dtype=torch.float32, device=self._wrapper.device)
            mask_nan_or_inf_with_val_inplace(total, device=self._wrapper.device)
            return total

        self._wrapper.scaled_global_norm = scaled_global_norm


def flat_wrapper(optimizer: Any) -> FlatWrapper | None:
    """The view of ``optimizer`` if it is one of DeepSpeed's flat wrappers; None for a plain optimizer."""
    if isinstance(optimizer, BF16_Optimizer):
        return Bf16Wrapper(optimizer)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        for flats in (optimizer.bit16_groups_flat, *optimizer.parallel_partitioned_bit16_groups):
            flats[:] = [flat.detach() for flat in flats]  # 0.18.9 keeps the graph, and gloo cannot gather into them
        return ZeroWrapper(optimizer)
    return None


def without_groups(state: Mapping[str, Any], keep: list[int]) -> dict[str, Any]:
    """A wrapper's ``state_dict`` with only the groups ``keep``: one that holds a placeholder is nobody else's business.

    The groups that stay are numbered anew, as DeepSpeed numbers them where it dropped empty ones.
    """
    per_group = (
        "single_partition_of_fp32_groups",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "param_slice_mappings",
    )
    base = state["base_optimizer_state"]
    kept = {
        "state": {new: base["state"][old] for new, old in enumerate(keep) if old in base["state"]},
        "param_groups": [{**base["param_groups"][old], "params": [new]} for new, old in enumerate(keep)],
    }
    lists = {name: [state[name][i] for i in keep] for name in per_group if name in state}
    return {**state, **lists, "base_optimizer_state": kept}


def _offsets(group: list[nn.Parameter]) -> list[int]:
    offsets, total = [], 0
    for parameter in group:
        offsets.append(total)
        total += parameter.numel()
    return offsets
