"""Each fault of communication that the backend is there to find is made, and found; what is right is not reported."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests import emulated
from tests.emulated.torch_device import library
from tests.support.harness import RankError, run

HERE = Path(__file__).name
DELAYS = [0.0, 2.0]  # milliseconds; 0: the host runs what is posted


def device() -> torch.device:
    return torch.device("emulated", dist.get_rank())


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "emulated_nccl"]


# -------------------------------------------------------------------------------------------------------- operations
def collectives(delay: float) -> dict[str, Any]:
    library.set_delay(delay)
    rank, world = dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}

    def returns(name: str, *tensors: torch.Tensor) -> None:
        results[name] = [each.tolist() for each in tensors]

    def empty(*sizes: int) -> list[torch.Tensor]:
        return [torch.empty(size, device=device()) for size in sizes]

    numbers = [10.0 * rank + peer for peer in range(world)]
    total = tensor(*numbers)
    dist.all_reduce(total)
    returns("all_reduce", total)
    average = tensor(*numbers).bfloat16()
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    returns("average", average)
    same = tensor(*numbers)
    dist.broadcast(same, 1)
    returns("broadcast", same)
    reduced = tensor(*numbers)
    dist.reduce(reduced, 1)
    returns("reduce", reduced)
    parts = empty(*[1] * world)
    dist.all_gather(parts, tensor(rank))
    returns("all_gather", *parts)
    (whole,) = empty(2 * world)
    dist.all_gather_into_tensor(whole, tensor(rank, -1))
    returns("all_gather_into_tensor", whole)
    (part,) = empty(1)
    dist.reduce_scatter(part, [tensor(number) for number in numbers])
    returns("reduce_scatter", part)
    dist.reduce_scatter_tensor(part, tensor(*numbers), op=dist.ReduceOp.AVG)
    returns("reduce_scatter_tensor", part)
    parts = empty(*[1] * world)
    dist.all_to_all(parts, [tensor(number) for number in numbers])
    returns("all_to_all", *parts)
    (whole,) = empty(world + (rank == 0) * world)
    rows = [2 if peer == 0 else 1 for peer in range(world)]  # rank 0 gets two of each
    dist.all_to_all_single(whole, torch.arange(float(sum(rows)), device=device()), [rows[rank]] * world, rows)
    returns("all_to_all_single", whole)
    parts = empty(*[1] * world) if rank == 0 else []
    dist.gather(tensor(rank), parts or None, 0)
    returns("gather", *parts)
    dist.scatter(part, [tensor(number) for number in numbers] if rank == 1 else None, 1)
    returns("scatter", part)
    coalesced = [tensor(1), tensor(2, 3)]
    dist.all_reduce_coalesced(coalesced)
    returns("all_reduce_coalesced", *coalesced)
    parts = empty(world, world)
    with _coalescing_manager(None, device(), async_ops=True) as launched:
        for into in parts:
            dist.all_gather_into_tensor(into, tensor(rank), async_op=True)
    launched.wait()
    returns("coalesced", *parts)
    dist.barrier()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    results["objects"] = objects
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(total, group=group)
    returns("group", total)
    (received,) = empty(1)
    following, previous = (rank + 1) % world, (rank - 1) % world
    launched = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor(rank), following), dist.P2POp(dist.irecv, received, previous)]
    )
    results["launches"] = len(launched)
    launched[0].wait()
    returns("batch", received)
    dist.destroy_process_group()
    results["threads"] = threads()
    return results


@pytest.mark.parametrize("delay", DELAYS)
def test_operations_return_what_torch_says(delay: float) -> None:
    ranks = run(3, collectives, delay)
    matrix = [[10.0 * rank + peer for peer in range(3)] for rank in range(3)]
    sums = [sum(column) for column in zip(*matrix)]
    for rank, results in enumerate(ranks):
        assert results == {
            "all_reduce": [sums],
            "average": [[number / 3 for number in sums]],
            "broadcast": [matrix[1]],
            "reduce": [sums if rank == 1 else matrix[rank]],
            "all_gather": [[0], [1], [2]],
            "all_gather_into_tensor": [[0, -1, 1, -1, 2, -1]],
            "reduce_scatter": [[sums[rank]]],
            "reduce_scatter_tensor": [[sums[rank] / 3]],
            "all_to_all": [[row[rank]] for row in matrix],
            "all_to_all_single": [[0, 1] * 3 if rank == 0 else [rank + 1] * 3],
            "gather": [[0], [1], [2]] if rank == 0 else [],
            "scatter": [[matrix[1][rank]]],
            "all_reduce_coalesced": [[3], [6, 9]],
            "coalesced": [[0, 1, 2]] * 2,
            "objects": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
            "group": [[2 * number for number in sums] if rank < 2 else sums],
            "launches": 1,
            "batch": [[(rank - 1) % 3]],
            "threads": [],
        }


def messages_in_order() -> list[float]:
    """Tags do not count: what is sent first arrives first."""
    peer = 1 - dist.get_rank()
    if peer:
        for number, tag in ((1.0, 1), (2.0, 2)):
            dist.send(tensor(number), peer, tag=tag)
        return []
    received = [torch.empty(1, device=device()) for _ in range(2)]
    for into, tag in zip(received, (2, 1)):
        dist.recv(into, peer, tag=tag)
    return [into.item() for into in received]


def test_tags_do_not_count() -> None:
    assert run(2, messages_in_order) == [[], [1.0, 2.0]]


# ------------------------------------------------------------------------------------------------------------ tensors
def refused() -> list[str]:
    texts = []
    ours, other = tensor(1, 2, 3, 4).view(2, 2), torch.ones(1, device="emulated:7")
    for wrong in (torch.ones(2), ours.t()):
        for post in (dist.all_reduce, lambda sent: dist.send(sent, 1 - dist.get_rank())):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                post(wrong)
            texts.append(str(raised.value))
    dist.all_reduce(other)
    return [*texts, *emulated.take_reports()]


def test_tensors_of_the_cpu_and_with_gaps_are_refused() -> None:
    for texts in run(2, refused):
        *texts, report = texts
        assert texts[:2] == ["No backend type associated with device type cpu"] * 2
        assert all("Tensors must be contiguous" in text for text in texts[2:]) and len(texts) == 4
        assert "all_reduce of a tensor on emulated:7 while the current device is emulated:" in report and HERE in report


# ------------------------------------------------------------------------------------------------------------ streams
def read_early() -> tuple[list[float], list[str], list[float]]:
    library.set_delay(0.0)  # else it is left to chance what is read
    peer = 1 - dist.get_rank()
    sent, received = tensor(1), torch.zeros(1, device=device())
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])
    early = received.tolist()
    reports = emulated.take_reports()
    works[0].wait()
    return early, reports, received.tolist()


def test_what_is_received_is_not_there_before_a_wait() -> None:
    for early, (report,), late in run(2, read_early):
        assert math.isnan(early[0]) and late == [1.0]
        assert "race: " in report and "batch wrote" in report and "read_early" in report


def write_early() -> list[str]:
    library.set_delay(0.0)  # else it is left to chance what is sent
    numbers, gathered = tensor(1), torch.empty(2, device=device())
    work = dist.all_gather_into_tensor(gathered, numbers, async_op=True)
    numbers.add_(1)
    work.wait()
    assert gathered.tolist() == [1, 1]
    return emulated.take_reports()


def test_what_is_sent_may_not_change_before_a_wait() -> None:
    for (report,) in run(2, write_early):
        assert "race: " in report and "all_gather_single" in report and "write_early" in report


def poll(delay: float) -> list[float]:
    library.set_delay(delay)
    numbers = tensor(1)
    work = dist.all_reduce(numbers, async_op=True)
    while not work.is_completed():
        pass
    return numbers.tolist()


@pytest.mark.parametrize("delay", DELAYS)
def test_operations_end_without_a_wait(delay: float) -> None:
    assert run(2, poll, delay) == [[2.0], [2.0]]


def synchronize_all(delay: float) -> list[float]:
    library.set_delay(delay)
    numbers = tensor(1)
    dist.all_reduce(numbers, async_op=True)
    torch.emulated.synchronize()
    return numbers.tolist()


@pytest.mark.parametrize("delay", DELAYS)
def test_waiting_for_the_device_is_waiting_for_its_messages(delay: float) -> None:
    assert run(2, synchronize_all, delay) == [[2.0], [2.0]]


def run_ahead() -> tuple[bool, bool, list[float]]:
    """Rank 0 waits for what rank 1 sends only after it has heard that rank 0 went on."""
    library.set_delay(1)
    control = dist.new_group(backend="gloo")
    rank, numbers = dist.get_rank(), tensor(1)
    if rank == 0:
        numbers.zero_()
        dist.recv(numbers, 1)
        arrived = torch.emulated.current_stream().query()
        dist.barrier(control)
        doubled = numbers * 2
        return arrived, torch.emulated.current_stream().query(), doubled.tolist()
    dist.barrier(control)
    dist.send(numbers, 0)
    return False, True, [2.0]


def test_under_delays_the_host_runs_ahead_and_kernels_wait() -> None:
    assert run(2, run_ahead) == [(False, True, [2.0])] * 2


def change_late() -> tuple[list[float], int]:
    """Change what is to be sent while it is behind a message that has not come."""
    library.set_delay(1)
    control = dist.new_group(backend="gloo")
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    first, second = torch.empty(1, device=device()), tensor(1)
    if rank == 0:
        dist.irecv(first, peer)
        work = dist.isend(second, peer)
        second.fill_(5)
        dist.barrier(control)
        work.wait()
    else:
        dist.barrier(control)
        dist.send(second, peer)
        dist.recv(first, peer)
    return first.tolist(), len(emulated.take_reports())


def test_under_delays_a_race_changes_numbers() -> None:
    assert run(2, change_late) == [([1.0], 1), ([5.0], 0)]


# ---------------------------------------------------------------------------------------------------- eager connection
def message_first() -> list[str]:
    """Send before any collective: each rank to the next, one after the other."""
    rank, into = dist.get_rank(), torch.empty(1, device=device())
    if rank > 0:
        dist.recv(into, rank - 1)
    if rank < dist.get_world_size() - 1:
        dist.send(into, rank + 1)
    return emulated.take_reports()


def message_first_bound(folder: str) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, f"store{world}"), world)
    bound = torch.device("emulated", rank)
    dist.init_process_group("emulated_nccl", store=store, rank=rank, world_size=world, device_id=bound)
    dist.new_group([0, 1])  # not all ranks take part
    return message_first()


def message_first_by_variable(_: str) -> list[str]:
    os.environ["EMULATED_BOUND"] = "1"
    return message_first()


@pytest.mark.parametrize("function", [message_first_bound, message_first_by_variable])
def test_the_first_operation_of_a_bound_group_connects_all_ranks(function: Callable, tmp_path: Path) -> None:
    ranks = run(3, function, str(tmp_path))
    assert all("the first operation of a group of 3 ranks is a" in text for (text,) in ranks)
    assert run(2, function, str(tmp_path)) == [[], []]


def test_an_unbound_group_connects_two_ranks_at_a_time() -> None:
    assert run(3, message_first) == [[], [], []]


# ----------------------------------------------------------------------------------------------------------- deadlocks
def send_first() -> None:
    peer, into = 1 - dist.get_rank(), torch.empty(1, device=device())
    works = [dist.isend(tensor(1), peer), dist.irecv(into, peer)]
    for work in works:
        work.wait()


def test_a_circle_fails_the_test_with_both_places() -> None:
    with pytest.raises(RankError, match="in a circle") as raised:
        run(2, send_first)
    text = str(raised.value)
    assert all(f"rank {rank}: send 4 bytes to member {1 - rank}" in text for rank in (0, 1))
    assert text.count(f"{HERE}:") >= 2 and "in send_first" in text
    assert "tests/support/" not in text  # what starts a rank is no place


def send_more() -> None:
    peer = 1 - dist.get_rank()
    if peer:
        dist.send(tensor(1), peer)
    else:
        dist.recv(torch.empty(2, device=device()), peer)


def test_messages_of_another_size_fail_the_test() -> None:
    with pytest.raises(RankError, match="4 bytes are sent, 8 received"):
        run(2, send_more)


def other_order() -> None:
    numbers = tensor(1, 2)
    operations = [lambda: dist.all_reduce(numbers, async_op=True), lambda: dist.broadcast(numbers, 0, async_op=True)]
    works = [operation() for operation in operations[:: 1 - 2 * dist.get_rank()]]
    for work in works:
        work.wait()


def test_collectives_in_another_order_fail_the_test() -> None:
    with pytest.raises(RankError, match=r"collective 0 of communicator .* is not the same on all its ranks") as raised:
        run(2, other_order, group_timeout=timedelta(seconds=2))
    assert "rank 0: all_reduce SUM, [2] torch.float32" in str(raised.value)
    assert "rank 1: broadcast, root 0, [2] torch.float32" in str(raised.value)


# --------------------------------------------------------------------------------------------------------------- ends
def lose_a_rank(delay: float) -> None:
    """Let rank 1 leave while rank 0 waits for its messages; nobody asks for the second."""
    library.set_delay(delay)
    dist.barrier()
    works = [dist.irecv(torch.empty(1, device=device()), 1) for _ in range(2)] if dist.get_rank() == 0 else []
    dist.destroy_process_group()
    assert threads() == []
    if works:
        with pytest.raises(RuntimeError, match="Connection"):
            works[0].wait()
        works.clear()
        (report,) = emulated.take_reports()
        assert "recv failed, and nobody waits for it any more" in report


@pytest.mark.parametrize("delay", DELAYS)
def test_a_group_ends_although_a_rank_is_lost(delay: float) -> None:
    with pytest.raises(RankError, match="is never sent") as raised:
        run(2, lose_a_rank, delay)
    assert "failed" not in str(raised.value)
