"""Add up what rounds did, and print it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.endurance.rounds import Result


@dataclass
class Tally:
    """Numbers of all rounds so far."""

    rounds: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add a round."""
        self.rounds += 1
        self.seconds += result.seconds
        self.counts.update(result.counts)
        self.failed += [result.seed] if result.failure else []

    def table(self) -> str:
        """Return it as lines of a name and a number, and which rounds failed."""
        rows = dict(sorted(self.counts.items()))
        lines = [f"{name:<32}{number:>8,}" for name, number in rows.items()]
        seeds = [f"failed: seeds {', '.join(map(str, self.failed))}"] if self.failed else []
        passed = f"{self.rounds - len(self.failed)} of {self.rounds} rounds passed"
        return "\n".join([*lines, f"{'hours':<32}{self.seconds / 3600:>8.2f}", *seeds, passed])
