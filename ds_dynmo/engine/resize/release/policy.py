"""The interface of a release policy."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

POD = "POD_NAME"  # what the pod's specification has to set from the downward API


@dataclass(frozen=True)
class RankLocation:
    """Where a rank runs.

    Attributes:
        rank: at the launch.
        host: the machine's name.
        device: of the accelerator, as DeepSpeed names it: "cuda:1", "cpu".
        pod: the name of the Kubernetes pod, where the environment has it.
    """

    rank: int
    host: str
    device: str
    pod: str | None = None

    @classmethod
    def here(cls, rank: int, device: str) -> RankLocation:
        """Locate this process. Slurm names the node in the environment, the pod's own specification the pod."""
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return cls(rank, host, device, os.environ.get(POD) or None)

    def as_record(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class ReleaseRefused(RuntimeError):
    """The resource manager did not take accelerators back. The ranks are released all the same."""


class ReleasePolicy(Protocol):
    """Tells the resource manager, which hands out accelerators, which ones are free.

    The ranks have left the job by then, and training goes on without them in any case. Calls are made on rank 0, in a
    thread of their own, one at a time. Each names the ranks of earlier ones too, so they have to be idempotent.
    """

    @property
    def silent(self) -> bool:
        """Does ``release`` do nothing, as there is no resource manager to tell?"""
        ...

    @property
    def restarts(self) -> bool:
        """Does the whole job stop, to be launched anew at the smaller size?"""
        ...

    @property
    def parks(self) -> bool:
        """Do released ranks wait to be taken back?"""
        ...

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> str:
        """Hand back the accelerators of ``released``, all that are free by now; ``staying`` are at work.

        Returns:
            What was done, for the log; empty if there was nothing to do.

        Raises:
            ReleaseRefused: not done; says why.
        """
        ...
