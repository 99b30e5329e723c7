"""What layers share with others is the destination's own after a move, as if they had been built there: no copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import sharing_workloads as work
from tests.distributed.harness import run, run_each
from tests.distributed.test_bitwise import whole


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 zero1"])
@pytest.mark.parametrize("what", work.MODELS)
def test_a_move_at_every_step_changes_nothing(what: str, precision: str) -> None:
    still, moved = run_each(2, work.train, (what, precision, []), (what, precision, work.MOVES))
    assert moved[0]["moved"] > 0 and still[0]["moved"] == 0
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert whole(moved) == whole(still)
    if what.startswith("shared_part"):
        assert [r["rotaries"] for r in moved] == [1, 1]


@pytest.mark.parametrize("what", work.MODELS)
def test_saved_and_loaded_at_another_number_of_stages(what: str, tmp_path: Path) -> None:
    went_on = run(2, work.save_and_load, what, 2, str(tmp_path))
    loaded = run(3, work.save_and_load, what, 3, str(tmp_path))
    assert loaded[0] == went_on[0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("counter", "counter, a tests.distributed.sharing_workloads.Counter, is shared with layer 1"),
        ("weight", "peeks[0] is up.weight of layer 1"),
        ("view", "peeks[0]['of'] is up.weight of layer 1"),
        ("meta", "peeks[0] is on the meta device"),
        ("left behind", "layer 1 stays and its peeks[0] is up.weight of layer 2"),
    ],
)
def test_what_would_be_a_copy_is_refused_by_name(how: str, expected: str) -> None:
    for found in run(2, work.move_or_refuse, how, ()):
        assert expected in found["message"] and found["message"].startswith("ranks [0] could not get")
        assert found["harmless"] and found["partition"] == [0, 4, 7]
        assert len(found["losses"]) == 2


@pytest.mark.parametrize(("freed_ranks", "times", "copies"), [("release", 1, 1), ("replicas", 2, 2)])
def test_what_cannot_leave_is_refused_before_a_world_is_given_up(freed_ranks: str, times: int, copies: int) -> None:
    first, *_ = run(2, work.repack_or_refuse, freed_ranks)
    assert first["stages"] == 2 and first["copies"] == copies and len(first["refusals"]) == times
    for harmless, message in first["refusals"]:
        assert harmless and "peeks[0] is on the meta device" in message


@pytest.mark.parametrize(("how", "block"), [("counter", ("counter",)), ("declared", ())])
def test_attributes_that_belong_to_the_rank(how: str, block: tuple[str, ...]) -> None:
    for found in run(2, work.move_or_refuse, how, block):
        assert found["message"] == "moved" and found["partition"] == [0, 2, 7]
        assert found["counters"] and all(found["counters"])


def test_a_later_use_of_a_tied_layer_shares_what_the_first_does() -> None:
    [[same], [changed]] = run_each(1, work.train_on_one_stage, (False,), (True,))
    assert same[0] == changed[0] and same[1] != changed[1]
