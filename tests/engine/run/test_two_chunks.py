"""Two chunks of layers per stage, in a V and in a loop: training equals that of a chain, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.configs import Case
from tests.support.harness import run_each
from tests.support.training import train, whole

pytestmark = pytest.mark.ranks


def check_same(case: Case, kind: str) -> None:
    """Compare with a chain under 1F1B."""
    ours = replace(case, dynmo={"interval": 0, "schedule": {"kind": kind}})
    still, moved = run_each(case.ranks, train, (case, [], 4, 1), (ours, [], 4, 1))
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert [r["evaluations"] for r in moved] == [r["evaluations"] for r in still]
    assert whole(moved) == whole(still)


@pytest.mark.parametrize("kind", ["v", "loop"])
def test_training_equals_a_chain(kind: str) -> None:
    check_same(Case(stages=2, micro_batches=5), kind)
