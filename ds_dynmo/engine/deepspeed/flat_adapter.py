"""The interface by which layers are moved through either of DeepSpeed's flat optimizer wrappers.

``BF16_Optimizer`` and ``DeepSpeedZeroOptimizer`` (stage 1) set everything up in their constructors and keep the
result for good. Here the same object is pointed at other parameters and buffers, so that whoever holds it, its
parameter groups or its torch optimizer goes on holding the right one. All that is private in the two and depends on
which parameters a stage has is touched here and in the two subclasses (read in DeepSpeed 0.19.8,
runtime/bf16_optimizer.py and runtime/zero/stage_1_and_2.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from deepspeed.utils import set_full_hp_param
from torch import nn
from torch.autograd.graph import increment_version

from ds_dynmo.torch_private import replace_hooks

Groups = list[list[nn.Parameter]]
REPLICA_OWN = "replica_own"  # an option of the parameter groups whose parameters differ between replicas

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
)
_BOUND_BY_ZERO = ("grad_accum", "param_idx_in_group")
_OF_REPLICA_OWN = ("allreduce", "group_name")
_HOOKED_BY = "register_post_accumulate_grad_hook"


@dataclass(frozen=True)
class HeldGradients:
    """A batch's reduced gradients on this rank, before the optimizer's step.

    Attributes:
        whole: per ``id`` of a parameter, its gradient, if every replica has all gradients.
        shards: per parameter group, this rank's shard, if each replica has its own: in parts, one after the other.
    """

    whole: Mapping[int, torch.Tensor] = field(default_factory=dict)
    shards: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)


def _bound(parameter: nn.Parameter) -> set[str]:
    """Return the names of the attributes that a wrapper has set; names that others use too: if it was the wrapper."""
    held, names = vars(parameter), {*_BOUND}
    if held.keys() >= {"_hp_mapping", *_BOUND_BY_ZERO}:
        names.update(_BOUND_BY_ZERO)
    if held.get("group_name") == REPLICA_OWN:
        names.update(_OF_REPLICA_OWN)
    return names


def marks_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes set on a parameter, except those that a wrapper has set."""
    bound = _bound(parameter)
    return {name: value for name, value in vars(parameter).items() if name not in bound}


def unbind(parameter: nn.Parameter) -> None:
    """Remove what a wrapper bound to a parameter: it holds the wrapper's old buffers by reference cycles."""
    for name in _bound(parameter):
        vars(parameter).pop(name, None)
    parameter.grad = None


def place_of_hook(*_: Any) -> None:
    """Do nothing: it stands where the wrapper's hook was, among the user's hooks on a parameter, until there is one."""


def is_of_wrapper(hook: Any) -> bool:
    """Return whether a hook on a parameter is a wrapper's, or stands in its place."""
    return hook is place_of_hook or str(getattr(hook, "__module__", "")).startswith("deepspeed.")


def _vacated(hooks: dict[int, Any]) -> dict[int, Any]:
    """Replace the wrapper's hook by :func:`place_of_hook`; remove it where there is no other hook."""
    if all(map(is_of_wrapper, hooks.values())):
        return {}
    return {number: place_of_hook if is_of_wrapper(hook) else hook for number, hook in hooks.items()}


def _in_place(hooks: dict[int, Any]) -> dict[int, Any]:
    """Put the wrapper's new hook, the last one, where its hook was before."""
    places = [number for number, hook in hooks.items() if hook is place_of_hook]
    *_, (last, own) = hooks.items()
    if not places or own is place_of_hook or not is_of_wrapper(own):
        return hooks
    kept = {number: hook for number, hook in hooks.items() if number not in (last, *places[1:])}
    return dict((last, own) if number == places[0] else (number, hook) for number, hook in kept.items())


