"""Collectives over trees of ranks, and the sockets that they need."""

from __future__ import annotations

import os
import random
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_dynmo
from ds_dynmo.engine.comm.agreement import share_of_difference
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.comm.coordinates import GroupPlace
from ds_dynmo.engine.comm.tree import branch_of, children_of, parent_of
from ds_dynmo.errors import PackingError, noted
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.models import module_of


def test_a_tree_of_ranks() -> None:
    """Each is the child of its parent alone; a branch is a run of ranks; a rank has few neighbours."""
    assert parent_of(0) is None
    for size in (*range(1, 10), 64, 100):
        children = [children_of(place, size) for place in range(size)]
        assert sorted(chain.from_iterable(children)) == [*range(1, size)]
        parents = [(place, parent) for place in range(1, size) if (parent := parent_of(place)) is not None]
        assert len(parents) == size - 1 and all(place in children[parent] for place, parent in parents), size
        for place in range(size):
            below = [branch_of(child, size) for child in children[place]]
            assert [place, *chain.from_iterable(below)] == [*branch_of(place, size)], (size, place)
        assert max(map(len, children)) == (size - 1).bit_length()


def sum_of_shares(texts: list[tuple[int, str]]) -> int:
    """Sum the shares of ranks by group and text, as 64 bits."""
    shares, sizes = [], {group: sum(group == other for other, _ in texts) for group, _ in texts}
    for rank, (group, text) in enumerate(texts):
        index = sum(group == other for other, _ in texts[:rank])
        shares.append(share_of_difference(GroupPlace(group, index, sizes[group]), text))
    assert all(-(2**63) <= share < 2**63 for share in shares)
    return int(torch.tensor(shares).sum()) if shares else 0


def test_shares_sum_to_zero_only_where_groups_agree() -> None:
    chooser = random.Random(0)
    for _ in range(500):
        texts = [(chooser.randrange(3), chooser.choice("ab")) for _ in range(chooser.randrange(1, 9))]
        agree = all(len({text for other, text in texts if other == group}) == 1 for group, _ in texts)
        assert (sum_of_shares(texts) == 0) == agree


def test_two_groups_that_differ_alike_do_not_cancel_out() -> None:
    for texts in (["a", "b", "b", "a"], ["a", "b", "a", "b"], ["a", "b", "c", "a"]):
        assert sum_of_shares([(0, texts[0]), (0, texts[1]), (1, texts[2]), (1, texts[3])])
        assert sum_of_shares([(0, text) for text in texts])


def sockets() -> int:
    """Count the sockets that this process has open."""
    folder, found = "/proc/self/fd", 0
    for name in os.listdir(folder):
        try:
            found += os.readlink(f"{folder}/{name}").startswith("socket:")
        except OSError:
            continue
    return found


def divided(number: int) -> float:
    with noted("layer 3"):
        return 1 / number


def refused(number: int) -> None:
    if not number:
        raise PackingError("no 8")


