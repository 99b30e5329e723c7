"""The parameter group of each parameter of a stage, and which of the group's two flat buffers holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ds_dynmo.engine.state.keys import ParamKey


class Membership:
    """The group of each parameter, and whether it is *detached*: frozen, in a buffer that the optimizer does not see.

    Args:
        groups: per parameter group, all of its parameters on this stage, frozen ones too.
    """

    def __init__(self, groups: Sequence[Iterable[nn.Parameter]]) -> None:
        self._num_groups = len(groups)
        self._group: dict[nn.Parameter, int] = {}
        self._detached: set[nn.Parameter] = set()
        for number, group in enumerate(groups):
            for parameter in group:
                self.join(parameter, number)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._group

    def group(self, parameter: nn.Parameter) -> int | None:
        """Return the number of a parameter's group; None if it is in none."""
        return self._group.get(parameter)

    def is_detached(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter lies in its group's detached buffer."""
        return parameter in self._detached

    def join(self, parameter: nn.Parameter, group: int) -> None:
        """Add a parameter to ``group``, detached if it is frozen."""
        self._group[parameter] = group
        self.put(parameter, detached=not parameter.requires_grad)

    def put(self, parameter: nn.Parameter, *, detached: bool) -> bool:
        """Put a parameter into this buffer of its group; return whether it was in the other."""
        if self.is_detached(parameter) == detached:
            return False
        self._detached ^= {parameter}
        return True

    def is_current(self, parameter: nn.Parameter) -> bool:
        """Return whether it is where its ``requires_grad`` says: in the optimizer if it trains, else detached."""
        return parameter.requires_grad != self.is_detached(parameter)

    def leave(self, parameter: nn.Parameter) -> None:
        """Remove a parameter that was sent away."""
        self._group.pop(parameter, None)
        self._detached.discard(parameter)

    def keep_only(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remove all others, which layers have no longer."""
        here = set(parameters)
        for parameter in self._group.keys() - here:
            self.leave(parameter)

    def by_group(self, named: Mapping[ParamKey, nn.Parameter], *, detached: bool) -> list[dict[ParamKey, nn.Parameter]]:
        """Select, per group, the parameters of ``named`` in this buffer of the group, in their order."""
        groups: list[dict[ParamKey, nn.Parameter]] = [{} for _ in range(self._num_groups)]
        for key, parameter in named.items():
            if parameter in self and self.is_detached(parameter) == detached:
                groups[self._group[parameter]][key] = parameter
        return groups
