"""Which parameter group each parameter of a stage is in, and in which of the group's two flat buffers it lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ds_dynmo.engine.state.keys import ParamKey


class Membership:
    """The group of each parameter, and whether it is *parked*: frozen, in a buffer that the optimizer does not see.

    Args:
        groups: per parameter group, all of its parameters on this stage, frozen ones too.
    """

    def __init__(self, groups: Sequence[Iterable[nn.Parameter]]) -> None:
        self._num_groups = len(groups)
        self._group: dict[int, int] = {}
        self._parked: set[int] = set()
        for number, group in enumerate(groups):
            for parameter in group:
                self.join(parameter, number)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._group

    def group(self, parameter: nn.Parameter) -> int | None:
        """Return the number of a parameter's group; None if it is in none."""
        return self._group.get(id(parameter))

    def is_parked(self, parameter: nn.Parameter) -> bool:
        """Tell whether it lies in its group's parked buffer."""
        return id(parameter) in self._parked

    def join(self, parameter: nn.Parameter, group: int) -> None:
        """Put it into ``group``, parked if it is frozen."""
        self._group[id(parameter)] = group
        self.put(parameter, parked=not parameter.requires_grad)

    def put(self, parameter: nn.Parameter, *, parked: bool) -> bool:
        """Put it into that buffer of its group; True if it was in the other."""
        if self.is_parked(parameter) == parked:
            return False
        self._parked ^= {id(parameter)}
        return True

    def is_current(self, parameter: nn.Parameter) -> bool:
        """Tell whether it is where its ``requires_grad`` says: with the optimizer if it trains, else parked."""
        return parameter.requires_grad != self.is_parked(parameter)

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Let ``new`` be where ``old`` was."""
        if old in self:
            self._group[id(new)] = self._group[id(old)]
            if self.is_parked(old):
                self._parked.add(id(new))
            self.leave(old)

    def leave(self, parameter: nn.Parameter) -> None:
        """Take it out of its group: it was sent away."""
        self._group.pop(id(parameter), None)
        self._parked.discard(id(parameter))

    def by_group(self, named: Mapping[ParamKey, nn.Parameter], *, parked: bool) -> list[dict[ParamKey, nn.Parameter]]:
        """List, per group, those of ``named`` that lie in that buffer of it, in their order."""
        found: list[dict[ParamKey, nn.Parameter]] = [{} for _ in range(self._num_groups)]
        for key, parameter in named.items():
            if parameter in self and self.is_parked(parameter) == parked:
                found[self._group[id(parameter)]][key] = parameter
        return found
