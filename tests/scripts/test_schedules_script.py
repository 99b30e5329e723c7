"""scripts/schedules.py: what it refuses, which engines it runs, layers' seconds, and passes out of a trace."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scaling import chunk_costs, layer_seconds
from benchmarks.schedules import ARMS, WAITING, arms_for
from benchmarks.traced_passes import traced_batches
from ds_dynmo.placement import owners_of
from ds_dynmo.schedules import Action, Kind


def test_dualpipev_runs_where_it_can() -> None:
    assert arms_for(None, "real", stages=8, layers=32, micro_batches=16, in_a_row=2) == list(ARMS)
    assert "dualpipev" not in arms_for(None, "real", stages=8, layers=32, micro_batches=12)
    assert arms_for(["zero_bubble"], "sleep", stages=8, layers=32, micro_batches=12) == ["stock", "zero_bubble"]


def test_two_chunks_need_two_layers_per_stage() -> None:
    assert {"v", "loop"} <= {*arms_for(None, "sleep", stages=2, layers=4, micro_batches=1)}
    assert {"v", "loop"}.isdisjoint(arms_for(None, "sleep", stages=2, layers=3, micro_batches=1))


def test_waiting_for_the_loss_is_measured_where_another_batch_follows() -> None:
    assert {*ARMS} - {*arms_for(None, "real", stages=8, layers=32, micro_batches=16)} == {WAITING}


def test_an_order_is_decided_where_layers_compute() -> None:
    assert "auto" not in arms_for(None, "sleep", stages=2, layers=4, micro_batches=4)
    assert arms_for(["auto"], "real", stages=2, layers=4, micro_batches=4) == ["stock", "auto"]


def test_a_backward_pass_takes_two_forward_passes() -> None:
    even, realistic = (layer_seconds("equal", split, 1, 1.0, seed=0)[0] for split in ("even", "realistic"))
    assert even == (1.0, 1.0, 1.0, 2.0)
    assert realistic == pytest.approx((1.0, 1.26, 0.84, 2.0))


def test_layers_differ_as_requested() -> None:
    random = layer_seconds("random", "even", 64, 1.0, seed=0)
    parts = [part for one in random for part in one[:3]]
    assert 0.7 <= min(parts) < 0.75 and 1.25 < max(parts) <= 1.3
    frozen = chunk_costs(layer_seconds("frozen", "even", 8, 1.0, seed=0), range(4))
    assert (frozen.forward_seconds, frozen.backward_seconds) == ((2.0,) * 4, (0.0, 4.0, 4.0, 4.0))
    weightless = chunk_costs(layer_seconds("weightless", "even", 8, 1.0, seed=0), range(4))
    assert weightless.weight_gradient_seconds == (2.0, 2.0, 0.0, 0.0)
    v = chunk_costs(layer_seconds("frozen", "even", 8, 1.0, seed=0), owners_of("v", 2))
    assert (v.owners, v.backward_seconds) == ((0, 1, 1, 0), (0.0, 4.0, 4.0, 4.0))


def event(stage: int, category: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "args": {"stage": stage, "step": 3},
    }


def test_a_pass_counts_all_work_of_its_stage_except_waiting() -> None:
    events = [
        {"ph": "i", "args": {"step": 1}},
        event(0, "load", "load 0", 0, 1),
        event(0, "forward", "forward 0", 1, 10),
        event(0, "send", "send activation 0", 11, 12),
        event(0, "load", "load 1", 13, 14),
        event(0, "forward", "forward 1", 14, 20),
        event(0, "wait", "wait for gradient 0", 21, 30),
        event(0, "receive", "receive gradient 0", 30, 31),
        event(0, "backward", "input gradient 0", 32, 40),
        event(0, "weight gradient", "weight gradient 0", 41, 50),
        event(0, "reduce", "reduce gradients", 51, 60),
        event(1, "backward", "backward 0", 5, 7),
    ]
    orders = [
        [Action.of_text(text, chunk) for text in order.split()] for chunk, order in enumerate(("F0 F1 I0 W0", "B0"))
    ]
    ((costs, seconds),) = traced_batches(events, (0, 1), orders)
    assert seconds == pytest.approx(49e-6)
    assert costs.forward_seconds == pytest.approx((10e-6, 0.0))  # 12 and 8
    assert costs.input_gradient_seconds == pytest.approx((9e-6, 0.0))
    assert costs.weight_gradient_seconds == pytest.approx((10e-6, 0.0))
    assert costs.backward_seconds == pytest.approx((0.0, 2e-6))


def test_passes_of_two_chunks_are_told_apart_by_their_order() -> None:
    names = ("forward 0", "forward 0", "backward 0", "backward 0")
    events = [
        event(0, name.split()[0], name, begin, begin + size)
        for name, begin, size in zip(names, (0, 1, 3, 6), (1, 2, 3, 4))
    ]
    order = [
        Action(Kind.FORWARD, 0, 0),
        Action(Kind.FORWARD, 1, 0),
        Action(Kind.BACKWARD, 1, 0),
        Action(Kind.BACKWARD, 0, 0),
    ]
    ((costs, _),) = traced_batches(events, (0, 0), [order])
    assert costs.forward_seconds == pytest.approx((1e-6, 2e-6))
    assert costs.backward_seconds == pytest.approx((4e-6, 3e-6))
