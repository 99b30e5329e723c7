"""A schedule checks itself, and names what is wrong."""

import os
import pickle
import subprocess
import sys
from typing import get_args

import pytest

from ds_dynmo.errors import ScheduleError
from ds_dynmo.placement import Shape
from ds_dynmo.schedules import Schedule, interleaved_1f1b, schedule_for_equal_costs
from tests.schedules.instances import chain, order
from tests.support.split_orders import zb_h1


def test_a_valid_schedule_is_accepted() -> None:
    made = chain("F0 F1 I0 I1 W0 W1", "F0 B0 F1 I1 W1")
    assert str(made) == "stage 0: F0 F1 I0 I1 W0 W1\nstage 1: F0 B0 F1 I1 W1"
    assert (made.num_stages, made.num_chunks, made.splits) == (2, 2, 3)


def test_an_invalid_schedule_is_refused_with_the_reason() -> None:
    refusals = [
        ("F0 F1 B0", "F0 B0 F1 B1", "the input gradient of chunk 0 is missing for micro-batch 1$"),
        ("F0 F1 B0 I1", "F0 B0 F1 B1", "the weight gradient of chunk 0 is missing for micro-batch 1$"),
        ("F0 F1 B0 B1", "B0 B1", "the forward of chunk 1 is missing for micro-batch 0, 1$"),
        ("F0 F1 F1 B0 B1", "F0 B0 F1 B1", "the forward of chunk 0 is there more than once for micro-batch 1$"),
        ("F0 F1 I0 W0 B0 B1", "F0 B0 F1 B1", "input gradient of chunk 0 is there more than once for micro-batch 0$"),
        ("F0 F1 I0 I1 W1 W0", "F0 B0 F1 B1", "weight gradient of chunk 0 is for micro-batch 1 where micro-batch 0 is"),
        ("F1 F0 B0 B1", "F0 B0 F1 B1", "the forward of chunk 0 is for micro-batch 1 where micro-batch 0 is next"),
        ("F0 F1 W0 I0 B1", "F0 B0 F1 B1", "W0 of chunk 0 comes before its input gradient"),
        ("F0 F1 B0 B1 F2", "F0 B0 F1 B1", "stage 0 runs F2 of chunk 0, but there are 2 chunks and 2 micro-batches"),
        ("F0 F1 B0 B1", "F0 B0 F1 B1@0", "stage 1 runs B1 of chunk 0, which stage 0 owns"),
    ]
    for *texts, words in refusals:
        with pytest.raises(ScheduleError, match=words):
            pytest.fail(f"{words}: {chain(*texts)}")


def test_a_cyclic_order_is_named_action_by_action() -> None:
    with pytest.raises(ScheduleError) as caught:
        chain("F0 B0 F1 B1", "F0 F1 B0 B1")
    assert str(caught.value) == (
        "the order is cyclic: stage 0 waits at B0 of chunk 0 for B0 of chunk 1; "
        "stage 1 waits at F1 of chunk 1 for F1 of chunk 0"
    )
    with pytest.raises(ScheduleError, match=r"cyclic: stage 1 waits at B0 of chunk 1 for F0 of chunk 1$"):
        chain("F0 F1 B0 B1", "B0 F0 F1 B1")


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="2 stages need 2 orders, got 1"):
        Schedule((0, 1), 1, (order("F0 B0", 0),))
    with pytest.raises(ScheduleError, match="at least 1 micro-batch, got 0"):
        Schedule((0,), 0, ((),))
    with pytest.raises(ScheduleError, match=r"owners \[0, 2\] of chunks are not the stages"):
        Schedule((0, 2), 1, ((), (), ()))


def test_a_v_has_two_chunks_per_stage() -> None:
    # stage 0 owns chunks 0 and 3, stage 1 owns 1 and 2
    made = Schedule((0, 1, 1, 0), 1, (order("F0@0 F0@3 I0@3 W0@3 B0@0", 0), order("F0@1 F0@2 B0@2 B0@1", 0)))
    assert str(made) == "stage 0: F0@0 F0@3 I0@3 W0@3 B0@0\nstage 1: F0@1 F0@2 B0@2 B0@1"


def test_the_hash_is_of_the_content() -> None:
    made = zb_h1(3, 4)
    assert made.hash == zb_h1(3, 4).hash == pickle.loads(pickle.dumps(made)).hash
    assert len({zb_h1(3, 4).hash, zb_h1(3, 5).hash, zb_h1(4, 4).hash, chain("F0 F1 B0 B1").hash}) == 4
    assert chain("F0 F1 I0 W0 B1").hash != chain("F0 F1 I0 I1 W0 W1").hash


def test_the_hash_is_the_same_in_every_process() -> None:
    code = "from ds_dynmo.schedules import interleaved_1f1b; print(interleaved_1f1b(3, 4).hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == interleaved_1f1b(3, 4).hash + "\n"


@pytest.mark.parametrize("shape", get_args(Shape))
def test_lines_are_read_back(shape: Shape) -> None:
    schedule = schedule_for_equal_costs(3, 7, shape=shape)
    assert Schedule.of_lines(schedule.lines) == schedule
    for wrong in ("X0", "F", "F@1", "@"):
        with pytest.raises((ScheduleError, ValueError)):
            Schedule.of_lines([f"{wrong} B0", "F0 B0"])
