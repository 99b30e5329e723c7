"""The files of a universal checkpoint. Each is checked when it is read."""

from __future__ import annotations

import glob
import os
import re
from typing import Any

import torch

from ds_dynmo.engine.deepspeed.loss_scale import saved_loss_scale
from ds_dynmo.engine.deepspeed.universal import (
    MOMENTS,
    OPTIMIZER,
    PARAMETERS,
    STEP,
    SavedGroup,
    WholeParameter,
    saved_groups,
)
from ds_dynmo.engine.save.importers.universal_slices import Shape, cut_slice
from ds_dynmo.engine.save.safe_load import safe_load
from ds_dynmo.errors import CheckpointError

_STAGE_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt$")


def is_universal(folder: str) -> bool:
    """Return whether ``ds_to_universal`` wrote a folder."""
    return os.path.isfile(os.path.join(folder, OPTIMIZER))


class UniversalFolder:
    """The files of a universal checkpoint."""

    def __init__(self, folder: str) -> None:
        if not os.path.isdir(folder):
            raise CheckpointError(f"{folder}: there is no such folder")
        if not is_universal(folder):
            raise CheckpointError(
                f"{os.path.join(folder, OPTIMIZER)}: there is no such file, so this is no universal "
                "checkpoint, which checkpoint.load_universal = true expects; ds_to_universal makes one"
            )
        self._folder = folder
        self._parameters = os.path.join(folder, PARAMETERS)
        pattern = os.path.join(glob.escape(folder), "mp_rank_*_model_states.pt")
        numbered = {int(found.group(1)): name for name in glob.glob(pattern) if (found := _STAGE_FILE.search(name))}
        self.stage_files = [path for _, path in sorted(numbered.items())]
        if not self.stage_files:
            raise CheckpointError(f"{pattern}: there is no such file")

    def path(self, parameter: str = "", what: str = "") -> str:
        return os.path.join(self._parameters, parameter, f"{what}.pt" if what else "")

    def parameters(self) -> list[str]:
        return sorted(name for name in os.listdir(self._parameters) if os.path.isdir(self.path(name)))

    def cut(self, parameter: str, what: str, shapes: list[Shape], tp_rank: int) -> torch.Tensor:
        """Cut one slice's part from a weight or a moment; it is left in the file where that is possible."""
        path = self.path(parameter, what)
        whole = WholeParameter.of(safe_load(path, mapped=True))
        if whole is None:
            raise CheckpointError(f"{path}: holds no whole parameter as ds_to_universal writes it for a pipeline")
        return cut_slice(whole, shapes, tp_rank, path)

    def has_moments(self, parameter: str) -> bool:
        return any(os.path.exists(self.path(parameter, what)) for what in MOMENTS)

    def step(self, parameter: str) -> float:
        path = self.path(parameter, STEP)
        saved = safe_load(path)
        try:
            return float(saved)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: holds {saved!r}, expected a count of steps") from error

    def groups(self, stage_file: str) -> list[SavedGroup]:
        """Read the parameter groups that a saved stage had."""
        optimizer = self._optimizer() if stage_file == self.stage_files[0] else None
        try:
            return saved_groups(safe_load(stage_file, mapped=True), optimizer)
        except ValueError as error:
            raise CheckpointError(f"{stage_file}: {error}") from error

    def loss_scale(self) -> dict[str, Any]:
        """Read the state of a dynamic loss scale; empty: there was none."""
        return saved_loss_scale(self._optimizer())

    def _optimizer(self) -> dict[str, Any]:
        path = os.path.join(self._folder, OPTIMIZER)
        content = safe_load(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected the state of an optimizer")
        return content
