"""Cut the part of one tensor-parallel slice from a whole parameter of a universal checkpoint.

DeepSpeed's converter joins slices by the patterns in ``universal_checkpoint_info`` and notes in each parameter's file
how it did. The same notes say how to cut. Slices may differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ds_dynmo.engine.deepspeed.universal import WholeParameter
from ds_dynmo.errors import CheckpointError

Shape = list[int]


def cut_slice(whole: WholeParameter, shapes: Sequence[Shape], tp_rank: int, path: str) -> torch.Tensor:
    """Return what one slice holds of a parameter, as a view where that is possible.

    Args:
        shapes: per slice, the shape of the parameter there.
        path: of the parameter's file, for messages.

    Raises:
        CheckpointError: the parameter cannot be cut into these shapes.
    """
    wanted, tensor = shapes[tp_rank], whole.tensor
    if list(tensor.shape) == wanted:  # a copy on every slice, or there is only one
        return tensor
    if whole.vocabulary:
        tensor = pad(tensor, (0, 0, 0, max(sum(shape[0] for shape in shapes) - tensor.shape[0], 0)))
    if whole.view is not None:
        tensor = tensor.reshape(whole.view)
    dim, shares = whole.dim, _shares(whole, shapes)
    if dim < tensor.dim() and sum(map(sum, shares)) == tensor.shape[dim]:
        found = _narrow(tensor, dim, shares, tp_rank)
        if list(found.shape) == wanted or (whole.view is not None and found.numel() == torch.Size(wanted).numel()):
            return found.reshape(wanted)
    raise CheckpointError(
        f"{path}: has shape {list(whole.tensor.shape)}, which cannot be cut along dimension {dim} into {list(shapes)}, "
        "the shapes on the tensor-parallel slices here (patterns in universal_checkpoint_info say along which)"
    )


def _shares(whole: WholeParameter, shapes: Sequence[Shape]) -> list[list[int]]:
    """Count the elements of each part on each slice along the dimension of the cut; none where they do not divide."""
    if whole.part_sizes is not None:
        return [[size // len(shapes)] * len(shapes) for size in whole.part_sizes]
    if any(len(shape) <= whole.dim or shape[whole.dim] % whole.parts for shape in shapes):
        return []
    return [[shape[whole.dim] // whole.parts for shape in shapes]] * whole.parts


def _narrow(tensor: torch.Tensor, dim: int, shares: Sequence[Sequence[int]], tp_rank: int) -> torch.Tensor:
    pieces, start = [], 0
    for share in shares:
        pieces.append(tensor.narrow(dim, start + sum(share[:tp_rank]), share[tp_rank]))
        start += sum(share)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
