"""The flat buffers of a stage's weights, one per parameter group, and their replacement in a migration.

The next buffers are allocated beside the present ones. Weights of layers that stay are copied into them, and those of
arriving layers are received into them. Then DeepSpeed's wrapper takes them over, and the old buffers are freed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import nn

from ds_dynmo.engine.deepspeed.flat_adapter import Groups, unbind
from ds_dynmo.engine.move.layout import shard_size
from ds_dynmo.engine.state.flat_shards import FlatShards, Member
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.unmarked import unmarked


class FlatWeights:
    """Builds the next flat weights of a stage.

    Args:
        placeholders: one element per group, for stages without parameters of the group.
    """

    def __init__(self, shards: FlatShards, placeholders: Sequence[nn.Parameter]) -> None:
        self._shards, self._placeholders = shards, list(placeholders)
        self._next: dict[int, torch.Tensor] = {}
        self._views: dict[ParamKey | None, torch.Tensor] = {}

    def allocate(self, members: Sequence[Member]) -> None:
        """Allocate the next buffers, for these parameters."""
        live: dict[int, list[Member]] = {}
        for member in members:
            if not member.buffer.detached:
                live.setdefault(member.buffer.group, []).append(member)
        for number in self._shards.numbers:
            of_group = live.get(number, [])
            flat = self._next_of(number, sum(member.numel for member in of_group))
            views = flat[: sum(member.numel for member in of_group)].split([member.numel for member in of_group])
            self._views.update(zip((member.key for member in of_group), views))

    def next_view(self, key: ParamKey) -> torch.Tensor | None:
        """Return the flat memory of a parameter in a next buffer; None: it is in no buffer."""
        return self._views.get(key)

    def abandon(self) -> None:
        """Free the next buffers."""
        self._next.clear()
        self._views.clear()

    def _next_of(self, group: int, total: int) -> torch.Tensor:
        """Return a group's next buffer for ``total`` elements, allocated once."""
        if group not in self._next:
            count = self._shards.count_of(group)
            self._next[group] = self._placeholders[group].data.new_empty(shard_size(total, count) * count)
        return self._next[group]

    def rebuild(
        self, named: Mapping[ParamKey, nn.Parameter], detached: Container[ParamKey | None]
    ) -> tuple[Groups, list[torch.Tensor]]:
        """Put the weights of the stage into the next buffers, for DeepSpeed's wrapper to take over.

        Args:
            named: the stage's parameters.
            detached: parameters in detached buffers from now on.

        Returns:
            The parameters of each group, or its placeholder, and the buffers that they are views of.
        """
        membership = self._shards.membership
        membership.keep_only(named.values())
        for key, parameter in named.items():
            if parameter in membership:
                unbind(parameter)
                is_detached = key in detached
                if membership.put(parameter, detached=is_detached) and is_detached:
                    parameter.data = parameter.data.clone()  # no longer a part of the flat weights
        live = self._shards.planned(detached=False)
        groups = [[*group.values()] or [placeholder] for group, placeholder in zip(live, self._placeholders)]
        flats = [self._flatten(number, group) for number, group in enumerate(groups)]
        self.abandon()
        self._shards.note_detached()
        return groups, flats

    def _flatten(self, number: int, group: Sequence[nn.Parameter]) -> torch.Tensor:
        """Make the parameters of a group views of its next buffer, if they are not yet."""
        total = sum(parameter.numel() for parameter in group)
        flat = self._next_of(number, total)
        offset = 0
        for parameter in group:
            view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            if view.data_ptr() != unmarked(parameter).data_ptr():
                view.copy_(parameter.data)
            parameter.data = view
            offset += parameter.numel()
        flat[offset:].zero_()
        return flat
