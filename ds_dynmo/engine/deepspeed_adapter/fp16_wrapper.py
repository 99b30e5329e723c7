"""DeepSpeed's wrappers for fp16 without ZeRO, rebuilt around other parameters, in place (read in DeepSpeed 0.19.8).

``FP16_Optimizer`` (around FusedAdam) keeps one flat buffer of fp16 weights and one of fp32 weights per parameter group,
``FP16_UnfusedOptimizer`` (around others) fp32 weights per parameter. Every replica holds all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer
from torch import nn

from ds_dynmo.engine.deepspeed_adapter.flat_wrapper import Groups
from ds_dynmo.engine.state.keys import MASTER

State = dict[str, Any]  # of one parameter: its fp32 weights, and what the torch optimizer keeps for it


class Fp16Wrapper(ABC):
    """One of DeepSpeed's wrappers for fp16 without ZeRO, as moving layers needs it.

    Attributes:
        wraps: DeepSpeed's class.
    """

    wraps: type
    holds_gradients = False  # they are the parameters' own
    _source: Any  # the module of DeepSpeed's class

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._note_places()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer, whose groups hold fp32 weights."""
        inner: torch.optim.Optimizer = self._wrapper.optimizer
        return inner

    @property
    def groups(self) -> Groups:
        """Per group, the parameters that it trains, a placeholder where there are none."""
        return list(self._wrapper.fp16_groups)

    @abstractmethod
    def state_of(self, parameter: nn.Parameter) -> State:
        """Return what is held for a parameter that it trains, in the wrapper's own memory."""

    def of_group(self, group: int) -> State:
        """Return what is held once for a group, such as its count of steps. It is in :meth:`state_of`, too."""
        return {}

    def set_of_group(self, group: int, state: State) -> None:  # noqa: B027
        """Hold of ``state`` what :meth:`of_group` lists. A count of steps that it lacks begins anew."""

    @abstractmethod
    def of_parameter(self, state: State) -> State:
        """Select of a :meth:`state_of` what is to be kept while the parameter is frozen."""

    def rewrap(self, groups: Groups, states: Mapping[int, State]) -> None:
        """Train ``groups`` from now on.

        Args:
            groups: per parameter group, a placeholder where there is nothing.
            states: by ``id``, of parameters that were not trained here, or that get another state. One without fp32
                weights gets them from its weights. The others keep theirs.
        """
        for number, group in enumerate(groups):
            self._rebuild(number, group, states)
        self._wrapper.fp16_groups[:] = groups
        self._wrapper.overflow_checker.params[:] = [parameter for group in groups for parameter in group]
        self._note_places()

    @abstractmethod
    def _rebuild(self, number: int, group: Sequence[nn.Parameter], states: Mapping[int, State]) -> None:
        """Hold the fp32 weights and the state of ``group``."""

    @abstractmethod
    def _note_places(self) -> None:
        """Note where the state of each parameter is: one that was sent away has no size any more."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """List the gradients of a batch, multiplied by the loss scale."""

    def accumulate(self, steps: int) -> None:  # noqa: B027
        """Take note that a batch has so many micro-batches on each replica from now on."""

    def release(self) -> None:  # noqa: B027
        """Stop reacting to gradients: another wrapper has taken over the parameters."""

    def clip_by(self, norm: Callable[[], torch.Tensor]) -> None:
        """Make the wrapper clip by ``norm``, called in every step without an overflow, with scaled gradients.

        DeepSpeed adds the groups' norms up per stage, in an order that depends on the partition. The norm that it
        reports is of scaled gradients in one of the wrappers, and divided by the next step's scale in the other.
        """
        wrapper, stock, source = self._wrapper, self._wrapper.step, self._source
        of_groups = [name for name in ("get_flattened_grad_norm", "get_weight_norm") if hasattr(source, name)]

        def step(*args: Any, **kwargs: Any) -> Any:
            kept = {name: getattr(source, name) for name in (*of_groups, "get_global_norm")}
            scale, found = wrapper.loss_scale_config.cur_scale, []

            def of_model(norm_list: Any) -> float:
                found.append(float(norm()))  # DeepSpeed branches on it; the only wait beside its own
                return found[-1]

            try:
                for name in of_groups:
                    setattr(source, name, lambda *_, **__: 0.0)
                source.get_global_norm = of_model
                result = stock(*args, **kwargs)
            finally:
                for name, function in kept.items():
                    setattr(source, name, function)
            if found and not wrapper.overflow:
                wrapper._global_grad_norm = found[0] / scale
            return result

        wrapper.step = step

    def hide(self, members: Callable[[], Sequence[Sequence[nn.Parameter]]]) -> None:
        """Keep groups without a parameter on this stage out of what DeepSpeed writes to checkpoints.

        Args:
            members: lists the parameters of each group.
        """
        stock = self._wrapper.state_dict

        def state_dict() -> dict[str, Any]:
            return _with_groups(stock(), [number for number, group in enumerate(members()) if group])

        self._wrapper.state_dict = state_dict


class FusedFp16Wrapper(Fp16Wrapper):
    """``FP16_Optimizer``: the parameters of a group lie in one flat buffer, in fp16 and in fp32."""

    wraps = fused_optimizer.FP16_Optimizer
    _source = fused_optimizer

    def _note_places(self) -> None:
        self._places: dict[int, tuple[int, int, torch.Size]] = {}  # by ``id``: group, first element, shape
        for number, group in enumerate(self.groups):
            offset = 0
            for parameter in group:
                self._places[id(parameter)] = number, offset, parameter.shape
                offset += parameter.numel()

    def state_of(self, parameter: nn.Parameter) -> State:
        number, offset, shape = self._places[id(parameter)]
        master = self._wrapper.fp32_groups_flat[number]
        values = {MASTER: master.detach(), **self.inner.state.get(master, {})}
        return {
            name: value.narrow(0, offset, shape.numel()).view(shape) if _is_like(value, master) else value
            for name, value in values.items()
        }

    def of_group(self, group: int) -> State:
        master = self._wrapper.fp32_groups_flat[group]
        return {n: value for n, value in self.inner.state.get(master, {}).items() if not _is_like(value, master)}

    def set_of_group(self, group: int, state: State) -> None:
        values = {name: state.get(name, 0) for name in self.of_group(group) if name in state or name == "step"}
        self.inner.state.get(self._wrapper.fp32_groups_flat[group], {}).update(values)

    def of_parameter(self, state: State) -> State:
        return {name: value.clone() for name, value in state.items() if _is_like(value, state[MASTER])}

    def _rebuild(self, number: int, group: Sequence[nn.Parameter], states: Mapping[int, State]) -> None:
        before = self.groups[number]
        alike = len(group) == len(before) and all(p is other for p, other in zip(group, before))
        if alike and not any(id(parameter) in states for parameter in group):
            return
        every = [states[id(p)] if id(p) in states else self._present_state(p) for p in group]
        flat = torch.cat([parameter.data.reshape(-1) for parameter in group])
        offset = 0
        for parameter in group:
            parameter.data = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            offset += parameter.numel()
        self._wrapper.fp16_groups_flat[number] = flat
        master = self._wrapper.fp32_groups_flat[number]
        held = self.inner.state.setdefault(master, {})
        kinds = [name for name, value in held.items() if _is_like(value, master)]
        rows = [state.get(MASTER, p.detach().float()).reshape(-1) for p, state in zip(group, every)]
        for state in every:
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    held[name] = value  # the group's, such as its count of steps
                elif name != MASTER and name not in kinds:
                    kinds.append(name)
        master.data = torch.cat(rows)
        for name in kinds:
            held[name] = torch.cat(
                [state[name].reshape(-1) if name in state else torch.zeros_like(row) for row, state in zip(rows, every)]
            )

    def _present_state(self, parameter: nn.Parameter) -> State:
        return self.state_of(parameter) if id(parameter) in self._places else {}  # else it is a placeholder

    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for group, master in zip(self.groups, self._wrapper.fp32_groups_flat):
            for parameter in group:
                if master.grad is not None:  # in a step, which has copied them there
                    _, offset, shape = self._places[id(parameter)]
                    yield parameter, master.grad.narrow(0, offset, shape.numel()).view(shape)
                elif parameter.grad is not None:
                    yield parameter, parameter.grad


class UnfusedFp16Wrapper(Fp16Wrapper):
    """``FP16_UnfusedOptimizer``: fp32 weights and state per parameter."""

    wraps = unfused_optimizer.FP16_UnfusedOptimizer
    _source = unfused_optimizer

    def _note_places(self) -> None:
        self._masters: dict[int, torch.Tensor] = {
            id(parameter): master
            for group, masters in zip(self.groups, self._wrapper.fp32_groups)
            for parameter, master in zip(group, masters)
        }

    def state_of(self, parameter: nn.Parameter) -> State:
        master = self._masters[id(parameter)]
        return {MASTER: master.detach(), **self.inner.state.get(master, {})}

    def of_parameter(self, state: State) -> State:
        return state

    def rewrap(self, groups: Groups, states: Mapping[int, State]) -> None:
        super().rewrap(groups, states)
        trained = {id(master) for master in self._masters.values()}
        for master in [master for master in self.inner.state if id(master) not in trained]:
            del self.inner.state[master]

    def _rebuild(self, number: int, group: Sequence[nn.Parameter], states: Mapping[int, State]) -> None:
        masters = [self._master(parameter, states.get(id(parameter))) for parameter in group]
        self._wrapper.fp32_groups[number] = self.inner.param_groups[number]["params"] = masters

    def _master(self, parameter: nn.Parameter, state: State | None) -> torch.Tensor:
        """Return its fp32 weights, whose state is ``state`` from now on; None: as before."""
        if state is None and id(parameter) in self._masters:
            return self._masters[id(parameter)]
        state = dict(state or {})
        master: torch.Tensor = state.pop(MASTER, parameter.detach().float()).detach().requires_grad_()
        if state:
            self.inner.state[master] = state
        return master

    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        yield from ((p, p.grad) for group in self.groups for p in group if p.grad is not None)


def saved_state(saved: Mapping[str, Any], group: int, index: int, row: slice) -> State:
    """Find the state of one parameter in what a wrapper's ``state_dict`` gave.

    Args:
        group: the number of its parameter group there; ``index``: its own, counted over all groups.
        row: its elements in the group's flat buffer.

    Raises:
        KeyError, IndexError: it is not there, or of another form.
    """
    base = saved["optimizer_state_dict"]
    if "fp32_groups_flat" not in saved:
        first = base["param_groups"][group]["params"][0]
        return {MASTER: saved["fp32_groups"][group][index - first], **base["state"].get(index, {})}
    flat = saved["fp32_groups_flat"][group]
    if flat.numel() < row.stop:
        raise IndexError(f"fp32_groups_flat of parameter group {group} has {flat.numel()} elements, not {row.stop}")
    values = {MASTER: flat, **base["state"].get(group, {})}
    return {name: value[row] if _is_like(value, flat) else value for name, value in values.items()}


def _with_groups(state: Mapping[str, Any], keep: Sequence[int]) -> dict[str, Any]:
    """Return a wrapper's ``state_dict`` with the groups ``keep`` alone, numbered as DeepSpeed does without the rest."""
    base = state["optimizer_state_dict"]
    numbers = count()
    groups, kept = [], {}
    for group in (base["param_groups"][old] for old in keep):
        new = {old: next(numbers) for old in group["params"]}
        groups.append({**group, "params": list(new.values())})
        kept.update({new[old]: base["state"][old] for old in new if old in base["state"]})
    lists = {name: [state[name][i] for i in keep] for name in ("fp32_groups", "fp32_groups_flat") if name in state}
    return {**state, **lists, "optimizer_state_dict": {**base, "state": kept, "param_groups": groups}}


def _is_like(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def view_fp16(optimizer: Any) -> Fp16Wrapper | None:
    """View ``optimizer`` as one of the two wrappers; None if it is another."""
    kinds = (FusedFp16Wrapper, UnfusedFp16Wrapper)
    return next((kind(optimizer) for kind in kinds if isinstance(optimizer, kind.wraps)), None)
