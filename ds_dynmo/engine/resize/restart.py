"""Stop a job to launch it anew at a smaller size (the paper's alternative to releasing ranks of a running job)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_dynmo.engine.resize.job_state import Stateful
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.files import write_text
from ds_dynmo.placement import Placement

FILE = "launch.json"


@dataclass(frozen=True)
class Launch:
    """A job to launch anew.

    Attributes:
        num_stages, ranks: of the new job.
        tag: of the checkpoint to resume from.
        partition: to begin at.
        step: the last that was trained; the script did not get to what it does after it.
        states: of ``engine.share_state``, by name, as they were then; None where JSON cannot hold one.
    """

    num_stages: int
    ranks: int
    tag: str
    partition: tuple[int, ...]
    step: int
    states: dict[str, Any]


def save_for_restart(
    stage: StageContext, save: Callable[[str, str], Any], placement: Placement, states: Mapping[str, Stateful]
) -> Launch:
    """Save a checkpoint, and beside it what to launch to go on at ``placement``. Collective.

    Args:
        save: writes a checkpoint of this tag into a folder.
        states: the shared states by name.

    Raises:
        CheckpointError: see ``engine.save_checkpoint``.
        MigrationError: harmless; rank 0 could not write what to launch.
    """
    here, steps, num_stages = stage.comm.here, stage.counters.steps, placement.num_stages
    folder = str(stage.config.repack.checkpoint)
    launch = Launch(
        num_stages,
        here.world_size * num_stages // here.num_stages,
        f"global_step{steps}",
        placement.boundaries,
        steps,
        {name: holder.state_dict() for name, holder in states.items()},
    )
    save(folder, launch.tag)

    def write() -> None:
        if here.rank == 0:
            write_launch(folder, launch)

    stage.comm.everywhere("writing how to go on", write)
    return launch


def write_launch(folder: str, launch: Launch) -> None:
    """Write ``launch`` beside the checkpoint, in one rename."""
    states = {name: state if _is_json(state) else None for name, state in launch.states.items()}
    write_text(Path(folder) / FILE, json.dumps({**vars(launch), "states": states}, indent=2) + "\n")


def _is_json(state: Any) -> bool:
    try:
        json.dumps(state)
    except (TypeError, ValueError):
        return False
    return True
