"""Optimizer state under DeepSpeed's fp16 wrappers without ZeRO: fp32 weights and moments travel inside the layer.

Every replica holds all of its stage's state, so a parameter's part of it goes where the parameter goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.deepspeed_adapter.fp16_wrapper import Fp16Wrapper, State
from ds_dynmo.engine.deepspeed_adapter.pipeline_module import StageLayers
from ds_dynmo.engine.migration.tensors import num_bytes
from ds_dynmo.engine.optimizer.membership import Membership
from ds_dynmo.engine.optimizer.parameter_groups import options_of
from ds_dynmo.engine.optimizer.state import KeptElements, PerParameterState, held_alone, is_per_element
from ds_dynmo.engine.state.keys import MASTER
from ds_dynmo.engine.state.layer_record import LayerRecord
from ds_dynmo.plan import HeldBytes, MigrationPlan


class MasterState(PerParameterState):
    """The state of a stage under ``FP16_Optimizer`` or ``FP16_UnfusedOptimizer``.

    Args:
        groups: per parameter group, all of its parameters on this stage, frozen ones too.
        placeholders: one element per group that keeps a group alive where a stage has nothing of it.
    """

    def __init__(
        self,
        wrapper: Fp16Wrapper,
        layers: StageLayers,
        groups: Sequence[Sequence[nn.Parameter]],
        placeholders: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(wrapper.inner)
        self._wrapper, self._layers, self._placeholders = wrapper, layers, list(placeholders)
        self._membership = Membership(groups)
        frozen = [p for group in groups for p in group if self._membership.is_parked(p)]
        self._parked: dict[int, State] = {id(p): {MASTER: p.detach().float()} for p in frozen}
        self._weights_lead = False

    # -- what is held ---------------------------------------------------------------------------------

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """Per group, the parameters of this stage that it trains."""
        return [[*group.values()] for group in self._membership.by_group(self._layers.named_parameters(), parked=False)]

    @property
    def parked(self) -> list[list[nn.Parameter]]:
        """Per group, its frozen parameters."""
        return [[*group.values()] for group in self._membership.by_group(self._layers.named_parameters(), parked=True)]

    @property
    def options(self) -> dict[int, dict[str, Any]]:
        """Per group, its options."""
        return {number: options_of(group) for number, group in enumerate(self._groups)}

    def group(self, parameter: nn.Parameter) -> int | None:
        """Return the number of a parameter's group; None if it is in none."""
        return self._membership.group(parameter)

    def is_current(self) -> bool:
        """Tell whether it trains every parameter that is trainable, and no other."""
        return all(self._membership.is_current(p) for p in self._layers.parameters() if p in self._membership)

    def trained(self) -> dict[int, nn.Parameter] | None:
        return {id(parameter): parameter for parameter in self._layers.parameters() if parameter in self._membership}

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if parameter not in self._membership:
            return {}
        if self._membership.is_parked(parameter):
            number = self._membership.group(parameter)
            assert number is not None, "every parameter in a membership has a group"
            return {**self._wrapper.of_group(number), **self._parked[id(parameter)]}
        return self._wrapper.state_of(parameter)

    def static_bytes(self, parameter: nn.Parameter) -> int:
        gradients = num_bytes(parameter) if parameter.requires_grad else 0
        return gradients + sum(num_bytes(tensor) for tensor in self._tensors(parameter))

    def held_bytes(self, parameter: nn.Parameter) -> HeldBytes:
        gradient = [] if parameter.grad is None else [parameter.grad]
        return held_alone([parameter, *gradient, *self._tensors(parameter)])

    def _tensors(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        return [value for value in self.state_of(parameter).values() if isinstance(value, torch.Tensor)]

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        parameter.detach().masked_fill_(where, 0)
        for name, held in self.state_of(parameter).items():
            if is_per_element(name, held, parameter):
                held.masked_fill_(where, 0)

    def keep_elements(self, kept: Sequence[KeptElements], replace: Callable[[], None]) -> None:
        replace()
        states: dict[int, State] = {}
        for entry in kept:
            number = self._membership.group(entry.old)
            if number is not None:
                state = {
                    name: entry.select(held) if is_per_element(name, held, entry.old) else held
                    for name, held in self.state_of(entry.old).items()
                }
                self.drop([entry.old])
                self._join(entry.new, number, state, states)
        self._rewrap(self._layers.parameters(), states)

    # -- moves ----------------------------------------------------------------------------------------

    def prepare(self, plan: MigrationPlan, *, overlapped: bool = False) -> tuple[int, str]:
        return 0, ""

    def refresh(self) -> None:
        pass

    def record(self, module: nn.Module) -> LayerRecord:
        return LayerRecord.of(
            module,
            group_of=self._membership.group,
            options_of=lambda number: options_of(self._groups[number]),
            state_of=lambda parameter: self.state_of(parameter) or None,
            gradient_of=lambda parameter: parameter.grad,
        )

    def drop(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            self._membership.leave(parameter)
            self._parked.pop(id(parameter), None)

    def settle(self, parameters: Sequence[nn.Parameter], arrived: Mapping[int, LayerRecord]) -> None:
        joining = {id(found.parameter) for layer in arrived.values() for found in layer.parameters.values()}
        filled = {self._membership.group(parameter) for parameter in parameters if id(parameter) not in joining}
        states: dict[int, State] = {}
        for content in arrived.values():
            for found in content.parameters.values():
                if found.group is not None:
                    self._join(found.parameter, found.group, found.state or {}, states)
                    if found.group not in filled:
                        self._groups[found.group].update(content.group_options.get(found.group, {}))
        self._rewrap(parameters, states)

    def refit(self) -> None:
        """Follow what was frozen or unfrozen, and weights that were loaded."""
        if self._weights_lead or not self.is_current():
            self._rewrap(self._layers.parameters(), {})
        if self._weights_lead:
            for parameter in (self.trained() or {}).values():
                self.state_of(parameter)[MASTER].copy_(parameter.detach())
        self._weights_lead = False

    def _join(self, parameter: nn.Parameter, number: int, state: State, states: dict[int, State]) -> None:
        """Put it into a group; its state into ``states``, or aside while it is frozen, but for what is the group's."""
        self._membership.join(parameter, number)
        if self._membership.is_parked(parameter):
            state = {MASTER: parameter.detach().float(), **state}
            if "step" in state:
                self._wrapper.set_of_group(number, state)
            self._parked[id(parameter)] = self._wrapper.of_parameter(state)
        else:
            states[id(parameter)] = state

    def _rewrap(self, parameters: Sequence[nn.Parameter], states: dict[int, State]) -> None:
        """Let DeepSpeed's wrapper train what is trainable of ``parameters``; ``states``: of those that came."""
        for parameter in parameters:
            if parameter not in self._membership or self._membership.is_current(parameter):
                continue
            if parameter.requires_grad:
                states[id(parameter)] = self._parked.pop(id(parameter))
            else:
                self._parked[id(parameter)] = self._wrapper.of_parameter(self._wrapper.state_of(parameter))
                parameter.data = parameter.data.clone()  # no longer a part of flat weights
            self._membership.put(parameter, parked=not parameter.requires_grad)
        known = set(map(id, parameters))
        live = [[p for p in group if id(p) in known] for group in self.members]
        groups = [group or [placeholder] for group, placeholder in zip(live, self._placeholders)]
        self._wrapper.rewrap(groups, states)

    def clear(self) -> None:
        self.load([], {})

    def forget(self) -> None:
        self.clear()

    # -- checkpoints ----------------------------------------------------------------------------------

    def load(
        self, members: Sequence[tuple[nn.Parameter, int, State]], options: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Hold this state from now on. Weights are in place.

        Args:
            members: the stage's parameters with their group and state.
            options: per group.
        """
        self._membership, self._parked, self._weights_lead = Membership([[] for _ in self._groups]), {}, False
        states: dict[int, State] = {}
        for number in range(len(self._groups)):
            self._wrapper.set_of_group(number, {})
        for parameter, number, state in members:
            self._join(parameter, number, state, states)
        for number, values in options.items():
            self._groups[number].update(values)
        self._rewrap([parameter for parameter, *_ in members], states)

    def weights_loaded(self, before: Mapping[Any, nn.Parameter], after: Mapping[Any, nn.Parameter]) -> None:
        """Follow weights that were loaded without the optimizer's state: fp32 weights change, moments stay.

        A parameter that had to become another one starts without state, in the group of the one that it was.
        :meth:`refit` carries this out and has to follow.

        Args:
            before, after: the stage's parameters by layer and name, in the order of its layers.
        """
        self._weights_lead = True
        for key, old in before.items():
            new, number = after.get(key), self._membership.group(old)
            if new is not old:
                self.drop([old])
                if new is not None and number is not None:
                    self._join(new, number, {}, {})
