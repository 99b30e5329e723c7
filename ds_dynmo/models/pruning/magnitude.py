"""Find the largest weights of a model that is spread over stages, exactly as sorting all of them would.

Algorithm 1 of the paper gathers every rank's largest weights on rank 0. Here the k-th magnitude is found instead by
counting: the bit pattern of a non-negative fp32 number, read as an integer, grows with the number, so four rounds
settle it, eight bits each, with one sum of 256 counts over the stages per round. One more sum, of a number per layer,
settles which of equal magnitudes stay. Memory beyond the masks does not depend on the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_dynmo.models.pruning.sparse_linear import PrunableLinear

__all__ = ["Selection", "select_largest"]

WEIGHTS_AT_ONCE = 1 << 18  # weights looked at together

Sum = Callable[[torch.Tensor], torch.Tensor]
Linears = Mapping[int, Sequence[PrunableLinear]]  # by layer number, in the order of positions in the layer


def select_largest(linears: Linears, keep: int, *, num_layers: int, sum_over_stages: Sum) -> Selection:
    """Select the ``keep`` unpruned weights of all stages that are largest in magnitude. Collective.

    Of equal ones the first stay, by layer and by position in the layer's dense weights. Magnitudes are
    compared in fp32, in which those of bf16 and fp16 weights are exact.

    Args:
        linears: of this stage.
        keep: at most as many weights as are not pruned.
        num_layers: of the model.
        sum_over_stages: adds a CPU float64 tensor over the stages; exact for counts below 2**53.
    """
    bits, equal = _kth(linears, keep, sum_over_stages) if keep else (torch.iinfo(torch.int32).max, 0)
    found = torch.zeros(num_layers, dtype=torch.float64)
    for layer, members in linears.items():
        for linear in members:
            for magnitudes, candidates in _chunks(linear):
                found[layer] += ((magnitudes == bits) & candidates).sum().item()
    found = sum_over_stages(found)
    before = (found.cumsum(0) - found).tolist()
    return Selection(bits, {layer: max(0, equal - int(before[layer])) for layer in linears})


def _kth(linears: Linears, k: int, sum_over_stages: Sum) -> tuple[int, int]:
    """Find the bit pattern of the ``k``-th largest magnitude, and how many of that magnitude are among the ``k``."""
    prefix = 0
    for shift in (24, 16, 8, 0):
        counts = torch.zeros(256, dtype=torch.float64)
        for members in linears.values():
            for linear in members:
                for bits, candidates in _chunks(linear):
                    alike = bits[candidates & (bits >> shift >> 8 == prefix)]  # shifted twice: int32 has no >> 32
                    counts += torch.bincount((alike >> shift) & 255, minlength=256).cpu()
        larger = sum_over_stages(counts).flip(0).cumsum(0)  # [i]: how many have a digit of 255 - i or more
        place = int((larger < k).sum())
        assert place < 256, f"{k} weights are to stay, {int(larger[-1])} are not pruned"
        k -= int(larger[place - 1]) if place else 0
        prefix = prefix << 8 | (255 - place)
    return prefix, k


@dataclass(frozen=True)
class Selection:
    """Which weights of this stage stay.

    Attributes:
        bits: bit pattern of the k-th magnitude; larger ones stay.
        equal: per layer here, how many weights of exactly that magnitude stay if it has so many: its first ones.
    """

    bits: int
    equal: Mapping[int, int]

    def masks(self, layer: int, linears: Sequence[PrunableLinear]) -> Iterator[torch.Tensor]:
        """Iterate over the masks of a layer's linear layers, bool in the shape of the parameter: True stays."""
        left = self.equal[layer]
        for linear in linears:
            masks: list[torch.Tensor] = []
            for bits, candidates in _chunks(linear):
                stays = bits > self.bits
                places = ((bits == self.bits) & candidates).nonzero().squeeze(1)[:left]
                stays[places] = True
                left -= len(places)
                masks.append(stays)
            yield torch.cat(masks).view(linear.weight.shape)


def _chunks(linear: PrunableLinear) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over chunks of a linear layer's weights: bits of their magnitudes, and which are unpruned."""
    weight = linear.weight.detach().reshape(-1)
    mask = None if linear.mask is None else linear.mask.view(-1)
    for start in range(0, max(1, len(weight)), WEIGHTS_AT_ONCE):
        bits = weight[start : start + WEIGHTS_AT_ONCE].float().abs().view(torch.int32)
        yield bits, torch.ones_like(bits, dtype=torch.bool) if mask is None else mask[start : start + WEIGHTS_AT_ONCE]
