"""Checkpoints of a trainer: ``checkpoint-N`` in its folder, each with transformers' ``trainer_state.json``."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from ds_dynmo.errors import CheckpointError

__all__ = ["Saves"]

STATE_FILE = "trainer_state.json"
STATE = "trainer_state"
NAME = re.compile(r"^checkpoint-(\d+)$")


class Saves:
    """The checkpoints of a run.

    Args:
        folder: the run's.
        limit: checkpoints that are kept, beside the best one; None: all.
        has_adapters: frozen weights are left out, as those of the base are.
    """

    def __init__(self, engine: Any, folder: Path, limit: int | None, *, has_adapters: bool) -> None:
        self._engine, self._folder, self._limit, self._has_adapters = engine, folder, limit, has_adapters
        self._saved: set[int | None] = set()  # steps after which this run has saved

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` batches."""
        return self._folder / f"checkpoint-{step}"

    def save(self, state: TrainerState) -> None:
        """Write the checkpoint of this batch, and remove those beyond the limit. Collective."""
        path = self.path(state.global_step)
        self._saved.add(state.global_step)  # what ranks see of the folder may differ
        if state.best_global_step in self._saved:
            state.best_model_checkpoint = str(self.path(state.best_global_step))
        self.write(self._folder, path.name, {STATE: asdict(state)})
        self._engine.wait_for_save()
        if self._engine.global_rank == 0:
            state.save_to_json(str(path / STATE_FILE))
            self._remove_old(state)

    def write(self, folder: Path, tag: str, client_state: dict[str, Any]) -> None:
        """Write a checkpoint. Collective."""
        self._engine.save_checkpoint(
            str(folder), tag=tag, client_state=client_state, exclude_frozen_parameters=self._has_adapters
        )

    def resume(self, given: Any) -> TrainerState:
        """Load a checkpoint, and return the state that was saved in it. Collective.

        Args:
            given: its folder; True: the last one of the run.

        Raises:
            ValueError: there is none.
            CheckpointError: it cannot be loaded, or no trainer has written it.
        """
        path = given if given is not True else get_last_checkpoint(str(self._folder))
        if path is None:
            raise ValueError(f"No valid checkpoint found in output directory ({self._folder})")
        found = self.load(Path(path))
        if STATE not in found:
            raise CheckpointError(f"{path}: was not written by a PipelineTrainer: it has no {STATE}")
        return TrainerState(**found[STATE])

    def load(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint, and return what was saved with it. Collective."""
        _, found = self._engine.load_checkpoint(str(path.parent), tag=path.name)
        return found or {}

    def end(self, state: TrainerState) -> None:
        """Keep the best checkpoint alone, where one is to be kept: the last one is the model's now."""
        if self._limit == 1 and state.best_model_checkpoint is not None and self._engine.global_rank == 0:
            best = Path(state.best_model_checkpoint).name
            for _, path in self._there():
                if path.name != best:
                    shutil.rmtree(path, ignore_errors=True)

    def _there(self) -> list[tuple[int, Path]]:
        return sorted((int(found[1]), path) for path in self._folder.iterdir() if (found := NAME.match(path.name)))

    def _remove_old(self, state: TrainerState) -> None:
        if not self._limit or self._limit < 0:
            return
        there = self._there()
        kept = {state.global_step}
        if state.best_model_checkpoint is not None and (best := NAME.match(Path(state.best_model_checkpoint).name)):
            kept.add(int(best[1]))
        removable = [path for step, path in there if step not in kept]
        for path in removable[: max(len(there) - max(self._limit, len(kept)), 0)]:
            shutil.rmtree(path, ignore_errors=True)