def _set_state(parameter: Any, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    """Set this rank's part of the fp32 weights or of a moment as DeepSpeed does, which writes through ``tensor.data``.

    Without a count of the change, what was sent ahead of a move in the background would stay as it was.
    """
    set_full_hp_param(parameter, value, optim_state_key)
    if parameter._hp_mapping is not None:
        increment_version(parameter._hp_mapping.get_hp_fragment(optim_state_key))


class FlatOptimizerAdapter(ABC):
    """One of DeepSpeed's flat optimizer wrappers, with the operations that moving layers needs.

    Attributes:
        wraps: DeepSpeed's class.
        shards_gradients: this rank has its shard of the summed gradients, not all of them, when its step begins.
        sums_apart: gradients are summed over micro-batches where DeepSpeed's sum of tied layers does not look.
    """

    wraps: type
    shards_gradients: bool
    sums_apart = False

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._count_set_state()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose groups hold one flat master tensor each."""
        inner: torch.optim.Optimizer = self._wrapper.optimizer
        return inner

    @property
    def per_replica_groups(self) -> frozenset[int]:
        """The groups whose parameters differ between replicas: this rank holds all of them, not one shard."""
        return frozenset(number for number, group in enumerate(self.inner.param_groups) if group.get(REPLICA_OWN))

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
    def gradient_dtype(self) -> torch.dtype | None:
        """The type of the gradients that the wrapper keeps for each parameter; None: it keeps none."""

    @property
    def gradient_bytes_per_element(self) -> int:
        """Bytes of gradients that the wrapper keeps for each element of a parameter."""
        return self.gradient_dtype.itemsize if self.gradient_dtype is not None else 0

    @property
    @abstractmethod
    def holds_gradients(self) -> bool:
        """Whether gradients wait for an optimizer's step, as they do from a backward pass to the end of its batch."""

    @property
    @abstractmethod
    def holds_own_gradients(self) -> bool:
        """Whether a backward pass outside a batch has left gradients, which the next batch would add to its own."""

    @abstractmethod
    def free_gradients(self) -> None:
        """Free the buffers in which gradients are summed, all zero between two batches; :meth:`rewrap` follows."""

    @abstractmethod
    def free_weights(self) -> None:
        """Free the flat weights, in which no parameter lies any more; :meth:`rewrap` follows."""

    @abstractmethod
    def rewrap(self, groups: Groups, flats: list[torch.Tensor]) -> None:
        """Rebuild the wrapper's buffers as its constructor would for ``groups``, whose weights lie in ``flats``."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """List the reduced gradients of this rank's parameters, or of their parts in this rank's shards."""

    @abstractmethod
    def export_gradients(self) -> HeldGradients:
        """Return the gradients that wait for the optimizer's step."""

    @abstractmethod
    def import_gradients(self, held: HeldGradients) -> None:
        """Set the gradients for the optimizer's step, after :meth:`rewrap`."""

    @abstractmethod
    def clip_by(self, norm: Callable[[], torch.Tensor]) -> None:
        """Make the wrapper clip by ``norm`` (called in every step, after gradients were reduced), on the device."""

    def omit_empty_groups_from_state_dict(self, with_parameters: Callable[[], list[int]]) -> None:
        """Keep groups without a parameter on this stage out of what DeepSpeed writes to checkpoints.

        Args:
            with_parameters: lists the numbers of the others.
        """
        stock = self._wrapper.state_dict

        def state_dict() -> dict[str, Any]:
            return _with_groups(stock(), with_parameters())

        self._wrapper.state_dict = state_dict

    def use_grid(self, grid: Any, rank_alone: Callable[[], Any]) -> None:
        """Reduce over the process groups of a new world.

        Args:
            rank_alone: returns the group of this rank alone, which reduces parameters that differ between replicas.
        """
        wrapper = self._wrapper
        wrapper.dp_process_group = grid.get_data_parallel_group()
        for number, members in enumerate(self.groups):
            group, count = wrapper.dp_process_group, grid.data_parallel_size
            if number in self.per_replica_groups:
                group, count = rank_alone(), 1
            wrapper.real_dp_process_group[number], wrapper.partition_count[number] = group, count
            for parameter in members:
                if "_dp_group" in vars(parameter):
                    parameter._dp_group = group  # type: ignore[attr-defined]

    def _position_in(self, group: int) -> int:
        """Return the number of this rank's shard of a group's flat buffer."""
        return 0 if group in self.per_replica_groups else int(self._wrapper.mpu.get_data_parallel_rank())

    def mark_tied(self, parameters: Iterable[nn.Parameter]) -> None:  # noqa: B027
        """Let DeepSpeed find the gradients of tied layers' parameters, which it sums over their stages."""

    def link_state(self) -> bool:
        """Link the optimizer's state to its parameters for ``safe_get_full_optimizer_state`` and the like.

        ZeRO does so after the first group's first step, when later groups have no state, and never again.

        Returns:
            False if there is no state yet.
        """
        self._wrapper._hp_optimizer_states_linked = False
        if not all(self.inner.state.get(master) for master in self.masters):
            return False
        self._wrapper._lazy_init_hp_params_optimizer_state()
        return True

    def _count_set_state(self) -> None:
        """Let what ``safe_set_full_fp32_param`` and the like set count as changes in place: see :func:`_set_state`."""
        for parameter in (parameter for group in self.groups for parameter in group):
            parameter.set_full_hp_param = MethodType(_set_state, parameter)  # type: ignore[attr-defined]

    def _link(self) -> None:
        self._wrapper._link_all_hp_params()
        self._count_set_state()
        self._wrapper._enable_universal_checkpoint()
        self._wrapper._param_slice_mappings = self._wrapper._create_param_mapping()
        for master, group in zip(self.masters, self.inner.param_groups):
            group["params"] = [master]

    def _register_hooks(self, register: Callable[[], None]) -> None:
        """Let the wrapper register its hooks on gradients, each at its place among the user's hooks."""
        register()
        for parameter in (parameter for group in self.groups for parameter in group):
            replace_hooks(parameter, _HOOKED_BY, _in_place)

    def _vacate_hooks(self) -> None:
        """Remove the wrapper's hooks, and keep their places. :meth:`_register_hooks` follows."""
        for parameter in (parameter for group in self.groups for parameter in group):
            replace_hooks(parameter, _HOOKED_BY, _vacated)
        self._wrapper._grad_acc_hooks = []

    def remove_hooks(self) -> None:
        """Stop reacting to gradients, because another wrapper takes over the parameters."""
        for hook in self._wrapper._grad_acc_hooks:
            hook.remove()
        self._wrapper._grad_acc_hooks = []


def _with_groups(state: Mapping[str, Any], keep: list[int]) -> dict[str, Any]:
    """Return a wrapper's ``state_dict`` with only the groups ``keep``, without those that hold a placeholder.

    They are numbered anew, as DeepSpeed numbers them where it dropped empty groups.
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
