"""What one rank has is broadcast: no rank holds as many copies of it as there are ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import shared_state_workloads
from tests.distributed.harness import run
from tests.distributed.workloads import Case


@pytest.mark.parametrize("repack", [{"release": "park"}, {"release": "park", "freed_ranks": "replicas"}])
def test_shared_state_is_not_gathered_from_all_ranks(repack: dict[str, Any]) -> None:
    case = Case(stages=4, dynmo={"interval": 0, "timeout_seconds": 60.0, "repack": repack})
    for gathered, is_first in run(4, shared_state_workloads.repack, case, [2, 4]):
        assert gathered < shared_state_workloads.STATE_BYTES // 10
        assert is_first


def test_a_state_that_some_ranks_share_only_is_refused_before_anything_moves() -> None:
    case = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 5.0})
    for message, harmless, loss in run(3, shared_state_workloads.shared_on_rank_0_alone, case, seconds=60.0):
        assert "engine.share_state was called with ['large'] on rank 0, with [] on rank 1" in message
        assert harmless and loss > 0
