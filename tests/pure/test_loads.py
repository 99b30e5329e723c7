"""The load models: the paper's formulas, its settings, and the imbalance that it publishes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds_dynmo.errors import ConfigError
from simulation.loads import CASES, Phase, mean_over, recorded_phases
from simulation.loads.cases import (
    EarlyExit,
    Fluctuating,
    Freezing,
    MixtureOfDepths,
    MixtureOfExperts,
    Pruning,
    SparseAttention,
    retained,
)
from simulation.runs import STATIC, Setting, compare, steps_of


def test_pruning_follows_the_schedule_of_zhu_and_gupta() -> None:
    sparsities = [Pruning().sparsity(iteration) for iteration in (0, 3999, 4000, 5000, 6000, 7000, 9999)]
    assert sparsities == pytest.approx([0, 0, 0.5203125, 0.7875, 0.8859375, 0.9, 0.9])
    phases = Pruning().phases(48, 0)
    assert [phase.iterations for phase in phases] == [4000, 1000, 1000, 1000, 3000]
    for phase, sparsity in zip(phases, (0, 0.5203125, 0.7875, 0.8859375, 0.9), strict=True):
        assert np.mean(phase.forward) == pytest.approx(1 - sparsity)  # the sparsity is that of all layers together
        assert phase.trainable == phase.forward == phase.backward


def test_pruning_is_global_so_that_layers_of_small_weights_lose_more() -> None:
    kept = retained((1.0, 2.0, 1.0), 0.5)
    assert kept[0] == pytest.approx(kept[2]) and kept[0] < 0.5 < kept[1]
    assert retained((1.0, 1.0), 0.1) == pytest.approx([0.1, 0.1])


def test_a_frozen_layer_costs_nothing_or_its_forward_pass_alone() -> None:
    first, last = (Freezing().phases(40, 20)[place] for place in (0, -1))
    assert first.backward == (1.0,) * 40
    frozen = round(0.43 * 40)
    assert last.forward == last.backward == last.trainable == (0.0,) * frozen + (1.0,) * (40 - frozen)
    kept = Freezing(forward_kept=1.0).phases(40, 20)[-1]
    assert kept.forward == (1.0,) * 40 and kept.backward == last.backward
    assert last.mean_share() == pytest.approx(1 - frozen / 40)
    assert kept.mean_share() == pytest.approx(1 - 2 / 3 * frozen / 40)


def test_tokens_leave_from_some_depth_on() -> None:
    phases = EarlyExit().phases(48, 10)
    for phase in phases:
        assert phase.forward[:7] == (1.0,) * 7  # an eighth of the depth, and the layer before which some leave
        assert all(later < earlier for earlier, later in zip(phase.forward[6:], phase.forward[7:]))
    assert mean_over(phases, Phase.mean_share) == pytest.approx(0.22, abs=0.02)  # 1 / 4.52


def test_a_layer_of_experts_waits_for_the_busiest_one() -> None:
    even = replace(MixtureOfExperts(), popularity=0.0)
    assert np.allclose([phase.forward for phase in even.phases(32, 3)], 1.0)
    skewed = np.array([phase.forward for phase in replace(even, popularity=50.0).phases(32, 3)])
    assert skewed.max() == 4.0  # every token goes to two experts: the busiest of 8 has a half of all choices
    assert (np.array([phase.forward for phase in MixtureOfExperts().phases(32, 3)]) > 1).all()


def test_every_other_block_takes_an_eighth_of_the_tokens() -> None:
    exact = replace(MixtureOfDepths(), misestimation=0.0).phases(6, 1)[0]
    assert exact.forward == (1.0, 0.125) * 3
    assert max(MixtureOfDepths(misestimation=9.0).phases(6, 1)[0].forward) == 1.0


def test_sparse_attention_is_as_dense_as_the_speedup_takes() -> None:
    phases = SparseAttention().phases(48, 40)
    assert mean_over(phases, Phase.mean_share) == pytest.approx(0.2, abs=0.02)
    quarter = SparseAttention(attention=0.25).phases(48, 2)[0]
    assert quarter.forward == pytest.approx([0.75 + 0.25 * share for share in phases[0].forward])


@pytest.mark.parametrize("name", CASES)
def test_loads_are_the_same_for_the_same_seed(name: str) -> None:
    case = CASES[name]
    assert case.phases(12, 4, seed=3, replica=1) == case.phases(12, 4, seed=3, replica=1)
    if name not in ("freezing", "early_exit"):  # these two use no random numbers
        assert case.phases(12, 4, seed=3) != case.phases(12, 4, seed=4)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_fluctuations_have_the_requested_correlation(correlation: float) -> None:
    def series(replica: int) -> np.ndarray:
        case = Fluctuating("a case", own_level=0.6, correlation=correlation)
        return case.fluctuations((40,), 400, seed=1, replica=replica)

    own, other = series(0), series(1)
    deviation = own - own.mean(axis=0)
    assert np.corrcoef(deviation[:-1].ravel(), deviation[1:].ravel())[0, 1] == pytest.approx(correlation, abs=0.05)
    assert own.mean(axis=0).var() == pytest.approx(0.6, abs=0.25)  # levels of 40 places
    assert np.corrcoef(own.mean(axis=0), other.mean(axis=0))[0, 1] > 0.9  # replicas have the same levels
    assert abs(np.corrcoef(deviation.ravel(), (other - other.mean(axis=0)).ravel())[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [("moe", 0.25, 0.04), ("freezing", 0.40, 0.03), ("sparse_attention", 0.45, 0.05), ("mod", 0.18, 0.03)],
)
def test_a_static_pipeline_has_the_published_bubble(name: str, published: float, tolerance: float) -> None:
    setting = Setting.of(CASES[name])
    bubble = compare(CASES[name], setting, [STATIC], count=8, seeds=6)[STATIC].full_bubble
    assert bubble == pytest.approx(published, abs=tolerance)


def test_at_90_percent_a_static_pipeline_idles_almost_five_times_as_much() -> None:
    setting = Setting.of(CASES["pruning"])
    bubbles = []
    for seed in range(6):
        loads = (
            steps_of(CASES["pruning"], setting, 0, seed)[-1].costs() @ np.kron(np.eye(24), np.ones((2, 1)))
        ).ravel()
        bubbles.append(1 - loads.mean() / loads.max())
    assert np.mean(bubbles) == pytest.approx(0.68, abs=0.05)


def write(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_a_report_gives_its_load_signals_as_phases(tmp_path: Path) -> None:
    def decision(step: int, *signals: float | None) -> dict[str, object]:
        return {"kind": "rebalance", "step": step, "load_signals": signals}

    start, end = {"kind": "start"}, {"kind": "end", "step": 30}
    report = write(tmp_path / "a", start, decision(10, None, 1, 1, None), decision(25, None, 0, 0.5, None), end)
    assert recorded_phases(report) == [Phase.of([1, 1], 15), Phase.of([0, 0.5], 5)]
    with pytest.raises(ConfigError, match="no decision with load signals"):
        recorded_phases(write(tmp_path / "b", start, decision(10, None, None)))
    with pytest.raises(ConfigError, match="different numbers of layers"):
        recorded_phases(write(tmp_path / "c", decision(10, 1), decision(20, 1, 1)))
