"""The fixed orders: their tables, also in their docstrings, and their seconds."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from ds_dynmo.schedules import (
    Kind,
    PassBytes,
    PassCosts,
    Schedule,
    gradient_first_1f1b,
    one_f_one_b,
    peak_bytes,
    replay,
    schedule_for_equal_costs,
    zb_h1,
)
from tests.schedules.instances import drawn
from tests.support.pages import ROOT

TABLES: dict[Any, str] = {
    one_f_one_b: """
        step    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        stage 0 F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        stage 1 .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
        stage 2 .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
    """,
    gradient_first_1f1b: """
        step    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15
        stage 0 F0 F1 F2 .  .  I0 W0 F3 I1 W1 .  I2 W2 .  I3 W3
        stage 1 .  F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 .  I3 W3 .
        stage 2 .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 .  .
    """,
    zb_h1: """
        step    0  1  2  3  4  5  6  7  8  9  10 11 12 13
        stage 0 F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1 .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2 .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
}


@pytest.mark.parametrize("generate", TABLES, ids=lambda one: one.__name__)
def test_the_docstring_shows_the_table(generate: Callable[[int, int], Schedule]) -> None:
    table = textwrap.dedent(TABLES[generate]).strip()
    assert drawn(replay(generate(3, 4), PassCosts.equal(range(3)))) == table
    assert textwrap.indent(table, "    ") in inspect.cleandoc(generate.__doc__ or "")


@pytest.mark.parametrize("generate", [one_f_one_b, schedule_for_equal_costs])
def test_the_page_shows_the_table(generate: Callable[[int, int], Schedule]) -> None:
    table = drawn(replay(generate(4, 5), PassCosts.equal(range(4))))
    assert textwrap.indent(table, "    ") in (ROOT / "docs" / "schedules.md").read_text()


@pytest.mark.parametrize(
    ("generate", "seconds"),
    [
        (one_f_one_b, (57, 69, 117)),
        (gradient_first_1f1b, (50, 62, 110)),
        (zb_h1, (43, 55, 103)),
        (schedule_for_equal_costs, (43, 55, 103)),
    ],
)
def test_equal_passes_on_8_stages(generate: Callable[[int, int], Schedule], seconds: tuple[int, ...]) -> None:
    taken = [replay(generate(8, count), PassCosts.equal(range(8))).iteration_seconds for count in (12, 16, 32)]
    assert taken == list(seconds)


@pytest.mark.parametrize("generate", TABLES, ids=lambda one: one.__name__)
def test_every_size_is_an_order_that_runs_and_needs_no_more_than_1f1bs_first_stage(
    generate: Callable[[int, int], Schedule],
) -> None:
    for stages in range(1, 7):
        for micro_batches in range(1, 10):
            made = generate(stages, micro_batches)  # checks itself
            assert max(peak_bytes(made, PassBytes.equal(stages))) <= min(stages, micro_batches)


def test_1f1b_holds_fewer_micro_batches_on_later_stages() -> None:
    assert peak_bytes(one_f_one_b(4, 8), PassBytes.equal(4)) == (4, 3, 2, 1)
    assert peak_bytes(zb_h1(4, 8), PassBytes.equal(4)) == (4, 4, 4, 4)


def test_1f1b_is_deepspeeds_order() -> None:
    assert str(one_f_one_b(2, 3)) == "stage 0: F0 F1 B0 F2 B1 B2\nstage 1: F0 B0 F1 B1 F2 B2"
    assert one_f_one_b(2, 3).splits == 0 and zb_h1(2, 3).splits == 6
    assert {action.kind for order in one_f_one_b(2, 3).orders for action in order} == {Kind.FORWARD, Kind.BACKWARD}
