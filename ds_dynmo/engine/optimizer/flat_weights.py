"""The flat buffers in which the weights of a stage lie, one per parameter group: how they are filled anew.

The next buffers are allocated beside the present ones. Weights of layers that stay are copied, those that arrive are
received into them; then DeepSpeed's wrapper takes them over, and nothing holds the old ones.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import nn

from ds_dynmo.engine.deepspeed_adapter.flat_wrapper import Groups, unbind
from ds_dynmo.engine.optimizer.flat_layout import shard_size
from ds_dynmo.engine.optimizer.flat_shards import FlatShards


class FlatWeights:
    """Builds the next flat weights of a stage.

    Args:
        placeholders: one element per group that keeps a group alive where a stage has nothing of it.
    """

    def __init__(self, shards: FlatShards, placeholders: Sequence[nn.Parameter]) -> None:
        self._shards, self._placeholders = shards, list(placeholders)
        self._next: dict[int, torch.Tensor] = {}

    def next_of(self, group: int, shard: int) -> torch.Tensor:
        """Return a group's next buffer, of so many elements per replica. It is allocated once."""
        if group not in self._next:
            self._next[group] = self._placeholders[group].data.new_empty(shard * self._shards.count_of(group))
        return self._next[group]

    def abandon(self) -> None:
        """Free the next buffers."""
        self._next.clear()

    def rebuild(self, parameters: Sequence[nn.Parameter], parked: Container[int]) -> tuple[Groups, list[torch.Tensor]]:
        """Put the weights of the stage into the next buffers, for DeepSpeed's wrapper to take over.

        Args:
            parameters: the stage's.
            parked: by ``id``, those that lie in parked buffers from now on.

        Returns:
            The parameters of each group, or its placeholder, and the buffers that they are views of.
        """
        membership = self._shards.membership
        for parameter in parameters:
            if parameter in membership:
                unbind(parameter)
                is_parked = id(parameter) in parked
                if membership.put(parameter, parked=is_parked) and is_parked:
                    parameter.data = parameter.data.clone()  # no longer a part of the flat weights
        live = membership.by_group(parameters, parked=False)
        groups = [group or [placeholder] for group, placeholder in zip(live, self._placeholders)]
        flats = [self._flatten(number, group) for number, group in enumerate(groups)]
        self._next.clear()
        return groups, flats

    def _flatten(self, number: int, group: Sequence[nn.Parameter]) -> torch.Tensor:
        """Make the parameters of a group views of its next buffer. Some lie there already."""
        total = sum(parameter.numel() for parameter in group)
        flat = self.next_of(number, shard_size(total, self._shards.count_of(number)))
        offset = 0
        for parameter in group:
            view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            if view.data_ptr() != parameter.data_ptr():
                view.copy_(parameter.data)
            parameter.data = view
            offset += parameter.numel()
        flat[offset:].zero_()
        return flat
