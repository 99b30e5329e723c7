"""Models of other libraries move as their users cut them into layers."""

from __future__ import annotations

import pytest

from tests.distributed import foreign_models_workloads as work
from tests.distributed.harness import run_each
from tests.distributed.test_bitwise import whole


@pytest.mark.parametrize("which", ["alexnet", "lora"])
def test_a_move_at_every_step_changes_nothing(which: str) -> None:
    if which == "lora":
        pytest.importorskip("peft")
    still, moved = run_each(2, work.train, (which, False), (which, True))
    assert moved[0]["moved"] > 0 and still[0]["moved"] == 0
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert whole(moved) == whole(still)
