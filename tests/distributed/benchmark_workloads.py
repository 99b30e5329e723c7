"""Runs for test_benchmark.py; every function runs on a rank."""

from __future__ import annotations

from typing import Any

from scripts.benchmark import parse
from scripts.benchmarks.arms import engines_end_here
from scripts.benchmarks.emulated import emulated_rows
from scripts.simulation.loads import CASES


def emulated(case: str) -> list[dict[str, Any]]:
    """A small run of the benchmark."""
    sizes = ["--layers", "8", "--micro-batches", "2", "--forward-ms", "1", "--rounds", "1", "--batches", "1"]
    with engines_end_here():
        return emulated_rows(CASES[case], parse(sizes))
