"""The fixed orders: their tables, also in their docstrings, and their seconds."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from ds_dynmo.placement import owners_of
from ds_dynmo.schedules import (
    Kind,
    PassBytes,
    PassCosts,
    Schedule,
    interleaved_1f1b,
    one_f_one_b,
    peak_bytes,
    replay,
    schedule_for_equal_costs,
)
from tests.schedules.instances import drawn
from tests.support.pages import ROOT
from tests.support.split_orders import gradient_first_1f1b, zb_h1

TABLES: dict[Any, str] = {
    one_f_one_b: """
        step    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        stage 0 F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        stage 1 .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
        stage 2 .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
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


@pytest.mark.parametrize("generate", [one_f_one_b, gradient_first_1f1b, zb_h1])
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


def test_interleaving_halves_the_bubble_whatever_the_number_of_micro_batches() -> None:
    for stages in range(1, 9):
        costs = PassCosts.equal(owners_of("loop", stages), 0.5)
        for micro_batches in range(1, 3 * stages + 2):
            made = interleaved_1f1b(stages, micro_batches)  # checks itself
            assert made.splits == 0
            seconds = replay(made, costs).iteration_seconds
            under_1f1b = replay(one_f_one_b(stages, micro_batches), PassCosts.equal(range(stages))).iteration_seconds
            if micro_batches >= stages:
                assert seconds == 3 * micro_batches + 1.5 * (stages - 1)
            assert seconds <= under_1f1b == 3 * micro_batches + 3 * (stages - 1)


def test_interleaving_is_megatrons() -> None:
    """After ``2 (p - 1 - s) + p`` passes, stages alternate; ``p`` micro-batches go through a chunk in a row."""
    made = interleaved_1f1b(4, 8)
    for stage, order in enumerate(made.orders):
        ahead = next(place for place, action in enumerate(order) if action.kind == Kind.BACKWARD)
        assert ahead == 2 * (3 - stage) + 4 + 1
        assert [(a.chunk, a.micro_batch) for a in order if a.kind == Kind.FORWARD] == [
            (chunk, first + number) for first in (0, 4) for chunk in (stage, 4 + stage) for number in range(4)
        ]
        assert [(a.chunk, a.micro_batch) for a in order if a.kind == Kind.BACKWARD] == [
            (chunk, first + number) for first in (0, 4) for chunk in (4 + stage, stage) for number in range(4)
        ]
    assert max(peak_bytes(made, PassBytes.equal(8))) == 11  # chunks, where 1F1B holds 8
