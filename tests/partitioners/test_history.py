"""Averages over profiles: jitter is averaged away, changes count at once."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ds_dynmo.partitioners import CostHistory
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile


def profile(
    seconds: Sequence[float],
    partition: tuple[int, ...] = (0, 6, 12),
    signals: Sequence[float | None] | None = None,
    step: int = 0,
) -> Profile:
    signals = signals or [None] * len(seconds)
    layers = tuple(LayerCost(s / 3, 2 * s / 3, 5, 5, 10, 1, 1, signal) for s, signal in zip(seconds, signals))
    return Profile(step, Placement.chain(partition), layers, micro_batches=8, batch_seconds=1.0)


def jittered(rng: random.Random, work: Sequence[float]) -> list[float]:
    return [seconds * rng.uniform(0.9, 1.1) for seconds in work]


def test_jitter_is_averaged_away_and_measured() -> None:
    rng, work = random.Random(3), [1.0, 2.0] * 6
    history = CostHistory()
    assert history.noise == 0.05
    for _ in range(8):
        measured = profile(jittered(rng, work))
        history.observe(measured)
    assert 0.04 < history.noise < 0.08  # the standard deviation of uniform jitter of 10% is 0.058
    assert history.errors == pytest.approx([history.noise / 8**0.5] * 12)
    off = [layer.seconds / seconds - 1 for layer, seconds in zip(history.smoothed(measured).layers, work)]
    assert max(map(abs, off)) < 0.06
    assert sum(o * o for o in off) < 0.3 * sum((m.seconds / s - 1) ** 2 for m, s in zip(measured.layers, work))


@pytest.mark.parametrize("says", [True, False])
def test_a_changed_layer_is_not_averaged_once_two_profiles_or_the_layer_say_so(says: bool) -> None:
    rng, work = random.Random(4), [1.0] * 12
    history = CostHistory()
    for _ in range(5):
        history.observe(profile(jittered(rng, work)))
    measured = profile([*jittered(rng, work[:11]), 0.4], signals=[None] * 11 + [0.4 if says else None])
    history.observe(measured)
    if not says:
        assert history.smoothed(measured).layers[11].seconds == pytest.approx(1.0, rel=0.15)
        history.load(json.loads(json.dumps(history.state())))
        history.observe(measured)
    assert history.smoothed(measured).layers[11] == measured.layers[11]
    assert history.errors[11] == history.noise and history.errors[0] < 0.5 * history.noise


@pytest.mark.parametrize("step", [1, 100])
def test_a_stall_in_one_layer_changes_neither_it_nor_its_stage(step: int) -> None:
    rng, work, history = random.Random(8), [1.0] * 12, CostHistory()
    for _ in range(6):
        history.observe(profile(jittered(rng, work)))
    for seconds, after in ((5.0, step), (1.0, step + 1), (5.0, step + 2)):
        history.observe(measured := profile([seconds, *jittered(rng, work[:11])], step=after))
        assert [layer.seconds for layer in history.smoothed(measured).layers] == pytest.approx(work, rel=0.1)
        assert max(history.errors) < 0.5 * history.noise


def test_the_parts_of_split_passes_are_averaged_as_the_whole_is() -> None:
    rng, history = random.Random(9), CostHistory()
    for parts in (*[True] * 9, False):
        measured = profile(jittered(rng, [3.0] * 12))
        if parts:
            first, second = (jittered(rng, [1.1] * 12) for _ in range(2))
            layers = zip(measured.layers, first, second)
            split = [replace(c, input_gradient_seconds=i, weight_gradient_seconds=w) for c, i, w in layers]
            measured = replace(measured, layers=tuple(split))
        history.observe(measured)
    for name in ("input_gradient_seconds", "weight_gradient_seconds"):
        seconds = [getattr(layer, name) for layer in history.smoothed(measured).layers]
        assert statistics.pstdev(seconds) < 0.03 * statistics.fmean(seconds) == pytest.approx(0.03 * 1.1, rel=0.05)


def test_a_stage_that_changed_as_a_whole_is_not_averaged() -> None:
    rng, work = random.Random(5), [1.0] * 12
    history = CostHistory()
    for _ in range(6):
        history.observe(profile(jittered(rng, work)))
    measured = profile(jittered(rng, [1.0] * 6 + [0.75] * 6), step=100)  # each layer alone could be jitter
    history.observe(measured)
    assert history.smoothed(measured) == measured  # of two stages it is not known which has changed


def test_noise_that_a_stage_s_layers_share_is_measured_beside_theirs() -> None:
    rng, history = random.Random(7), CostHistory()
    assert history.stage_noise == 0.0
    for _ in range(32):
        stages = [rng.lognormvariate(0.0, 0.1) for _ in range(2)]
        together = rng.lognormvariate(0.0, 0.3)  # of all stages: decides nothing
        history.observe(profile(jittered(rng, [together * stages[layer // 6] for layer in range(12)])))
    assert 0.06 < history.stage_noise < 0.14
    assert history.stage_errors == pytest.approx([history.stage_noise / error[-1] ** 0.5 for error in history._means])


def test_nothing_is_averaged_across_an_announced_change() -> None:
    history = CostHistory()
    history.observe(profile([1.0] * 12))
    history.forget()
    measured = profile([1.05] * 12)
    history.observe(measured)
    assert history.smoothed(measured) == measured


def test_noise_has_bounds() -> None:
    rng = random.Random(6)
    history = CostHistory()
    for _ in range(3):
        history.observe(profile([1.0] * 12))
    assert history.noise == 0.01
    for _ in range(8):
        history.observe(profile([rng.lognormvariate(0, 1) for _ in range(12)]))
    assert history.noise == 0.1


def test_a_moved_layer_is_speed_evidence_only_at_the_same_load() -> None:
    for signals, known in (([0.5] * 12, True), ([0.5] * 4 + [1.0] * 2 + [0.5] * 6, False)):
        history = CostHistory()
        history.observe(profile([2.0] * 6 + [1.0] * 6, signals=[0.5] * 12))
        history.observe(profile([2.0] * 4 + [1.0] * 8, (0, 4, 12), signals))
        assert (history.speeds is not None) == known
        if known:
            assert history.speeds is not None and history.speeds[1] / history.speeds[0] == pytest.approx(2, rel=0.02)


def test_a_slowdown_of_all_layers_is_no_speed_evidence() -> None:
    history = CostHistory()
    history.observe(profile([1.0] * 12))
    history.observe(profile([3.0] * 12, (0, 4, 12)))
    assert history.speeds is None


def test_averages_follow_a_layer_to_a_faster_stage() -> None:
    history = CostHistory()
    for _ in range(3):
        history.observe(profile([2.0] * 6 + [1.0] * 6))
    history.observe(profile([2.0] * 4 + [1.0] * 8, (0, 4, 12)))
    assert max(history.errors) == history.noise / 2  # the two layers that moved are averages of four, too


def test_a_doubt_is_kept_in_a_checkpoint_and_ends_with_what_was_known() -> None:
    rng, work = random.Random(6), [1.0] * 6 + [0.75] * 6
    history = CostHistory()
    for step in range(6):
        history.observe(profile(jittered(rng, [1.0] * 12), step=step))
    history.observe(profile(jittered(rng, work), step=6))
    resumed = CostHistory()
    resumed.load(json.loads(json.dumps(history.state())))
    for step in (7, 8):
        assert resumed.errors[6] < resumed.noise / 2  # the shift of stage 1 has not lasted yet
        resumed.observe(profile(jittered(rng, work), step=step))
    assert resumed.errors[6] == resumed.noise
    history.forget()
    for step, seconds in ((7, [1.0] * 12), (8, work), (9, work)):
        history.observe(measured := profile(jittered(rng, seconds), step=step))
    stage = history.smoothed(measured).layers[6:]
    assert sum(layer.seconds for layer in stage) > 6 * 0.9  # what was doubted before does not count


def test_one_stage_alone_says_nothing_about_the_noise_of_stages() -> None:
    rng, history = random.Random(7), CostHistory()
    for step in range(4):
        history.observe(profile(jittered(rng, [1.0] * 12), (0, 12), step=step))
    assert history.state()["_stage_variances"] == []
