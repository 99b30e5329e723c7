"""Which tests are tried for a breakage, and in which order."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.mutations.equivalent import CAUGHT_BY
from tests.mutations.mutation import Mutation
from tests.mutations.random_lines import Breakage
from tests.mutations.reach import Reach


def chosen_tests(
    breakage: Mutation | Breakage, file: str, first: int, last: int, known: Reach, budget: float
) -> list[str]:
    """Return the quick tests to try: those that are named, those of the same folder, others, each by their seconds.

    Args:
        budget: recorded seconds of the tests, at most.
    """
    reached = known.of(file, first, last)
    package = str(Path(file).parent).replace("ds_dynmo", "tests", 1)
    names = breakage.names if isinstance(breakage, Mutation) else shlex.split(CAUGHT_BY.get(breakage.name, ""))
    named = [test for test in known.tests if any(_is_of(test, name) for name in names)]
    near = [test for test in reached if test.startswith(f"{package}/")]
    ordered = dict.fromkeys([*named, *near, *reached])
    chosen: list[str] = []
    seconds = 0.0
    for test in ordered:
        seconds += known.seconds.get(test, 0.0)
        if chosen and seconds > budget and test not in named:
            break
        chosen.append(test)
    return chosen


def _is_of(test: str, name: str) -> bool:
    return test == name or test.startswith((f"{name}::", f"{name}["))
