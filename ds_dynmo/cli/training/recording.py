"""Record what each layer costs in each batch: ``--record``. `scripts/simulation/recorded.py` reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_dynmo.cli.hardware import hardware
from ds_dynmo.cli.training.options import TrainingRun
from ds_dynmo.engine.decide.report_files import WarnsOnce
from ds_dynmo.files import append_line
from ds_dynmo.models.layer_numbers import whole_layers
from ds_dynmo.plan import RebalanceReport, reports_after


class Recording:
    """Writes a line for each batch that was profiled, on rank 0.

    Args:
        path: None: nothing is recorded here.
    """

    def __init__(self, run: TrainingRun, engine: Any, path: Path | None) -> None:
        self._engine, self._path = engine, path
        self._known: dict[str, Any] = {}
        self._last_report: RebalanceReport | None = None
        if path is None:
            return
        with suppress(OSError):  # the header will warn
            path.write_text("")
        self._write = WarnsOnce(
            str(path),
            lambda record: append_line(path, json.dumps(record, separators=(",", ":"))),
            lambda message: print(f"ds-dynmo-train: {message}", file=sys.stderr, flush=True),
            OSError,
        )
        self._write(
            {
                "kind": "recording",
                "case": run.name,
                "interval": run.interval,
                "layers": len(run.layers),
                "whole_layers": whole_layers(run.layers, run.model.layers_per_block),
                "stages": engine.num_stages,
                "partition": engine.partition,
                "micro_batches": engine.micro_batches,
                "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
                "steps": run.steps,
                **hardware(),
                "model": run.model.model_dump(mode="json"),
            }
        )

    def batch(self) -> None:
        """Record the last batch, unless its layers were not profiled."""
        profile = self._engine.profile
        if self._path is None or profile is None or profile.step != self._engine.global_steps:
            return
        layers = profile.layers
        now = {
            "forward_us": rounded([1e6 * layer.forward_seconds for layer in layers]),
            "backward_us": rounded([1e6 * layer.backward_seconds for layer in layers]),
            "load_signals": rounded([layer.load_signal for layer in layers]),
            "parameters": [layer.parameters for layer in layers],
            "trainable_parameters": [layer.trainable_parameters for layer in layers],
            "static_bytes": [layer.static_bytes for layer in layers],
        }
        changed = {key: values for key, values in now.items() if values != self._known.get(key)}
        self._known = now
        self._write({"step": profile.step, **self._change(), **changed})

    def _change(self) -> dict[str, str]:
        """Say what the model announced before this batch."""
        reports = reports_after(self._last_report, self._engine.reports)
        if reports:
            self._last_report = reports[-1]
        reasons = [report.reason for report in reports if report.model_changed]
        return {"changed": reasons[-1]} if reasons else {}


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """Round to three digits.

    >>> rounded([1234.5, 0.12345, 87.0, None])
    [1230, 0.123, 87, None]
    """
    short = [None if value is None else float(f"{value:.3g}") for value in values]
    return [int(value) if value is not None and value.is_integer() else value for value in short]
