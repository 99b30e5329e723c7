import random

import numpy as np
import pytest

from ds_dynmo.partitioners import iteration_seconds, simulate
from ds_dynmo.partitioners.simulate import Pass, Sends
from ds_dynmo.schedules import PassCosts, one_f_one_b, replay


def test_two_stages_three_micro_batches() -> None:
    # seconds   0   1   2   3   4   5   6   7
    # stage 0   F0  F1  .   B0  F2  B1  .   B2
    # stage 1   .   F0  B0  F1  B1  F2  B2  .
    timeline = simulate([1.0, 1.0], [1.0, 1.0], micro_batches=3)
    assert [(p.kind[0] + str(p.micro_batch), p.start_seconds) for p in timeline.passes if p.stage == 0] == [
        ("f0", 0.0),
        ("f1", 1.0),
        ("b0", 3.0),
        ("f2", 4.0),
        ("b1", 5.0),
        ("b2", 7.0),
    ]
    assert [(p.kind[0] + str(p.micro_batch), p.start_seconds) for p in timeline.passes if p.stage == 1] == [
        ("f0", 1.0),
        ("b0", 2.0),
        ("f1", 3.0),
        ("b1", 4.0),
        ("f2", 5.0),
        ("b2", 6.0),
    ]
    assert timeline.iteration_seconds == 8.0
    assert timeline.busy_seconds == (6.0, 6.0)
    assert timeline.bubble_ratio == 0.25
    assert timeline.passes[0] == Pass(0, 0, "forward", 0.0, 1.0)


def test_even_stages_take_the_textbook_time() -> None:
    for num_stages in range(1, 6):
        for micro_batches in range(1, 8):
            timeline = simulate([1.0] * num_stages, [2.0] * num_stages, micro_batches)
            assert timeline.iteration_seconds == 3.0 * (micro_batches + num_stages - 1)


def test_one_micro_batch_pays_every_link() -> None:
    assert simulate([1.0] * 4, [2.0] * 4, 1, link_seconds=0.25).iteration_seconds == 12.0 + 6 * 0.25


def test_every_pass_waits_for_its_stage_and_its_input() -> None:
    rng = random.Random(3)
    for _ in range(60):
        num_stages, micro_batches, link = rng.randint(1, 6), rng.randint(1, 7), rng.choice([0.0, 0.3])
        forward, backward = ([rng.uniform(0.1, 2) for _ in range(num_stages)] for _ in range(2))
        timeline = simulate(forward, backward, micro_batches, link)
        ended = {(p.stage, p.micro_batch, p.kind): p.end_seconds for p in timeline.passes}
        assert len(ended) == len(timeline.passes) == 2 * num_stages * micro_batches
        free_at = [0.0] * num_stages
        for stage, micro_batch, kind, start, end in timeline.passes:
            source = ended.get((stage - 1 if kind == "forward" else stage + 1, micro_batch, kind))
            forwarded = ended[stage, micro_batch, "forward"] if kind == "backward" else 0.0
            arrived = 0.0 if source is None else source + link
            assert start == max(free_at[stage], arrived) and start >= forwarded  # at once, and never earlier
            free_at[stage] = end
        assert timeline.iteration_seconds == max(ended.values())
        assert timeline.busy_seconds == pytest.approx(
            [micro_batches * (f + b) for f, b in zip(forward, backward, strict=True)]
        )


def test_in_flight_is_what_the_memory_model_says() -> None:
    for num_stages in range(1, 6):
        for micro_batches in range(1, 8):
            held, most = [0] * num_stages, [0] * num_stages
            for stage, _, kind, _, _ in simulate([1.0] * num_stages, [1.0] * num_stages, micro_batches).passes:
                held[stage] += 1 if kind == "forward" else -1
                most[stage] = max(most[stage], held[stage])
            assert most == [min(num_stages - stage, micro_batches) for stage in range(num_stages)]


def test_wrong_sizes_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="2 forward times, 1 backward times, 4 micro-batches"):
        simulate([1.0, 1.0], [1.0], 4)
    with pytest.raises(ValueError, match="0 micro-batches"):
        simulate([1.0], [1.0], 0)


def test_a_sender_that_waits_for_its_receiver_cannot_run_ahead() -> None:
    # seconds      0    1    2    3    4    5    6    7    8
    # overlapped   F0   F1   F2   .    ...                   stage 0; stage 1 takes 3 for each forward pass
    # rendezvous   F0   F1   .    .    F2
    forward, backward = [1.0, 3.0, 1.0], [0.0, 0.0, 0.0]
    starts = {
        sends: [
            p.start_seconds for p in simulate(forward, backward, 3, sends=sends).passes if p[:3:2] == (0, "forward")
        ]
        for sends in ("overlapped", "buffered", "rendezvous")
    }
    assert starts == {"overlapped": [0, 1, 2], "buffered": [0, 1, 2], "rendezvous": [0, 1, 4]}


def test_a_late_gradient_holds_up_the_activation_behind_it() -> None:
    # One link takes 1: the second activation leaves with the first one's gradient in hand, not at its end.
    by_itself, in_turn = (simulate([1.0, 1.0], [1.0, 1.0], 2, 1.0, sends=s) for s in ("overlapped", "buffered"))
    second = [(1, 1, "forward")]
    starts = [[p.start_seconds for p in t.passes if p[:3] in second] for t in (by_itself, in_turn)]
    assert starts == [[4.0], [6.0]]


def test_links_may_differ() -> None:
    assert simulate([1.0] * 3, [2.0] * 3, 1, [0.25, 0.5]).iteration_seconds == 9.0 + 2 * 0.75
    with pytest.raises(ValueError, match="3 stages have 2 links between them, got 3 link times"):
        simulate([1.0] * 3, [1.0] * 3, 1, [0.1, 0.1, 0.1])


def test_the_bubble_of_each_stage() -> None:
    timeline = simulate([1.0, 2.0], [1.0, 2.0], micro_batches=3)
    assert timeline.iteration_seconds == 14.0
    assert timeline.stage_bubble_ratios == pytest.approx((1 - 6 / 14, 1 - 12 / 14))
    assert sum(timeline.stage_bubble_ratios) / 2 == pytest.approx(timeline.bubble_ratio)
    assert simulate([0.0], [0.0], 1).stage_bubble_ratios == (0.0,)


@pytest.mark.parametrize("sends", ["overlapped", "buffered", "rendezvous"])
def test_many_pipelines_at_once_equal_one_at_a_time(sends: Sends) -> None:
    rng = np.random.default_rng(7)
    for num_stages in range(1, 6):
        for micro_batches in (1, 2, 5):
            for links in (0.0, [0.1 * (stage + 1) for stage in range(num_stages - 1)]):
                forward, backward = rng.uniform(0.1, 2, (2, num_stages, 3))
                together = iteration_seconds(forward, backward, micro_batches, links, sends=sends)
                for place in range(3):
                    alone = simulate(
                        forward[:, place].tolist(), backward[:, place].tolist(), micro_batches, links, sends=sends
                    )
                    assert together[place] == alone.iteration_seconds
                one = iteration_seconds(forward[:, 0], backward[:, 0], micro_batches, links, sends=sends)
                assert one.shape == () and one == together[0]


def test_the_simulator_of_schedules_gives_the_same_1f1b() -> None:
    rng = random.Random(11)
    for _ in range(80):
        num_stages, micro_batches = rng.randint(1, 7), rng.randint(1, 12)
        forward, backward = ([rng.choice([0.0, rng.uniform(0.1, 2)]) for _ in range(num_stages)] for _ in range(2))
        links = [rng.choice([0.0, rng.uniform(0, 0.5)]) for _ in range(num_stages - 1)]
        costs = PassCosts.chain(forward, backward, [0.0] * num_stages, backward, links)
        general = replay(one_f_one_b(num_stages, micro_batches), costs)
        fast = simulate(forward, backward, micro_batches, links, sends="overlapped")
        assert general.iteration_seconds == fast.iteration_seconds  # to the bit
        together = iteration_seconds(np.array(forward)[:, None], np.array(backward)[:, None], micro_batches, links)
        assert together.tolist() == [general.iteration_seconds]
        assert general.busy_seconds == pytest.approx(fast.busy_seconds)
        assert general.bubble_ratio == pytest.approx(fast.bubble_ratio)
        stages = range(num_stages)
        starts = [[p.start_seconds for p in fast.passes if p.stage == stage] for stage in stages]
        assert [list(begun) for begun in general.start_seconds] == starts
