"""Recordings like those of scripts/train.py --record, with known loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_recording(
    path: Path,
    shares: Sequence[Sequence[float]],
    *,
    changed: Sequence[int] = (),
    trainable: Mapping[int, Sequence[int]] | None = None,
    **header: Any,
) -> Path:
    """Write a recording in which layers take their share of 1000 + 2000 microseconds, in each iteration.

    Args:
        changed: iterations before which the model announced a change.
        trainable: by iteration, the parameters that train from there on.
    """
    layers = len(shares[0])
    begun = {"kind": "recording", "case": "a case", "interval": 25, "layers": layers, "stages": 2, **header}
    first = {name: [50] * layers for name in ("trainable_parameters", "parameters", "static_bytes")}
    lines: list[dict[str, Any]] = [begun]
    for number, now in enumerate(shares):
        seconds = {f"{name}_us": [each * one for one in now] for name, each in (("forward", 1000), ("backward", 2000))}
        known = first if number == 0 else {}
        known |= {"trainable_parameters": list(trainable[number])} if trainable and number in trainable else {}
        said = {"changed": "less to do"} if number in changed else {}
        lines.append({"step": number + 1, **said, **seconds, **known})
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path
