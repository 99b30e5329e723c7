"""Read and draw what scripts/routers.py wrote: loads of experts and replicas, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds_dynmo.config import load_json
from ds_dynmo.errors import ConfigError

Loads = np.ndarray[Any, np.dtype[np.float64]]  # [steps, layers]

REPLICAS = "4"  # those that are drawn
EVERY = 20  # steps that a point of the picture is the mean of
COLORS = {"first": "#b0b7c3", "middle": "#e8a838", "last": "#2a6fb0"}  # of a third of the blocks each
NAMES = {"none": "no balancing", "aux_loss": "auxiliary loss", "sbase": "S-BASE", "bias": "bias"}


def read_loads(file: Path) -> dict[str, Any]:
    """Read what scripts/routers.py wrote.

    Raises:
        ConfigError: naming the file and what it lacks.
    """
    found = load_json(file)
    if lacks := [key for key in ("routing", "steps", "losses", "choices", "busiest") if key not in found]:
        raise ConfigError(f"{file}: is not of scripts/routers.py --json: it lacks {', '.join(lacks)}")
    return found


def loads_over_mean(found: dict[str, Any]) -> dict[str, Loads]:
    """Give the choices that go to the busiest expert, and to the busiest of some replicas, over the mean."""
    choices = np.array(found["choices"], dtype=float)
    every = choices.sum(axis=2)
    of_replicas = {
        f"of {count} replicas": np.array(busiest) * int(count) / every for count, busiest in found["busiest"].items()
    }
    return {"expert": choices.max(axis=2) / choices.mean(axis=2), **of_replicas}


def figure(every: Sequence[dict[str, Any]]) -> Any:
    """Draw the busiest replica's load of each block, a panel for each routing on the same scales."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(2.4 * len(every) + 1.4, 2.8), layout="constrained")
    panels = drawn.subplots(1, len(every), sharex=True, sharey=True, squeeze=False)[0]
    for axes, found in zip(panels, every):
        loads = loads_over_mean(found)[f"of {REPLICAS} replicas"]
        points = len(loads) // EVERY
        means = loads[: points * EVERY].reshape(points, EVERY, -1).mean(axis=1)
        steps = EVERY * np.arange(points) + EVERY / 2
        for (name, color), blocks in zip(COLORS.items(), np.array_split(means, len(COLORS), axis=1)):
            axes.plot(steps, blocks, color=color, linewidth=1)[0].set_label(name)
        axes.set_title(NAMES[found["routing"]], fontsize=10)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    panels[0].set_xlim(left=0)
    panels[0].set_ylim(bottom=1.0)
    panels[0].set_ylabel(f"busiest of {REPLICAS} replicas\nover their mean")
    panels[-1].legend(title="third of the blocks", loc="upper right", frameon=False, fontsize=8, title_fontsize=8)
    return drawn
