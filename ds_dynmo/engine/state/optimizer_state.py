"""The optimizer's state of a stage's layers, and its part in a migration.

There are two kinds. A plain torch optimizer keeps state per parameter, which travels inside the layer
(:class:`PerParameterState`). DeepSpeed's wrappers keep it in flat shards (:mod:`ds_dynmo.engine.state.flat_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from deepspeed.ops.adam import FusedAdam
from torch import nn

from ds_dynmo.engine.comm.point_to_point import SMALL_BYTES
from ds_dynmo.engine.move.carrying import Transfers
from ds_dynmo.engine.move.tensors import num_bytes
from ds_dynmo.engine.state.keys import MASTER, ParamKey
from ds_dynmo.engine.state.layer_record import LayerRecord
from ds_dynmo.engine.state.parameter_groups import OptionTexts, check_alike, option_texts, options_of
from ds_dynmo.engine.state.pieces import PER_PARAMETER, Slot, StageSlots, StatePieces, in_memory, is_per_element
from ds_dynmo.plan import HeldBytes, MigrationPlan
from ds_dynmo.unmarked import unmarked


def select(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copy the elements of a flattened tensor at the places ``index``."""
    return unmarked(tensor).reshape(-1).index_select(0, index.to(tensor.device))


Named = Mapping[ParamKey, nn.Parameter]


