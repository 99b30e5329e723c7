"""Sum the gradients of all copies of a tied weight, so that every copy has the sum.

Copies in several modules of one stage are added up here. Copies on several stages are added up by DeepSpeed,
over the process groups of :func:`tied_comms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed.pipe import PipelineModule
from torch import nn

Copies = Iterable[tuple[nn.Parameter, ...]]  # each tied weight of a stage: all of its copies there, in layer order


def join_copies(copies: Copies, gradient: str) -> None:
    """Add up the gradients of a stage's copies in the first copy, in layer order. The stages' sums follow.

    Args:
        gradient: the attribute that holds it: ``grad``, or what BF16_Optimizer accumulates in.
    """
    for first, *others in copies:
        for other in others:
            added, total = getattr(other, gradient), getattr(first, gradient)
            if added is not None:
                setattr(first, gradient, added.clone()) if total is None else total.add_(added)


def share_copies(copies: Copies, gradient: str) -> None:
    """Copy the gradient of the first copy, now the sum over all stages, to the other copies of this stage."""
    for first, *others in copies:
        for other in others:
            total, old = getattr(first, gradient), getattr(other, gradient)
            if total is not None:
                setattr(other, gradient, total.clone()) if old is None or old.is_sparse else old.copy_(total)


def tied_ranks(stages_of: Mapping[str, Sequence[int]], grid: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each key that several stages share, with their ranks, once for each replica and tensor-parallel slice.

    Args:
        stages_of: by key, the stages that hold a use of it.
        grid: DeepSpeed's, which lists the ranks by stage for each replica and slice.
    """
    for key, stages in stages_of.items():
        if len(stages) > 1:
            for pipeline in grid.pipe_groups:
                yield key, tuple(pipeline[stage] for stage in stages)


def tied_comms(
    module: PipelineModule,
    tied: Iterable[tuple[str, tuple[int, ...]]],
    make_group: Callable[[tuple[int, ...]], Any],
) -> dict[str, dict[str, Any]]:
    """Make DeepSpeed's ``tied_comms``: per key that this rank shares with other stages, the group and the module.

    Collective: every rank asks for the groups of every replica, in one order.

    Args:
        tied: of :func:`tied_ranks`.
        make_group: makes a process group of ranks; collective.
    """
    comms = {}
    for key, ranks in tied:
        group = make_group(ranks)
        if module.global_rank in ranks:
            comms[key] = {
                "ranks": list(ranks),
                "group": group,
                "weight_attr": module.tied_weight_attrs[key],
                "module": module.tied_modules[key],
            }
    return comms
