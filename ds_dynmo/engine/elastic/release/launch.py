"""How to launch a job anew that stopped for a restart at another size."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "launch.json"


@dataclass(frozen=True)
class Launch:
    """What to launch.

    Attributes:
        num_stages, ranks: of the new job.
        tag: of the checkpoint to resume from.
        partition: to begin at.
    """

    num_stages: int
    ranks: int
    tag: str
    partition: tuple[int, ...]


def write_launch(folder: str, launch: Launch) -> None:
    """Write it beside the checkpoint, in one rename."""
    new = Path(folder) / f"{FILE}.new"
    new.write_text(json.dumps(asdict(launch), indent=2) + "\n")
    os.replace(new, Path(folder) / FILE)
