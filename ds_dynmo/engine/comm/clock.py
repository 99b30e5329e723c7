"""Compare the clocks of ranks with the first rank's, along a tree."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from ds_dynmo.engine.comm.host_links import HostLinks
from ds_dynmo.engine.comm.tree import Tree

_QUESTIONS = 10


def clock_offset(links: HostLinks, tree: Tree, now: Callable[[], float], timeout: timedelta) -> tuple[float, float]:
    """Measure by how many seconds this rank's clock is ahead of the first rank's, and the error bound. Collective.

    Each rank asks its parent for the time several times. The fastest answer counts, and half of its round trip is the
    error bound (Cristian, "Probabilistic clock synchronization", 1989). Offsets and bounds add up along the tree.

    Args:
        now: this rank's clock, in seconds.
        timeout: that a message waits for the other rank.
    """
    question, answer = torch.zeros(2, 1, dtype=torch.float64, device="cpu")
    of_parent = torch.zeros(2, dtype=torch.float64, device="cpu")
    offset_seconds = error_seconds = 0.0
    if tree.parent is not None:
        trips: list[tuple[float, float]] = []
        for _ in range(_QUESTIONS):
            asked = now()
            links.send(question, tree.parent).wait(timeout)
            links.receive(answer, tree.parent).wait(timeout)
            half = (now() - asked) / 2
            trips.append((half, asked + half - answer.item()))
        links.receive(of_parent, tree.parent).wait(timeout)
        error_seconds, offset_seconds = min(trips)
        offset_seconds, error_seconds = offset_seconds + of_parent[0].item(), error_seconds + of_parent[1].item()
    own = torch.tensor([offset_seconds, error_seconds], dtype=torch.float64, device="cpu")
    for child in reversed(tree.children):
        for _ in range(_QUESTIONS):
            links.receive(question, child).wait(timeout)
            answer[0] = now()
            links.send(answer, child).wait(timeout)
        links.send(own, child).wait(timeout)
    return offset_seconds, error_seconds
