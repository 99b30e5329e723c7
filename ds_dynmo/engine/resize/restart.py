"""Stop a job to launch it anew at a smaller size (the paper's alternative to releasing ranks of a running job)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        partition: to begin at. The file has the owners of its chunks too, unless it is a chain.
        step: the last that was trained; the script did not get to what it does after it.
    """

    num_stages: int
    ranks: int
    tag: str
    partition: tuple[int, ...]
    step: int


def save_for_restart(stage: StageContext, save: Callable[[str, str], Any], placement: Placement) -> Launch:
    """Save a checkpoint, and beside it what to launch to go on at ``placement``. Collective.

    Args:
        save: writes a checkpoint of this tag into a folder.

    Raises:
        CheckpointError: see ``engine.save_checkpoint``.
        MigrationError: harmless; rank 0 could not write what to launch.
    """
    here, steps, num_stages = stage.comm.here, stage.counters.steps, placement.num_stages
    folder, ranks = str(stage.config.repack.checkpoint), here.world_size * num_stages // here.num_stages
    launch = Launch(num_stages, ranks, f"global_step{steps}", placement.boundaries, steps)
    save(folder, launch.tag)

    def write() -> None:
        if here.rank == 0:
            record = {**asdict(launch), **placement.as_record("partition")}
            write_text(Path(folder) / FILE, json.dumps(record, indent=2) + "\n")

    stage.comm.everywhere("writing how to go on", write)
    return launch