def collectives() -> dict[str, Any]:
    module = module_of(Case(stages=3, replicas=3))
    before = sockets()
    comm, rank = Communicator(module.mpu(), torch.device("cpu"), 30.0), dist.get_rank()
    replica = comm.here.replica
    found: dict[str, Any] = {
        "maximum": comm.max_over_world(torch.tensor([float(rank), -float(rank)])).tolist(),
        "broadcast": comm.broadcast_object({"of": rank}),
        "first": comm.gather_on_first("x" * rank),
        "all": comm.gather_objects((rank, b"" if rank % 2 else b"odd")),
    }
    posted = [comm.post_max(torch.tensor([rank * factor])) for factor in (1, -1)]
    to_first = [comm.post_max_to_first(torch.tensor([rank * factor])) for factor in (2, -2)]
    found["synchronous meanwhile"] = comm.max_over_world(torch.tensor([rank % 4])).item()
    found["posted"] = [comm.read_max(each).item() for each in posted]
    on_first = [comm.read_max_on_first(each) for each in to_first]
    found["posted to first"] = [None if each is None else each.item() for each in on_first]
    found["sum"] = comm.all_moved([float(rank), 0.5], 10**comm.here.stage)
    everywhere: dict[str, Any] = {"same": lambda text: text, "compared_in": comm.here.in_pipeline}
    assert comm.everywhere("a test", lambda: f"replica {replica}", **everywhere) == f"replica {replica}"
    with pytest.raises(ds_dynmo.MigrationError) as refusal:
        comm.everywhere("a test", lambda: f"replica {replica}" if rank != 4 else "other", **everywhere)
    found["differing"] = str(refusal.value)
    with pytest.raises(ds_dynmo.MigrationError, match=r"failed on ranks \[8\], first with ZeroDivisionError"):
        comm.everywhere("a test", lambda: 1 / (8 - rank))
    with pytest.raises(
        RuntimeError, match=r"first with ZeroDivisionError: division by zero \(at layer 3\)\. No setting"
    ):
        comm.everywhere("a test", lambda: divided(8 - rank), error=ds_dynmo.ConfigError)
    with pytest.raises(ds_dynmo.ConfigError, match=r"^rank 8: no 8$"):
        comm.everywhere("a test", lambda: refused(8 - rank), error=ds_dynmo.ConfigError)
    gathered = []
    for value in (None, [None, 0, "three" * 99][comm.here.stage]):  # values of different lengths, too, beside none
        values, mine = comm.agree_and_gather("a test", lambda value=value: (value, rank))  # type: ignore[misc]
        gathered.append((list(values().values()), mine))
    found["with the agreement"] = gathered
    comm.all_done()
    comm.p2p.exchange([((rank + 1) % 9, torch.ones(3))], [((rank - 1) % 9, torch.zeros(3))])
    found["sockets"] = sockets() - before
    comm.all_done()
    return found


@pytest.mark.ranks
def test_collectives_of_nine_ranks() -> None:
    for rank, found in enumerate(run(9, collectives, backend="gloo")):
        assert found["maximum"] == [8.0, 0.0]
        assert found["broadcast"] == {"of": 0}
        assert found["first"] == (["x" * other for other in range(9)] if rank == 0 else [])
        assert found["all"] == [(other, b"" if other % 2 else b"odd") for other in range(9)]
        assert found["synchronous meanwhile"] == 3
        assert found["posted"] == [8, 0]
        assert found["posted to first"] == ([16, 0] if rank == 0 else [None, None])
        assert found["sum"] == ([8.0, 0.5], 111.0)
        assert "replica 1 on ranks [1, 7], other on ranks [4]" in found["differing"]
        assert found["with the agreement"] == [([None] * 3, rank), ([None, 0, "three" * 99], rank)]
        neighbours = len(children_of(rank, 9)) + (rank > 0)
        in_pipeline = len(children_of(rank // 3, 3)) + (rank >= 3)
        listening = 1
        again = 1  # gloo may try a second time to connect
        assert found["sockets"] <= neighbours + in_pipeline + listening + again


def wait_alone() -> str:
    comm = Communicator(module_of(Case(stages=6)).mpu(), torch.device("cpu"), 3.0)
    store = dist.distributed_c10d._get_default_store()
    message = ""
    if dist.get_rank() not in (2, 5):
        with pytest.raises(ds_dynmo.MigrationError) as error:
            comm.max_over_world(torch.zeros(1))
        message = str(error.value)
        store.set(f"told {dist.get_rank()}", "")
    store.wait([f"told {rank}" for rank in (0, 1, 3, 4)])
    return message


@pytest.mark.ranks
def test_all_that_wait_name_the_same_missing_ranks() -> None:
    """Rank 2 is between 3, which has come, and the first rank."""
    for rank, message in enumerate(run(6, wait_alone, backend="gloo", complete=False)):
        assert rank in (2, 5) or "ranks [2, 5] did not call it within 3 s" in message, (rank, message)
