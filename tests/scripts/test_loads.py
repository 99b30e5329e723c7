"""The load models: the paper's formulas, its settings, and the imbalance that it publishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds_dynmo.errors import ConfigError
from simulation import LOAD_MODELS, Phase, Recorded, chosen_load_models, mean_over
from simulation.load_models import (
    EarlyExitLoad,
    Fluctuating,
    FreezingLoad,
    MixtureOfDepthsLoad,
    MixtureOfExpertsLoad,
    PruningLoad,
    SparseAttentionLoad,
    retained,
)
from simulation.recorded import FIRST
from simulation.runs import Setting, compare, run_costs
from simulation.statics import STATIC
from tests.support.recordings import write_recording


def test_pruning_follows_the_schedule_of_zhu_and_gupta() -> None:
    sparsities = [PruningLoad().sparsity(iteration) for iteration in (0, 3999, 4000, 5000, 6000, 7000, 9999)]
    assert sparsities == pytest.approx([0, 0, 0.5203125, 0.7875, 0.8859375, 0.9, 0.9])
    phases = PruningLoad().phases(48, 0)
    assert [phase.iterations for phase in phases] == [4000, 1000, 1000, 1000, 3000]
    for phase, sparsity in zip(phases, (0, 0.5203125, 0.7875, 0.8859375, 0.9), strict=True):
        assert np.mean(phase.forward) == pytest.approx(1 - sparsity)  # the sparsity is that of all layers together
        assert phase.trainable == phase.forward == phase.backward


def test_pruning_is_global_so_that_layers_of_small_weights_lose_more() -> None:
    kept = retained((1.0, 2.0, 1.0), 0.5)
    assert kept[0] == pytest.approx(kept[2]) and kept[0] < 0.5 < kept[1]
    assert retained((1.0, 1.0), 0.1) == pytest.approx([0.1, 0.1])


def test_a_frozen_layer_costs_nothing_or_its_forward_pass_alone() -> None:
    first, last = (FreezingLoad().phases(40, 20)[place] for place in (0, -1))
    assert first.backward == (1.0,) * 40
    frozen = round(0.43 * 40)
    assert last.forward == last.backward == last.trainable == (0.0,) * frozen + (1.0,) * (40 - frozen)
    kept = FreezingLoad(forward_kept=1.0).phases(40, 20)[-1]
    assert kept.forward == (1.0,) * 40 and kept.backward == last.backward
    assert last.mean_share() == pytest.approx(1 - frozen / 40)
    assert kept.mean_share() == pytest.approx(1 - 2 / 3 * frozen / 40)


def test_tokens_leave_from_some_depth_on() -> None:
    phases = EarlyExitLoad().phases(48, 10)
    for phase in phases:
        assert phase.forward[:7] == (1.0,) * 7  # an eighth of the depth, and the layer before which some leave
        assert all(later < earlier for earlier, later in zip(phase.forward[6:], phase.forward[7:]))
    assert mean_over(phases, Phase.mean_share) == pytest.approx(0.22, abs=0.02)  # 1 / 4.52


def test_a_layer_of_experts_waits_for_the_busiest_one() -> None:
    even = replace(MixtureOfExpertsLoad(), popularity=0.0)
    assert np.allclose([phase.forward for phase in even.phases(32, 3)], 1.0)
    skewed = np.array([phase.forward for phase in replace(even, popularity=50.0).phases(32, 3)])
    assert skewed.max() == 4.0  # every token goes to two experts: the busiest of 8 has a half of all choices
    assert (np.array([phase.forward for phase in MixtureOfExpertsLoad().phases(32, 3)]) > 1).all()


def test_every_other_block_takes_an_eighth_of_the_tokens() -> None:
    exact = replace(MixtureOfDepthsLoad(), misestimation=0.0).phases(6, 1)[0]
    assert exact.forward == (1.0, 0.125) * 3
    assert max(MixtureOfDepthsLoad(misestimation=9.0).phases(6, 1)[0].forward) == 1.0


def test_sparse_attention_is_as_dense_as_the_speedup_takes() -> None:
    phases = SparseAttentionLoad().phases(48, 40)
    assert mean_over(phases, Phase.mean_share) == pytest.approx(0.2, abs=0.02)
    quarter = SparseAttentionLoad(attention=0.25).phases(48, 2)[0]
    assert quarter.forward == pytest.approx([0.75 + 0.25 * share for share in phases[0].forward])


@pytest.mark.parametrize("name", LOAD_MODELS)
def test_loads_are_the_same_for_the_same_seed(name: str) -> None:
    case = LOAD_MODELS[name]
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        ("moe", 0.25, 0.04),
        ("freezing", 0.40, 0.03),
        ("sparse_attention", 0.45, 0.05),
        ("mod", 0.18, 0.03),
    ],
)
def test_a_static_pipeline_has_the_published_bubble(name: str, published: float, tolerance: float) -> None:
    setting = Setting.of(LOAD_MODELS[name])
    bubble = compare(LOAD_MODELS[name], setting, [STATIC], count=8, seeds=6)[STATIC].busiest_stage_ratio
    assert bubble == pytest.approx(published, abs=tolerance)


def test_at_90_percent_a_static_pipeline_idles_almost_five_times_as_much() -> None:
    setting = Setting.of(LOAD_MODELS["pruning"])
    bubbles = []
    for seed in range(6):
        loads = (
            run_costs(LOAD_MODELS["pruning"], setting, 0, seed)[-1].costs() @ np.kron(np.eye(24), np.ones((2, 1)))
        ).ravel()
        bubbles.append(1 - loads.mean() / loads.max())
    assert np.mean(bubbles) == pytest.approx(0.68, abs=0.05)


def test_a_recording_ends_a_phase_where_the_model_changed(tmp_path: Path) -> None:
    frozen = write_recording(tmp_path / "a.jsonl", [[2, 4]] * 8 + [[0, 4]] * 9, changed=[8], trainable={8: [0, 50]})
    case = Recorded.read(frozen)
    assert (case.name, case.interval, case.layers, case.stages) == ("a case", 25, 2, 2)
    first, second = case.phases(2, 1)
    assert (first.iterations, second.iterations) == (8, 9)
    # A share of 1 is the mean layer; a backward pass of a dense layer counts as two forward passes.
    assert first.forward == first.backward == pytest.approx((2 / 3, 4 / 3)) and first.mean_share() == pytest.approx(1)
    assert second.forward == second.backward == pytest.approx((0, 4 / 3))
    assert (first.trainable, second.trainable) == ((1, 1), (0, 1))
    parts = [(phase.iterations, phase.announced) for phase in case.phases(2, 3)]
    assert parts == [(6, False), (2, False), (6, True), (3, False)]  # none is longer than a third
    assert case.dense(2) == replace(first, iterations=FIRST)


def test_a_phase_of_a_recording_has_the_medians_of_its_layers(tmp_path: Path) -> None:
    stalls = [[1, 1], [1, 9], [1, 1], [1, 9], [1, 1], [1, 1]]
    (phase,) = Recorded.read(write_recording(tmp_path / "a.jsonl", stalls)).phases(2, 1)
    assert phase.forward[0] == phase.forward[1]


def test_at_interval_1_every_recorded_iteration_counts_as_it_was(tmp_path: Path) -> None:
    shares = [[1, 1]] * FIRST + [[1, number] for number in range(20)]
    case = Recorded.read(write_recording(tmp_path / "a.jsonl", shares, interval=1))
    assert [phase.forward for phase in case.phases(2, 4)] == [(1, 1), *((1, number) for number in range(20))]
    turns = case.turns(2, 3, 4)  # of five iterations each, from the first to the last that was recorded
    assert [[phase.forward[1] for phase in turn] for turn in turns] == [
        [1, 0, 1, 2, 3],
        [7, 8, 9, 10, 11],
        [15, 16, 17, 18, 19],
    ]
    with pytest.raises(ConfigError, match="holds 25 iterations, too few for 21 in a row"):
        case.turns(2, 1, 21)


def test_turns_of_made_up_loads_continue_each_other() -> None:
    first, second = LOAD_MODELS["moe"].turns(4, 2, 3)
    assert [*first, *second[1:]] == LOAD_MODELS["moe"].phases(4, 7) and second[0] is first[-1]


EVEN = [[1, 1]] * 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[1:], "is not a recording: its first line is not the header"),
        (lambda lines: [], "is not a recording: it is empty"),
        (lambda lines: ["a log"], "line 1, is not a JSON object"),
        (lambda lines: [*lines[:4], lines[4][:30]], "line 5, the last one, is torn: remove it"),
        (lambda lines: [lines[0], "[]", *lines[2:]], "line 2: is not a later step"),
        (lambda lines: [*lines, *lines], "line 11: is not a later step of the same recording"),
        (lambda lines: [lines[0], *lines[2:]], "line 2: has no list trainable_parameters, and none came before it"),
        (
            lambda lines: [lines[0], lines[1].replace('"forward_us":[', '"forward_us":[7,'), *lines[2:]],
            "line 2: forward_us has 3 layers, the recording has 2",
        ),
        (lambda lines: [lines[0], lines[1].replace(":[1", ":[-1"), *lines[2:]], "forward_us = .*-1.*none of them neg"),
        (lambda lines: [lines[0].replace("layers", "depth"), *lines[1:]], "its header lacks layers"),
        (lambda lines: [lines[0].replace("25", '"often"'), *lines[1:]], "has interval = 'often': should be an integer"),
        (lambda lines: [lines[0].replace('"layers":2', '"layers":0'), *lines[1:]], "has layers = 0: .* at least 1"),
        (lambda lines: [lines[0].replace('"a case"', "[]"), *lines[1:]], r"has case = \[\]: should be a name"),
        (lambda lines: [lines[0], lines[1].replace('"step":1', '"step":"1"'), *lines[2:]], "line 2: is not a later"),
        *(
            (
                lambda lines, whole=whole: [f'{{"whole_layers":{whole},{lines[0][1:]}', *lines[1:]],
                "whole_layers = .*0 to 2",
            )
            for whole in ("2", "[]", "[0, 1]", "[0, 2, 2]", "[1, 2]", "[0, 1.5, 2]")
        ),
        (lambda lines: lines[:6], "holds 5 iterations, should be more than 5"),
    ],
)
def test_what_is_no_whole_recording_is_refused(
    change: Callable[[list[str]], list[str]], message: str, tmp_path: Path
) -> None:
    path = write_recording(tmp_path / "a.jsonl", EVEN)
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(ConfigError, match=rf"a\.jsonl.*{message}"):
        Recorded.read(path)


def test_slices_and_halves_of_a_recording_add_up_to_whole_layers(tmp_path: Path) -> None:
    path = write_recording(
        tmp_path / "a.jsonl", [[1, 1, 2, 4]] * 8, trainable={0: [10, 20, 30, 30]}, whole_layers=[0, 2, 3, 4]
    )
    case = Recorded.read(path)
    assert case.whole_layers(4) == (0, 2, 3, 4)
    phase = case.dense(4)
    assert phase.forward == (0.5, 0.5, 1, 2) and phase.merged(case.whole).forward == (1, 1, 2)
    assert phase.merged(case.whole).trainable == phase.merged((0, 2, 3, 4)).trainable == (1, 1, 1)
    [whole] = chosen_load_models(None, [path], undivided=True)
    assert (whole.layers, whole.whole_layers(3)) == (3, (0, 1, 2, 3))
    assert whole.dense(3).forward == (0.75, 0.75, 1.5)


def test_recordings_are_chosen_by_case(tmp_path: Path) -> None:
    for case in ("moe", "mod"):
        write_recording(tmp_path / f"{case}.jsonl", EVEN, case=case)
    assert [case.name for case in chosen_load_models(None, [tmp_path])] == ["mod", "moe"]
    assert [case.name for case in chosen_load_models(["moe"], [tmp_path, tmp_path / "mod.jsonl"])] == ["moe"]
    assert [case.name for case in chosen_load_models(["moe"], None)] == ["moe"]
    with pytest.raises(ConfigError, match="--case freezing: there are recordings of mod, moe"):
        chosen_load_models(["freezing"], [tmp_path])
    with pytest.raises(ConfigError, match=r"--case dense: there are moe, pruning, .*mod"):
        chosen_load_models(["dense"], None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: the folder holds no"):
        chosen_load_models(None, [tmp_path / "empty"])
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        chosen_load_models(None, [tmp_path / "none.jsonl"])
    with pytest.raises(ConfigError, match=r"--layers 3: .*moe.jsonl is a recording of 2 layers"):
        chosen_load_models(["moe"], [tmp_path])[0].phases(3, 1)
