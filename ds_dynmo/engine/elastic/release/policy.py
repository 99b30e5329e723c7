"""The interface of a release policy."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        rank: at the launch.
        host: the machine's, or the pod's, name.
        device: of the accelerator, as DeepSpeed names it: "cuda:1", "cpu".
    """

    rank: int
    host: str
    device: str

    @classmethod
    def here(cls, rank: int, device: str) -> Place:
        """Of this process. A pod's host name is its own name; Slurm names the node in the environment."""
        return cls(rank, os.environ.get("SLURMD_NODENAME") or socket.gethostname(), device)

    def as_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class ReleaseRefused(RuntimeError):
    """Whoever hands out accelerators did not take them back. The ranks are released all the same."""


class ReleasePolicy(Protocol):
    """Tells whoever hands out accelerators which ones are free.

    The ranks have left the job by then: training goes on without them whatever comes of it. Calls are made on rank 0,
    in a thread of their own, one at a time, and again after :class:`ReleaseRefused`, so they have to be idempotent.
    """

    @property
    def silent(self) -> bool:
        """Is there nobody to tell, so that ``release`` does nothing?"""
        ...

    @property
    def restarts(self) -> bool:
        """Does the whole job stop, to be launched anew at the smaller size?"""
        ...

    @property
    def parks(self) -> bool:
        """Do released ranks wait to be taken back?"""
        ...

    def release(self, gone: Sequence[Place], staying: Sequence[Place]) -> str:
        """Give back the accelerators of ``gone``, all that are free by now; ``staying`` are at work.

        Returns:
            What was done, for the log; empty if there was nothing to do.

        Raises:
            ReleaseRefused: not done; says why.
        """
        ...
