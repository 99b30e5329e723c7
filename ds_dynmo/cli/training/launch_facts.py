"""What every rank of a run has to be given alike, though each reads its own files."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ds_dynmo.cli.training.data import describe
from ds_dynmo.cli.training.options import TrainingRun

LONGEST = 60  # characters of a value in a message
OWN_KEYS = ("dynmo", "training", "model", "data", "steps_per_print")  # compared elsewhere, or each rank's own


def facts_of(run: TrainingRun) -> dict[str, str]:
    """Describe a run by name, in short texts: its data by their content, whatever they are called on this host."""
    model = run.model.model_dump(mode="json", exclude={"tokens", "verified"})
    if isinstance(model["huggingface"], str):
        del model["huggingface"]  # may be elsewhere on another host
    return {
        "the data": describe(run.text),
        "steps": f"{run.first_step} to {run.stop} of {run.steps}",
        "--stages": str(run.stages),
        "--save": "no" if run.save is None else f"yes, every {run.save_interval or run.stop} steps",
        **{f"model.{key}": _short(value) for key, value in model.items()},
        **{f'"{key}"': _short(value) for key, value in run.settings.items() if key not in OWN_KEYS},
    }


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
