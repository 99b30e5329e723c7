"""Messages of a move in rounds."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from ds_dynmo.engine.comm.rounds import MOST_ROUNDS, ROUND_BYTES, Message, rounds_of
from ds_dynmo.engine.move.background import FIRST_BYTES, TransferBudget
from ds_dynmo.placement import Placement


def sizes(messages: Iterable[Message]) -> list[list[int]]:
    return [[tensor.numel() for tensor in message] for message in messages]


@pytest.mark.parametrize("seed", range(20))
def test_sender_and_receiver_cut_alike(seed: int) -> None:
    chooser = random.Random(seed)
    messages = [
        [torch.empty(chooser.randrange(1, 4 * ROUND_BYTES), dtype=torch.uint8, device="meta")]
        for _ in range(chooser.randrange(1, 30))
    ]
    packed = [torch.empty(100, dtype=torch.uint8, device="meta") for _ in range(5)]
    others = [(2, [torch.empty(7 * ROUND_BYTES, dtype=torch.uint8, device="meta")])] * chooser.randrange(3)
    there = rounds_of([(1, packed), *((1, message) for message in messages), *others], [])
    here = rounds_of([], [*others, (0, packed), *((0, message) for message in messages)])
    for number in range(max(len(there), len(here))):
        sent = [message for peer, message in (there[number].sends if number < len(there) else []) if peer == 1]
        received = [message for peer, message in (here[number].receives if number < len(here) else []) if peer == 0]
        assert sizes(sent) == sizes(received)
    whole = sum(message[0].numel() for message in messages) + 500
    assert sum(t.numel() for each in there for peer, message in each.sends for t in message if peer == 1) == whole
    for each in there:
        bytes_to_1 = sum(tensor.numel() for peer, message in each.sends for tensor in message if peer == 1)
        assert bytes_to_1 <= max(ROUND_BYTES, -(-whole // MOST_ROUNDS))


def test_nothing_needs_no_round() -> None:
    assert rounds_of([], []) == []


def test_the_budget_is_what_arrived_in_time() -> None:
    budget = TransferBudget()
    assert budget.num_bytes == FIRST_BYTES
    budget.record(FIRST_BYTES, 1.0)
    assert budget.num_bytes == 2 * FIRST_BYTES
    budget.record(1000, 0.25)
    assert budget.num_bytes == 250
    budget.record(100, 1.0)
    assert budget.num_bytes == 250


def test_a_move_goes_as_far_as_the_budget_allows() -> None:
    budget, here, target = TransferBudget(), Placement.chain([0, 2, 8]), Placement.chain([0, 5, 8])

    def next_cut(num_bytes: int, forbidden: int = 0) -> int:
        budget.num_bytes = num_bytes
        found = budget.next_placement(
            here,
            target,
            allows=lambda placement: placement.boundaries[1] != forbidden,
            bytes_to=lambda placement: 10 * (placement.boundaries[1] - 2),
        )
        return found.boundaries[1]

    assert [next_cut(30), next_cut(29), next_cut(10), next_cut(1)] == [5, 4, 3, 3]
    assert [next_cut(29, forbidden=4), next_cut(1, forbidden=3)] == [3, 4]
