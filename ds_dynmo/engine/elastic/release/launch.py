"""How to launch a job anew that stopped for a restart at another size."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "launch.json"


@dataclass(frozen=True)
class Launch:
    """What to launch.

    Attributes:
        num_stages, ranks: of the new job.
        tag: of the checkpoint to resume from.
        partition: to begin at.
        step: after which the job stopped, in the middle of what its script does for each.
        states: what was given to ``engine.share_state``, by name, as it was then; None where JSON cannot hold it.
    """

    num_stages: int
    ranks: int
    tag: str
    partition: tuple[int, ...]
    step: int
    states: dict[str, Any]


def write_launch(folder: str, launch: Launch) -> None:
    """Write it beside the checkpoint, in one rename."""
    new = Path(folder) / f"{FILE}.new"
    states = {name: state if _is_plain(state) else None for name, state in launch.states.items()}
    new.write_text(json.dumps({**vars(launch), "states": states}, indent=2) + "\n")
    os.replace(new, Path(folder) / FILE)


def _is_plain(state: Any) -> bool:
    try:
        json.dumps(state)
    except (TypeError, ValueError):
        return False
    return True
