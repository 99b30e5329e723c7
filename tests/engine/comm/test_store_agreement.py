"""Agreement through the store: what it says, what it costs, and what it leaves there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ds_dynmo import CheckpointError
from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.comm.store_agreement import StoreAgreement
from tests.support.watches import ToldWatch

ROUNDS = 3


class CountedStore:
    """A store that counts the operations of one rank, but for looks whether a key is there."""

    def __init__(self, store: Any) -> None:
        self._store, self.operations = store, Counter[str]()

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def count(*args: Any) -> Any:
            self.operations[name] += 1
            return operation(*args)

        return count


def agreements(store: Any, world_size: int, timeout_seconds: float = 100.0) -> list[StoreAgreement]:
    return [
        StoreAgreement(BoundedStore(store, 100.0), rank, world_size, timeout_seconds, ToldWatch())
        for rank in range(world_size)
    ]


def on_all(world_size: int, call: Callable[[int], Any]) -> list[Any]:
    """Call a function for every rank, each in a thread."""
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(call, range(world_size)))


def error_of(agreement: StoreAgreement, function: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        agreement.everywhere(function)
    return str(caught.value)


def most_operations(world_size: int) -> int:
    """Return the most operations that a rank needs for some rounds, the end included; nothing is left of them."""
    store = dist.HashStore()
    counted = [CountedStore(store) for _ in range(world_size)]
    ranks = [
        StoreAgreement(BoundedStore(own, 100.0), rank, world_size, 100.0, ToldWatch())
        for rank, own in enumerate(counted)
    ]

    def take_part(rank: int) -> list[int]:
        results = [ranks[rank].everywhere(lambda: rank) for _ in range(ROUNDS)]
        ranks[rank].close()
        return results

    assert on_all(world_size, take_part) == [[rank] * ROUNDS for rank in range(world_size)]
    assert store.num_keys() == 0
    return max(sum(own.operations.values()) for own in counted)


def test_a_rank_needs_as_many_operations_however_many_ranks_there_are() -> None:
    """A rank that comes last in each round decides, and deletes what the round before has left."""
    of_one = most_operations(1)
    assert most_operations(8) <= of_one and most_operations(50) <= of_one
    assert most_operations(70) <= of_one + 2 * (ROUNDS + 1)  # a second counter, to be added to and to be deleted


def test_the_first_failure_by_rank_is_an_error_on_every_rank() -> None:
    store = dist.HashStore()
    ranks = agreements(store, 5)

    def take_part(rank: int) -> tuple[str, int]:
        def fail() -> None:
            if rank in (2, 4):
                raise ValueError(f"of {rank}")

        error = error_of(ranks[rank], fail)
        result = ranks[rank].everywhere(lambda: rank)  # nothing is left of the failure
        ranks[rank].close()
        return error, result

    assert on_all(5, take_part) == [("rank 2: ValueError: of 2", rank) for rank in range(5)]
    assert store.num_keys() == 0


def test_missing_ranks_are_named_and_learn_what_the_others_were_told() -> None:
    ranks = agreements(dist.HashStore(), 130)
    missing, first = (5, 64, 129), StoreAgreement(ranks[0]._store, 0, 130, 0.0, ToldWatch())
    present = [agreement for rank, agreement in enumerate(ranks) if rank and rank not in missing]
    for agreement in present:
        agreement._arrive("")
    message = error_of(first, lambda: None)
    assert message == "ranks [5, 64, 129] have not done their part 0 s after rank 0"
    assert {agreement._wait_for_verdict() for agreement in present} == {message}
    assert {error_of(ranks[rank], lambda: None) for rank in missing} == {message}


def test_a_store_that_does_not_answer_is_an_error_of_this_rank() -> None:
    class Silent:
        def add(self, *_: Any) -> int:
            raise RuntimeError("Connection reset by peer")

    agreement = StoreAgreement(BoundedStore(Silent(), 1.0), 3, 4, 1.0, ToldWatch())
    message = error_of(agreement, lambda: None)
    assert message == "rank 3: it is not known whether other ranks did their part: Connection reset by peer"


class ComesAtLast(BoundedStore):
    """A store at which another rank comes just as this one gives up, and decides once this one asks for the verdict."""

    def __init__(self, raw: dist.Store, other: StoreAgreement) -> None:
        super().__init__(raw, 10.0)
        self._other = other
        other._round = 1

    def check(self, keys: object) -> bool:
        assert self._other._attendance(1).come(1)
        return False

    def get(self, key: str) -> bytes:
        self._other._decide("")
        return super().get(key)


def test_a_rank_that_comes_while_another_gives_up_is_not_missing() -> None:
    raw = dist.HashStore()
    other = StoreAgreement(BoundedStore(raw, 10.0), 1, 2, 10.0, ToldWatch())
    assert StoreAgreement(ComesAtLast(raw, other), 0, 2, -1.0, ToldWatch()).everywhere(lambda: "done") == "done"


def test_nobody_waits_for_others_once_a_rank_is_lost() -> None:
    watch = ToldWatch()
    agreement = StoreAgreement(BoundedStore(dist.HashStore(), 10.0), 0, 2, 1e6, watch)
    watch.verdict = "rank 1 has ended"
    assert error_of(agreement, lambda: None) == "rank 0: a rank is lost"
    assert watch.waits == 1
    agreement.close()
