"""The interface of a release policy."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

POD = "POD_NAME"  # set by the pod's specification, from the downward API


@dataclass(frozen=True)
class RankLocation:
    """The location of a rank.

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
        """Locate this process. Slurm sets the node in the environment, and a pod's specification the pod."""
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return cls(rank, host, device, os.environ.get(POD) or None)

    def as_record(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class ReleaseRefused(RuntimeError):
    """The resource manager did not take accelerators back. The ranks are released anyway."""


class ReleasePolicy(Protocol):
    """Reports free accelerators to the resource manager.

    By then the ranks have left the job, and training continues without them in any case. Calls are made on rank 0, in a
    separate thread, one at a time. Each call includes the ranks of earlier ones, so calls have to be idempotent.
    """

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> str:
        """Hand back the accelerators of ``released``, all that are free by now; ``staying`` are at work.

        Returns:
            A description of the action for the log; "" if there was nothing to do.

        Raises:
            ReleaseRefused: with the reason.
        """
        ...
