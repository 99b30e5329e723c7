"""Tested versions of other packages; docs/limits.md has them too."""

from __future__ import annotations

import sys

from packaging.version import Version

# Oldest first. pyproject.toml has the oldest as lower bounds.
TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.13.0", "2.15.0"),
    "deepspeed": ("0.19.8",),
    "transformers": ("5.23.0", "5.24.0"),
    "peft": ("0.21.0", "0.21.2"),
}


def newer_than_tested() -> str | None:
    """Return a line about imported packages that are newer than any tested version; None if there are none."""
    newer = []
    for name, tested in TESTED.items():
        if name in sys.modules:
            version = str(sys.modules[name].__version__)
            if Version(version).release > Version(tested[-1]).release:
                newer.append(f"{name} {version} (tested: {', '.join(tested)})")
    return f"newer than what ds_dynmo was tested with: {'; '.join(newer)}" if newer else None
