"""Breakages of random lines that change nothing that anybody sees, by their names, and why."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
