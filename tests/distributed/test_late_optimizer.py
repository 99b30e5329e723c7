"""An optimizer that the engine is given after ``initialize`` follows the layers; one that trains less is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import late_optimizer_workloads as work
from tests.distributed.harness import run, run_each
from tests.distributed.test_bitwise import whole
from tests.distributed.workloads import Case


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 immediate"])
def test_it_follows_the_layers(precision: str, again: bool) -> None:
    case = Case(stages=2, blocks=3, precision=precision)
    still, moved = run_each(2, work.train, (case, [], again), (case, work.MOVES, again))
    assert moved[0]["moved"] > 0 and still[0]["moved"] == 0
    assert [r["losses"] for r in moved] == [r["losses"] for r in still]
    assert whole(moved) == whole(still)


def test_unmoved_it_is_stock() -> None:
    case = Case(stages=2, blocks=3, clip=0.0)
    (stock, ours) = run(2, work.train_stock, case), run(2, work.train, case, [])
    assert [r["losses"] for r in ours] == stock


def test_parameters_collected_before_a_move_are_refused() -> None:
    for message in run(2, work.moved_before_it_came, Case(stages=2, blocks=3)):
        assert message.startswith("the optimizer holds parameters that are in no layer of their stage")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("left out", "layer 5: weight requires a gradient and is in no parameter group of the optimizer"),
        ("foreign", "the optimizer trains a parameter of shape [3] that is in no layer of this stage"),
        ("replaced", "engine.optimizer is another SGD than the AdamW that the engine was configured with"),
    ],
)
def test_a_move_is_refused_where_the_optimizer_trains_something_else(how: str, expected: str) -> None:
    for found in run(2, work.refused, Case(stages=2, blocks=3), how):
        assert expected in found["message"] and found["message"].startswith("ranks [1] could not get")
        assert found["harmless"] and found["partition"] == [0, 3, 6]
        assert len(found["losses"]) == 3


def test_its_state_is_saved_and_loaded_at_another_number_of_stages(tmp_path: Path) -> None:
    went_on = run(2, work.save_and_load, 2, str(tmp_path))
    loaded = run(3, work.save_and_load, 3, str(tmp_path))
    assert loaded[0] == went_on[0]
