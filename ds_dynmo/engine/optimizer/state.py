"""What the optimizer holds for the layers of a stage, and how it follows them when they move.

Two kinds: a plain torch optimizer keeps state per parameter, which travels inside the layer
(:class:`PerParameterState`); DeepSpeed's wrappers keep it in flat shards (:mod:`ds_dynmo.engine.optimizer.flat_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from deepspeed.ops.adam import FusedAdam
from torch import nn

from ds_dynmo.engine.comm.communicator import SMALL_BYTES
from ds_dynmo.engine.migration.packing import LayerContent, num_bytes, parameter_attributes, parameter_hooks
from ds_dynmo.engine.optimizer.parameter_groups import options_of
from ds_dynmo.plan import HeldBytes, MigrationPlan


class OptimizerState(Protocol):
    """The optimizer's part in a migration. The methods are called in this order, on every rank."""

    def trained(self) -> dict[int, nn.Parameter] | None:
        """The parameters that it updates, or would if they were not frozen, by ``id``; None: there is no optimizer."""
        ...

    def prepare(self, plan: MigrationPlan) -> int:
        """Find out what has to be sent. May gather; changes nothing.

        Returns:
            Bytes this rank will send apart from those in its layers.
        """
        ...

    def content(self, module: nn.Module) -> LayerContent:
        """A layer with all of the optimizer's that travels inside it."""
        ...

    def start(self) -> None:
        """Layers are about to move: free what is made anew when they have."""
        ...

    def work_meanwhile(self, staying: Mapping[int, nn.Module]) -> Callable[[], None] | None:
        """What is to be done once, while layers travel, for those that stay; None: nothing."""
        ...

    def recv_buffer_of(self, index: int, position: int) -> torch.Tensor | None:
        """Where to receive a parameter of layer ``index``, which arrives: flat memory, or None for its own."""
        ...

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """These parameters were sent away: let go of what is held for them."""
        ...

    def settle(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]) -> None:
        """The stage's parameters are now ``parameters``, in this order; ``arrived`` are the layers that came."""
        ...

    def static_bytes(self, parameter: nn.Parameter) -> int:
        """Bytes of gradients and optimizer state of a parameter, on this rank."""
        ...

    def held_bytes(self, parameter: nn.Parameter) -> HeldBytes:
        """Of a parameter with all that is held for it on this rank between two batches."""
        ...

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What the optimizer holds for a parameter, as far as it is on this rank; for tests and reports."""
        ...

    def use_grid(self) -> None:
        """The grid that was given at the start is now that of another world."""
        ...

    def plan_scatter_shards(self, partition: Sequence[int], num_replicas: int) -> Any:
        """Find out how the state of so many replicas is shared by all that there are now. May gather."""
        ...

    def scatter_shards(
        self, plan: Any, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]
    ) -> None:
        """Like :meth:`settle`, where more replicas hold the stages than before, by :meth:`plan_scatter_shards`."""
        ...

    def gather_shards(self, partition: Sequence[int], num_replicas: int) -> None:
        """From now on so many replicas hold all of the state; :meth:`rebuild_buffers` follows in their new world."""
        ...

    def rebuild_buffers(self) -> None:
        """After :meth:`gather_shards`, in the new world."""
        ...

    def clear(self) -> None:
        """All layers of this stage are gone without having been sent: let go of all parameters."""
        ...

    def forget(self) -> None:
        """This stage has no layer any more: let go of all that is still held."""
        ...

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        """Set a parameter to 0 where ``where``, bool in its shape, says so, and all that is held per element of it."""
        ...


class PerParameterState:
    """A plain torch optimizer, or none."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []

    @property
    def _state(self) -> dict[Any, Any]:
        return self._optimizer.state if self._optimizer is not None else {}

    def trained(self) -> dict[int, nn.Parameter] | None:
        if self._optimizer is None:
            return None
        return {id(parameter): parameter for group in self._groups for parameter in group["params"]}

    def prepare(self, plan: MigrationPlan) -> int:
        if plan.moves:
            self.count_steps_per_parameter()
        return 0

    def count_steps_per_parameter(self, everywhere: Callable[[Any], list[Any]] | None = None) -> None:
        """Mend DeepSpeed's FusedAdam: it counts the steps of a group on the last parameter that had a gradient.

        Args:
            everywhere: collective, gathers one value of every rank: the count then is the whole model's, as it has
                to be where a stage did not count because it was frozen. None: this stage's.
        """
        if not isinstance(self._optimizer, FusedAdam):
            return
        held = [[self._state[p] for p in group["params"] if p in self._state] for group in self._groups]
        steps = [max((state["step"] for state in states), default=0) for states in held]
        if everywhere is not None:
            steps = [max(counts) for counts in zip(*everywhere(steps))]
        for states, count in zip(held, steps):
            for state in states:
                state["step"] = count

    def content(self, module: nn.Module) -> LayerContent:
        parameters = list(module.parameters())
        group_of = {id(p): number for number, group in enumerate(self._groups) for p in group["params"]}
        numbers = [group_of.get(id(parameter)) for parameter in parameters]
        return LayerContent(
            module=module,
            parameters=parameters,
            groups=numbers,
            optimizer_state=[self._state.get(parameter) for parameter in parameters],
            gradients=[parameter.grad for parameter in parameters],
            attributes=[parameter_attributes(parameter) for parameter in parameters],
            hooks=[parameter_hooks(parameter) for parameter in parameters],
            group_options={n: options_of(self._groups[n]) for n in numbers if n is not None},
        )

    def start(self) -> None:
        pass

    def work_meanwhile(self, staying: Mapping[int, nn.Module]) -> Callable[[], None] | None:
        return None

    def recv_buffer_of(self, index: int, position: int) -> torch.Tensor | None:
        return None

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        gone = {id(parameter) for parameter in parameters}
        for group in self._groups:
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        for parameter in [p for p in self._state if id(p) in gone]:
            del self._state[parameter]

    def settle(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]) -> None:
        joining_ranks: dict[int, list[nn.Parameter]] = {}
        for content in arrived.values():
            for parameter, number, state in zip(content.parameters, content.groups, content.optimizer_state):
                if number is not None:
                    joining_ranks.setdefault(number, []).append(parameter)
                if state is not None:
                    self._state[parameter] = state
        place = {id(parameter): position for position, parameter in enumerate(parameters)}
        for number, group in enumerate(self._groups):
            if not group["params"]:
                for content in arrived.values():
                    group.update(content.group_options.get(number, {}))
            members = [*group["params"], *joining_ranks.get(number, [])]
            group["params"] = sorted(members, key=lambda p: place.get(id(p), -1))
            group.pop("param_names", None)  # optional labels of torch's, by position: no longer true

    def static_bytes(self, parameter: nn.Parameter) -> int:
        gradients = num_bytes(parameter) if parameter.requires_grad else 0
        return gradients + sum(num_bytes(tensor) for tensor in _tensors_in(self._state.get(parameter)))

    def held_bytes(self, parameter: nn.Parameter) -> HeldBytes:
        gradient = [] if parameter.grad is None else [parameter.grad]
        return held_alone([parameter, *gradient, *_tensors_in(self._state.get(parameter))])

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return dict(self._state.get(parameter, {}))

    def use_grid(self) -> None:
        pass

    def plan_scatter_shards(self, partition: Sequence[int], num_replicas: int) -> Any:
        self.count_steps_per_parameter()

    def scatter_shards(
        self, plan: Any, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerContent]
    ) -> None:
        self.settle(parameters, arrived)

    def gather_shards(self, partition: Sequence[int], num_replicas: int) -> None:
        pass

    def rebuild_buffers(self) -> None:
        pass

    def clear(self) -> None:
        for group in self._groups:
            group["params"] = []
            group.pop("param_names", None)
        self._state.clear()

    def forget(self) -> None:
        self._state.clear()

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        parameter.detach().masked_fill_(where, 0)
        for name, held in self._state.get(parameter, {}).items():
            if name != "step" and isinstance(held, torch.Tensor) and held.shape == parameter.shape:
                held.masked_fill_(where, 0)


def held_alone(tensors: Iterable[torch.Tensor]) -> HeldBytes:
    """Of tensors in memory of their own."""
    sizes = [num_bytes(tensor) for tensor in tensors]
    return HeldBytes(own=sum(sizes), staged=sum(size for size in sizes if size <= SMALL_BYTES))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []
