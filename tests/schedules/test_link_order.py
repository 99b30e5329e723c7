"""The order of messages between two stages, on a simulated backend that runs them strictly one after the other."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

import pytest

from ds_dynmo.placement import owners_of
from ds_dynmo.schedules import (
    Action,
    Kind,
    PassBytes,
    PassCosts,
    Schedule,
    best_schedule,
    first_batch,
    interleaved_1f1b,
    link_orders,
    one_f_one_b,
    peak_bytes,
    replay,
    schedule_for_equal_costs,
)
from ds_dynmo.schedules.link_order import Message
from tests.schedules.instances import random_instance, two_chunk_instance
from tests.support.split_orders import gradient_first_1f1b, zb_h1

Pair = tuple[int, int]
Group = tuple[Message, ...]
Orders = dict[Pair, tuple[Group, ...]]


class Stuck(Exception):
    """Stages wait for each other, or two stages both send, or both receive."""


class StrictLinks:
    """Each stage runs its actions in order, and begins groups of messages; nothing is matched but by order.

    A group starts when both stages have begun it and the group before it of the two is over. Its messages take
    ``link`` seconds together. A message is whatever the other stage sends.

    Attributes:
        seconds: until all is done.
        got: per action, the action whose message it was given.
    """

    def __init__(
        self, schedule: Schedule, sides: tuple[Orders, Orders], costs: PassCosts, link: float = 0.0, how: str = "early"
    ) -> None:
        """``sides``: the orders as the lower and as the higher stage of each pair has them."""
        self._schedule, self._seconds, self._link = schedule, costs.by_kind, link
        self.places = {
            a: (stage, place) for stage, order in enumerate(schedule.orders) for place, a in enumerate(order)
        }
        self.got: dict[Action, Action] = {}
        self._arrived: dict[Action, float] = {}
        self._clock = [[0.0] for _ in schedule.orders]  # per stage: when so many actions are done
        self._links = []
        for pair in sides[0]:
            begun = [
                list(self._begins(stage, order, how)) for stage, order in zip(pair, (sides[0][pair], sides[1][pair]))
            ]
            self._links.append((pair, begun))
        self._run()
        self.seconds = max(clock[-1] for clock in self._clock)

    def _begins(
        self, stage: int, groups: Sequence[Group], how: str
    ) -> Iterator[tuple[int, list[Action], list[Action]]]:
        """Per group, after how many of its actions ``stage`` begins it, what it sends, and what needs what it gets."""
        sends = [[m.made_by for m in group if self.places[m.made_by][0] == stage] for group in groups]
        needs = [[m.needed_by for m in group if self.places[m.needed_by][0] == stage] for group in groups]
        made = [max((self.places[a][1] + 1 for a in actions), default=0) for actions in sends]
        if how == "early":  # at once
            places = list(accumulate(made, max))
        elif how == "late":  # when it is needed, or has to be out of the way of a message that is made
            least = [
                made if sent else min(self.places[a][1] for a in needed)
                for made, sent, needed in zip(made, sends, needs, strict=True)
            ]
            places = list(accumulate(reversed(least), min))[::-1]
        else:  # on demand: when it is needed, and what comes behind it waits; or only what announces sizes
            late = [[a for a in n if how == "on demand" or announces(a)] for n in needs]
            places = list(accumulate((max([m, *(self.places[a][1] for a in n)]) for m, n in zip(made, late)), max))
        assert all(place >= made for place, made in zip(places, made, strict=True))
        return iter(zip(places, sends, needs, strict=True))

    def _run(self) -> None:
        free = dict.fromkeys([pair for pair, _ in self._links], 0.0)
        needing = {a for _, begun in self._links for side in begun for _, _, needs in side for a in needs}
        went_on = True
        while went_on:
            went_on = False
            for pair, (low, high) in self._links:
                while low and high and all(side[0][0] < len(self._clock[s]) for s, side in zip(pair, (low, high))):
                    begun = [side.pop(0) for side in (low, high)]
                    now = max(free[pair], *(self._clock[s][place] for s, (place, _, _) in zip(pair, begun)))
                    free[pair] = now + self._link
                    for (_, sent, _), (_, _, needs) in (begun, begun[::-1]):
                        if len(sent) != len(needs):
                            raise Stuck(f"stages {pair} send {sent} where {needs} wait")
                        self.got.update(zip(needs, sent))
                        self._arrived.update(dict.fromkeys(needs, free[pair]))
                    went_on = True
            for stage, order in enumerate(self._schedule.orders):
                while (place := len(self._clock[stage]) - 1) < len(order):
                    action = order[place]
                    if action in needing and action not in self._arrived:
                        break
                    now = max(self._clock[stage][-1], self._arrived.get(action, 0.0))
                    self._clock[stage].append(now + self._seconds[action.kind][action.chunk])
                    went_on = True
        if any(len(clock) <= len(order) for clock, order in zip(self._clock, self._schedule.orders)):
            raise Stuck("stages wait for each other")


def announces(action: Action) -> bool:
    return action.kind == Kind.FORWARD and action.micro_batch == 0


def expected(schedule: Schedule) -> dict[Action, Action]:
    """Which action's message each action needs."""
    owners, back = schedule.owners, {}
    for order in schedule.orders:
        back.update({(a.chunk, a.micro_batch): a for a in order if a.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)})
    needed = {}
    for chunk in range(len(owners) - 1):
        for number in range(schedule.micro_batches if owners[chunk] != owners[chunk + 1] else 0):
            needed[Action(Kind.FORWARD, chunk + 1, number)] = Action(Kind.FORWARD, chunk, number)
            needed[back[chunk, number]] = back[chunk + 1, number]
    return needed


@cache
def schedules() -> list[tuple[Schedule, PassCosts]]:
    """Fixed and greedy ones of 2 to 12 stages, of every shape, with the costs that they were made for."""
    return list(_schedules())


def _schedules() -> Iterator[tuple[Schedule, PassCosts]]:
    for stages in (2, 3, 5, 12):
        for micro_batches in (1, 2 * stages + 1):
            for make in (one_f_one_b, gradient_first_1f1b, zb_h1):
                yield make(stages, micro_batches), PassCosts.equal(range(stages))
    rng = random.Random(3)
    for _ in range(10):
        costs, micro_batches, sizes, limits = random_instance(rng)
        yield best_schedule(costs, micro_batches, sizes, limits).schedule, costs
    for stages in (1, 2, 3, 4, 6):
        yield interleaved_1f1b(stages, 2 * stages + 1), PassCosts.equal(owners_of("loop", stages), 0.5)
        for shape in ("v", "loop"):
            yield schedule_for_equal_costs(stages, 2 * stages, shape=shape), PassCosts.equal(owners_of(shape, stages))
    for shape in ("v", "loop"):
        for _ in range(8):
            costs, micro_batches, sizes, limits = two_chunk_instance(rng, shape)
            yield best_schedule(costs, micro_batches, sizes, limits).schedule, costs


def other_costs(costs: PassCosts, rng: random.Random) -> PassCosts:
    parts = [tuple(rng.uniform(0.1, 2.0) for _ in costs.owners) for _ in range(4)]
    return PassCosts(costs.owners, *parts)


def test_the_instances_are_of_all_kinds() -> None:
    assert {schedule.splits > 0 for schedule, _ in schedules()} == {True, False}
    assert any(costs.frozen_chunks for _, costs in schedules())
    pairs = [(schedule, orders) for schedule, costs in schedules() for orders in link_orders(schedule, costs).values()]
    assert any(len(group) == 2 for _, groups in pairs for group in groups)
    for shape in ("v", "loop"):
        assert any(schedule.owners == owners_of(shape, 2) for schedule, _ in pairs)
        assert any(schedule.owners == owners_of(shape, 4) for schedule, _ in pairs)
    crossed = {
        (schedule.num_stages, len({frozenset((m.made_by.chunk, m.needed_by.chunk)) for group in groups for m in group}))
        for schedule, groups in pairs
        if schedule.owners == owners_of("loop", schedule.num_stages)
    }
    assert {(2, 3), (3, 1), (3, 2)} <= crossed  # boundaries between the same two stages


@pytest.mark.parametrize("how", ["early", "late", "on demand"])
def test_all_messages_arrive_where_they_are_needed(how: str) -> None:
    for schedule, costs in schedules():
        orders = link_orders(schedule, costs)
        if how == "on demand":
            if schedule.num_chunks > schedule.num_stages:
                continue
            orders = {pair: tuple((m,) for group in groups for m in group) for pair, groups in orders.items()}
        links = StrictLinks(schedule, (orders, orders), costs, link=0.3, how=how)
        assert links.got == expected(schedule)


@pytest.mark.parametrize("how", ["early", "late"])
def test_no_action_waits_for_a_message_that_it_does_not_need(how: str) -> None:
    """Where messages take no time, a batch takes what it would if each had a way of its own, under any costs."""
    rng = random.Random(4)
    for schedule, costs in schedules():
        orders = link_orders(schedule, costs)
        for measured in (costs, other_costs(costs, rng)):
            ideal = replay(schedule, PassCosts(*vars_of(measured))).iteration_seconds
            assert StrictLinks(schedule, (orders, orders), measured, how=how).seconds == ideal


def vars_of(costs: PassCosts) -> tuple[tuple[float, ...], ...]:
    """Costs of passes alone: no links, nothing frozen."""
    return costs.owners, *costs.by_kind[:3], costs.backward_seconds


def shown(groups: Sequence[Group]) -> str:
    return " ".join("+".join(f"{m.made_by.kind.letter}{m.made_by.micro_batch}" for m in group) for group in groups)


def test_messages_that_meet_travel_together() -> None:
    """Where all passes take as long, F3 of stage 0 ends with I1 of stage 1, F2 of stage 1 with I1 of stage 2."""
    orders = link_orders(gradient_first_1f1b(3, 4), PassCosts.equal(range(3)))
    assert shown(orders[0, 1]) == "F0 F1 F2 I0 I1+F3 I2 I3"
    assert shown(orders[1, 2]) == "F0 F1 I0 I1+F2 I2+F3 I3"


def test_long_messages_meet_more_often() -> None:
    counts = []
    for link in (0.0, 1.0):
        orders = link_orders(zb_h1(4, 8), PassCosts.chain([1.0] * 4, [1.1] * 4, [0.9] * 4, link_seconds=link))
        counts.append(sum(len(group) == 2 for groups in orders.values() for group in groups))
        check(zb_h1(4, 8), orders)
    assert counts[0] < counts[1]


def test_messages_that_take_no_time_never_meet_where_one_is_made_of_the_other() -> None:
    for micro_batches in (1, 2, 8):
        for make in (one_f_one_b, zb_h1):
            schedule = make(4, micro_batches)
            check(schedule, link_orders(schedule, PassCosts.equal(range(4), 0.0)))


def check(schedule: Schedule, orders: Orders) -> None:
    links = StrictLinks(schedule, (orders, orders), PassCosts.equal(schedule.owners), link=0.3, how="late")
    assert links.got == expected(schedule)


def test_sides_that_disagree_are_found() -> None:
    schedule, costs = zb_h1(4, 6), PassCosts.equal(range(4))
    orders = link_orders(schedule, costs)
    found = 0
    for pair, groups in orders.items():
        for place in range(len(groups) - 1):
            other = list(groups)
            other[place], other[place + 1] = other[place + 1], other[place]
            with pytest.raises((Stuck, AssertionError)):
                assert StrictLinks(
                    schedule, (orders, {**orders, pair: tuple(other)}), costs, how="early"
                ).got == expected(schedule)
            found += 1
    assert found > 20


# -- the batch that announces sizes ----------------------------------------------------------------------


def test_the_first_micro_batch_goes_ahead_of_all_else() -> None:
    v = Schedule.of_lines(["F0@0 F1@0 F0@3 B0@3 F1@3 B1@3 B0@0 B1@0", "F0@1 F0@2 F1@1 F1@2 B0@2 B1@2 B0@1 B1@1"])
    assert first_batch(v).lines == (
        "F0@0 F0@3 F1@0 B0@3 F1@3 B1@3 B0@0 B1@0",
        "F0@1 F0@2 F1@1 F1@2 B0@2 B1@2 B0@1 B1@1",
    )
    for schedule, _ in schedules():
        first = first_batch(schedule)  # checks itself
        for before, after in zip(schedule.orders, first.orders, strict=True):
            front = [action for action in before if announces(action)]
            assert list(after[: len(front)]) == sorted(front)
            assert [a for a in after if a not in front] == [a for a in before if a not in front]
        assert first_batch(first) == first


def test_receives_that_wait_until_they_are_needed_hold_up_no_first_batch() -> None:
    """Sizes are not known yet: what announces them is received on demand. What comes after can be posted early."""
    rng = random.Random(6)
    for schedule, costs in schedules():
        first = first_batch(schedule)
        for supposed in (costs, other_costs(costs, rng)):
            orders = link_orders(first, supposed)
            for groups in orders.values():
                in_order = [announces(message.made_by) for group in groups for message in group]
                assert in_order == sorted(in_order, reverse=True)
                assert all(len(group) == 1 for group in groups if announces(group[0].made_by))
            links = StrictLinks(first, (orders, orders), other_costs(costs, rng), link=0.3, how="announced")
            assert links.got == expected(first)


def test_the_first_batch_holds_no_more() -> None:
    for schedule, costs in schedules():
        sizes = PassBytes(
            tuple(0 if chunk < costs.frozen_chunks else 7 + chunk for chunk in range(schedule.num_chunks)),
            tuple(0 if chunk < costs.frozen_chunks else 5 for chunk in range(schedule.num_chunks)),
            (3,) * schedule.num_chunks,
        )
        peaks = zip(peak_bytes(first_batch(schedule), sizes), peak_bytes(schedule, sizes), strict=True)
        assert all(first <= other for first, other in peaks)


def test_with_two_chunks_sizes_have_to_be_known() -> None:
    stuck = 0
    for stages in (2, 3, 4):
        schedule = schedule_for_equal_costs(stages, 2 * stages, shape="v")
        orders = link_orders(schedule, PassCosts.equal(schedule.owners))
        try:
            StrictLinks(schedule, (orders, orders), PassCosts.equal(schedule.owners), how="on demand")
        except Stuck:
            stuck += 1
    assert stuck
