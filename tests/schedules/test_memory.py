"""Peak bytes, calculated by hand."""

from dataclasses import replace

import pytest

from ds_dynmo.errors import ScheduleError
from ds_dynmo.schedules import PassBytes, Schedule, one_f_one_b, one_f_one_b_limit, peak_bytes
from tests.schedules.instances import chain, order
from tests.support.split_orders import zb_h1


def test_activations_are_held_until_the_input_gradient_and_the_rest_until_the_weight_gradient() -> None:
    sizes = PassBytes((10, 10), (4, 4), (0, 0))
    # stage 0 holds       10 20 14 8  4  0                   stage 1: 10 4 0 10 0
    made = chain("F0 F1 I0 I1 W0 W1", "F0 I0 W0 F1 B1")
    assert peak_bytes(made, sizes) == (20, 10)
    assert peak_bytes(made, PassBytes((10, 10), (30, 30), (0, 0))) == (60, 30)  # more after the pass than before it
    assert peak_bytes(made, replace(sizes, standing_bytes=(3, 2))) == (23, 12)  # for messages, all the time


def test_recomputed_activations_are_held_during_a_backward_pass_beside_what_segments_hold_already() -> None:
    made, sizes = chain("F0 F1 B0 I1 W1", "F0 B0 F1 B1"), PassBytes((1, 1), (5, 5), (9, 7))
    assert peak_bytes(made, sizes) == (2 + 9, 1 + 7)
    assert peak_bytes(made, replace(sizes, split_recomputed_bytes=(12, 8))) == (max(2 + 9, 1 + 12), 1 + 7)


def test_chunks_of_a_stage_add_up() -> None:
    v = Schedule((0, 1, 1, 0), 1, (order("F0@0 F0@3 I0@3 W0@3 B0@0", 0), order("F0@1 F0@2 B0@2 B0@1", 0)))
    assert peak_bytes(v, PassBytes((1, 2, 4, 8), (1, 2, 4, 16), (0, 0, 0, 0))) == (17, 6)


def test_the_limit_is_what_1f1bs_fullest_stage_holds() -> None:
    assert one_f_one_b_limit(PassBytes((3, 5, 1), (9, 9, 9), (0, 0, 0)), 8) == (10, 10, 10)
    assert one_f_one_b_limit(PassBytes((3, 5, 1), (9, 9, 9), (0, 0, 2)), 1, memory=1.5) == (7, 7, 7)
    v = PassBytes((3, 5, 1, 4), (9,) * 4, (0, 0, 2, 1), standing_bytes=(0, 0, 0, 1))
    assert one_f_one_b_limit(v, 8, owners=(0, 1, 1, 0)) == (2 * (3 + 4) + 1 + 1,) * 2
    assert one_f_one_b_limit(v, 8, owners=(0, 1, 0, 1)) == (2 * (5 + 4) + 1 + 1,) * 2
    assert peak_bytes(one_f_one_b(3, 8), PassBytes((3, 5, 1), (9, 9, 9), (0, 0, 0))) == (9, 10, 1)


def test_invalid_bytes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="2 activation, 1 held and 2 recomputed values"):
        PassBytes((1, 1), (1,), (1, 1))
    with pytest.raises(ScheduleError, match=r"held_bytes\[1\] is -1"):
        PassBytes((1, 1), (1, -1), (1, 1))
    with pytest.raises(ScheduleError, match="3 chunks need bytes each, got 2"):
        peak_bytes(zb_h1(3, 4), PassBytes.equal(2))