class OptimizerState(Protocol):
    """The optimizer's state of a stage, and its part in a migration.

    Attributes:
        storage: :data:`PER_PARAMETER` or :data:`FLAT`.
    """

    storage: str

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters that the optimizer holds, frozen ones too."""
        ...

    # -- training ---------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Update after a batch was trained."""
        ...

    def is_current(self) -> bool:
        """Return whether the optimizer updates exactly the parameters that train. If not: :meth:`match_layers`."""
        ...

    def differs_from_layers(self) -> bool:
        """Return whether :meth:`match_layers` has something to do, for what this rank knows."""
        ...

    def match_layers(self) -> None:
        """Update after parameters were frozen, unfrozen, renamed, removed, or loaded. Collective.

        Raises:
            ConfigError: on every rank; nothing has changed.
        """
        ...

    # -- the phases of a migration, in this order, on every rank ------------------------------------------

    def describe(self) -> Any:
        """Update what travels inside layers, and return what all ranks have to know of the other state; None: nothing.

        Raises:
            ValueError: state cannot move now.
        """
        ...

    def prepare(
        self, plan: MigrationPlan, descriptions: Mapping[int, Any], *, overlapped: bool = False
    ) -> tuple[int, str]:
        """Plan the state to send, and allocate buffers for the state to receive.

        Args:
            descriptions: those of :meth:`describe` by rank: of this pipeline, or of all ranks.
            overlapped: whether a batch trains before :meth:`install_parameters`, so that all state travels ahead.

        Returns:
            Bytes that this rank will send apart from its layers, and a hash of their route, which has to be the same on
            all ranks of a pipeline.
        """
        ...

    def abandon(self) -> None:
        """Undo :meth:`prepare`: nothing will move."""
        ...

    def record(self, module: nn.Module) -> LayerRecord:
        """Collect a layer with the optimizer state that travels inside it."""
        ...

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype | None:
        """Return the type of a parameter's gradient, if that travels inside the layer; None: it does not."""
        ...

    def recv_buffer_of(self, key: ParamKey) -> torch.Tensor | None:
        """Return flat memory for a parameter of an arriving layer; None: it is allocated separately."""
        ...

    def transfers(self) -> Transfers:
        """List the state that travels ahead, apart from that in layers."""
        ...

    def copying(self, staying: Mapping[int, nn.Module]) -> Iterator[None]:
        """Copy what stays on this rank, state and weights, to its new memory.

        The iterator copies a bounded part before each of its elements.
        """
        ...

    def take_gradients(self) -> None:
        """Hold the gradients of the batch, and update what travels inside layers, so that they move along."""
        ...

    def changes(self) -> Any:
        """Return what every rank has to know of what the batch has changed since :meth:`prepare`; None: nothing."""
        ...

    def apply_changes(self, changes: Sequence[Any]) -> None:
        """Update to the :meth:`changes` of all ranks. State that was sent ahead and has changed follows at the end."""
        ...

    def copy_staying(self, staying: Mapping[int, nn.Module]) -> None:
        """Copy the weights of layers that stay to their new memory, while others travel."""
        ...

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        """Free the state of parameters that were sent away."""
        ...

    def install_parameters(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerRecord]) -> None:
        """Take over ``parameters`` of the stage, in this order; ``arrived``: the layers that arrived."""
        ...

    # -- checkpoints --------------------------------------------------------------------------------------

    def slots(self, named: Named) -> StageSlots:
        """List the slots of ``named``, the parameters of this rank's stage, in DeepSpeed's files."""
        ...

    def extra_optimizer_state(self) -> dict[str, Any] | None:
        """Collect the state for which DeepSpeed's files have no place; None: there is none."""
        ...

    def load(self, before: Named, after: Named, pieces: StatePieces | None) -> None:
        """Replace the optimizer's parameters ``before`` by ``after``, and load ``pieces`` as their state.

        Not collective. The weights of ``after`` are already loaded.

        Args:
            before, after: the stage's parameters; one may be another object in ``after``, or missing.
            pieces: the new state; None: keep the present state. Then :meth:`match_layers` has to follow.
                It is collective: it rebuilds flat shards without replaced parameters, and sets the fp32 weights from
                the loaded ones.
        """
        ...

    # -- what is held -------------------------------------------------------------------------------------

    def state_and_gradient_bytes(self, parameter: nn.Parameter) -> int:
        """Count the bytes of a parameter's gradients and optimizer state on this rank, without the weight."""
        ...

    def bytes_between_batches(self, parameter: nn.Parameter) -> HeldBytes:
        """Count the bytes of a parameter and its state on this rank between two batches."""
        ...

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state of a parameter on this rank; for tests and reports."""
        ...

    def use_grid(self) -> None:
        """Update after the grid became that of another world, with as many replicas."""
        ...

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        """Set elements of a parameter and of its state to 0. ``where``: bool, in its shape."""
        ...

    def export(self, named: Named, kept: Mapping[ParamKey, torch.Tensor]) -> StatePieces:
        """Collect the state of ``named``, this stage's parameters, for :meth:`load`. Collective over the replicas.

        Args:
            kept: of parameters that are reduced to some elements, the places of these when flattened.
        """
        ...


class PerParameterState:
    """The state of a plain torch optimizer, or of none.

    Args:
        gather: collective; gathers one value of every stage. None: there is one rank.
    """

    storage = PER_PARAMETER

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, gather: Callable[[Any], list[Any]] | None = None
    ) -> None:
        self._optimizer, self._gather = optimizer, gather

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []

    @property
    def _state(self) -> dict[Any, Any]:
        return self._optimizer.state if self._optimizer is not None else {}

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._groups for parameter in group["params"]]

    def after_step(self) -> None:
        pass

    def is_current(self) -> bool:
        return True

    def differs_from_layers(self) -> bool:
        return isinstance(self._optimizer, FusedAdam)

    def match_layers(self) -> None:
        self._count_steps_per_parameter(self._gather)

    def describe(self) -> OptionTexts:
        self._count_steps_per_parameter()
        return option_texts(self._groups, [bool(group["params"]) for group in self._groups])

    def prepare(
        self, plan: MigrationPlan, descriptions: Mapping[int, OptionTexts], *, overlapped: bool = False
    ) -> tuple[int, str]:
        check_alike(descriptions)
        return 0, ""

    def abandon(self) -> None:
        pass

    def _count_steps_per_parameter(self, everywhere: Callable[[Any], list[Any]] | None = None) -> None:
        """Correct DeepSpeed's FusedAdam, which counts a group's steps only at the last parameter with a gradient.

        Args:
            everywhere: collective; gathers one value of every stage. The count is then that of the whole model, which a
                frozen stage has not followed. None: use this stage's count.
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

    def record(self, module: nn.Module) -> LayerRecord:
        groups = {id(p): number for number, group in enumerate(self._groups) for p in group["params"]}
        return LayerRecord.of(
            module,
            group_of=lambda parameter: groups.get(id(parameter)),
            options_of=lambda number: options_of(self._groups[number]),
            state_of=self._state.get,
            gradient_of=lambda parameter: parameter.grad,
        )

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype | None:
        return parameter.dtype

    def recv_buffer_of(self, key: ParamKey) -> torch.Tensor | None:
        return None

    def transfers(self) -> Transfers:
        return [], []

    def copying(self, staying: Mapping[int, nn.Module]) -> Iterator[None]:
        return iter(())

    def take_gradients(self) -> None:
        self._count_steps_per_parameter()

    def changes(self) -> None:
        return None

    def apply_changes(self, changes: Sequence[Any]) -> None:
        pass

    def copy_staying(self, staying: Mapping[int, nn.Module]) -> None:
        pass

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        gone = {id(parameter) for parameter in parameters}
        for group in self._groups:
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        for parameter in [p for p in self._state if id(p) in gone]:
            del self._state[parameter]

    def install_parameters(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerRecord]) -> None:
        joining: dict[int, list[nn.Parameter]] = {}
        for record in (record for layer in arrived.values() for record in layer.parameters.values()):
            if record.group is not None:
                joining.setdefault(record.group, []).append(record.parameter)
            if record.state is not None:
                self._state[record.parameter] = record.state
            record.parameter.grad = record.gradient
        place = {id(parameter): position for position, parameter in enumerate(parameters)}
        for number, group in enumerate(self._groups):
            if not group["params"]:
                for layer in arrived.values():
                    group.update(layer.group_options.get(number, {}))
            members = []
            for parameter in (*group["params"], *joining.get(number, [])):
                if id(parameter) in place or not parameter.requires_grad:
                    members.append(parameter)
                else:  # its layer has it no longer
                    self._state.pop(parameter, None)
            group["params"] = sorted(members, key=lambda p: place.get(id(p), -1))
            group.pop("param_names", None)  # torch's optional labels, by position: no longer valid

    def slots(self, named: Named) -> StageSlots:
        key_of = {id(parameter): key for key, parameter in named.items()}
        slots, index = [], 0
        for number, group in enumerate(self._groups):
            offset = 0
            for parameter in group["params"]:
                if id(parameter) in key_of:
                    slots.append(Slot(*key_of[id(parameter)], number, index, offset, parameter.numel()))
                index, offset = index + 1, offset + parameter.numel()
        return StageSlots(tuple(slots))

    def extra_optimizer_state(self) -> None:
        return None

    def load(self, before: Named, after: Named, pieces: StatePieces | None) -> None:
        key_of = {id(parameter): key for key, parameter in before.items()}
        numbers = {
            key_of[id(parameter)]: number
            for number, group in enumerate(self._groups)
            for parameter in group["params"]
            if id(parameter) in key_of
        }
        if pieces is not None:
            numbers.update(pieces.groups)
        for key, parameter in before.items():
            if after.get(key) is not parameter or pieces is not None:
                self._state.pop(parameter, None)
        for number, group in enumerate(self._groups):
            others = [parameter for parameter in group["params"] if id(parameter) not in key_of]
            group["params"] = others + [after[key] for key in after if numbers.get(key) == number]
            group.pop("param_names", None)  # torch's optional labels, by position
            if pieces is not None:
                group.update(pieces.options.get(number, {}))
        if pieces is not None and self._optimizer is not None:
            for key, parameter in after.items():
                if key in pieces.values:
                    options = self._groups[numbers[key]]
                    self._state[parameter] = _assembled(parameter, pieces, key, options)

    def state_and_gradient_bytes(self, parameter: nn.Parameter) -> int:
        gradients = num_bytes(parameter) if parameter.requires_grad else 0
        return gradients + sum(num_bytes(tensor) for tensor in tensors_in(self._state.get(parameter)))

    def bytes_between_batches(self, parameter: nn.Parameter) -> HeldBytes:
        gradient = [] if parameter.grad is None else [parameter.grad]
        return held_alone([parameter, *gradient, *tensors_in(self._state.get(parameter))])

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return dict(self._state.get(parameter, {}))

    def use_grid(self) -> None:
        pass

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        unmarked(parameter).masked_fill_(where, 0)
        for name, held in self._state.get(parameter, {}).items():
            if is_per_element(name, held, parameter.shape):
                held.masked_fill_(where, 0)

    def export(self, named: Named, kept: Mapping[ParamKey, torch.Tensor]) -> StatePieces:
        pieces = StatePieces()
        for key, parameter in named.items():
            if parameter in self._state:
                pieces.put(key, self._state[parameter], parameter.shape)
                for runs in pieces.elements[key].values() if key in kept else ():
                    runs[:] = [(start, select(whole, kept[key])) for start, whole in runs]
        return pieces


def _assembled(
    parameter: nn.Parameter, pieces: StatePieces, key: ParamKey, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the state of a parameter from pieces, as a copy."""
    state = {name: in_memory(name, value, options, parameter.device) for name, value in pieces.values[key].items()}
    for name, runs in pieces.elements[key].items():
        if name != MASTER:
            ((_, whole),) = runs
            state[name] = in_memory(name, whole, options, parameter.device)
    return state


def held_alone(tensors: Iterable[torch.Tensor]) -> HeldBytes:
    """Count the bytes of tensors that are allocated separately."""
    sizes = [num_bytes(tensor) for tensor in tensors]
    return HeldBytes(separate=sum(sizes), staged=sum(size for size in sizes if size <= SMALL_BYTES))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []
