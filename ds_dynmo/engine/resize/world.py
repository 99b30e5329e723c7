"""The world of processes: end the present one, and continue with some of its ranks in the next, in the same processes.

A torch world cannot be resized. So its groups are destroyed, and the ranks that stay form a new world by the store of
the launch, which is in rank 0's process. Therefore rank 0 always stays.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_dynmo.engine.comm.attendance import absent
from ds_dynmo.engine.comm.bounded import BoundedStore, bindable_device, default_timeout
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.resize.release import RankLocation
from ds_dynmo.torch_private import default_store, prefix_store, without_prefixes


class World:
    """The ranks at work. Construction is collective.

    Messages, reports and release policies name ranks by their numbers at the launch, which nothing changes.

    Args:
        topology: of the launch.
        timeout_seconds: that a rank waits for others that are to do the same.

    Attributes:
        launch_rank: this process, as numbered at the launch.
        launch_ranks: the ranks at work, as numbered at the launch; the place of each is its rank in the present world.
        locations: of each rank of the launch, on rank 0, which hands accelerators back; empty on others.
    """

    def __init__(self, comm: Communicator, topology: ProcessTopology, timeout_seconds: float) -> None:
        self._comm, self._topology, self._timeout_seconds = comm, topology, timeout_seconds
        self.launch_ranks = tuple(range(topology.world_size()))
        self.launch_rank = dist.get_rank()
        job: str = comm.broadcast_object(uuid.uuid4().hex)  # a launcher may start a job again on the same store
        self._store = store_part(launch_store(timeout_seconds), job)
        config = dist.get_backend_config()
        self._backend = config if "," in config else dist.get_backend()  # the name determines torch's default time-outs
        self._timeout = default_timeout()
        self._device = bindable_device()
        here = RankLocation.here(self.launch_rank, str(comm.device))
        self.locations: list[RankLocation] = comm.gather_on_first(here)

    @property
    def rank(self) -> int:
        """This process's rank in the present world."""
        return self.launch_ranks.index(self.launch_rank)

    @property
    def group_timeout_seconds(self) -> float:
        """The time-out of the default group's collectives, and of its creation."""
        return self._timeout.total_seconds()

    def ranks_of(self, stages: Sequence[int]) -> tuple[int, ...]:
        """List the ranks of ``stages`` of the present world, as numbered at the launch, of all replicas and slices."""
        return tuple(self.launch_ranks[rank] for rank in of_stages(self._topology, stages)[1])

    def end(self) -> None:
        """Leave the present world; every rank of it does. Nothing can be sent until :meth:`begin`."""
        self._comm.leave()
        get_accelerator().synchronize()
        deepspeed.comm.destroy_process_group()

    def begin(self, stages: Sequence[int]) -> tuple[ProcessTopology, Any]:
        """Meet the ranks of ``stages`` of the world that has ended, all of which call this, in the next one.

        Args:
            stages: in ascending order.

        Returns:
            Its topology, and DeepSpeed's group of all its ranks.

        Raises:
            RankLostError: names the ranks that did not come.
        """
        launch_ranks = self.ranks_of(stages)
        self._wait_for_ranks(launch_ranks)
        self.launch_ranks, (self._topology, _) = launch_ranks, of_stages(self._topology, stages)
        self._comm.watch(self._part("watch").raw, self.rank, len(launch_ranks))
        several = len(launch_ranks) > 1
        dist.init_process_group(
            self._backend,
            store=self._part("world").raw,
            rank=self.rank,
            world_size=len(launch_ranks),
            timeout=self._timeout,
            device_id=self._device if several else None,  # DeepSpeed binds no single rank either
        )
        return self._topology, deepspeed.comm.new_group(ranks=range(len(launch_ranks)))

    def released_and_staying(self) -> tuple[list[RankLocation], list[RankLocation]]:
        """List all ranks that were released so far, and those at work, on rank 0."""
        released = [at for at in self.locations if at.rank not in self.launch_ranks]
        return released, [at for at in self.locations if at.rank in self.launch_ranks]

    def announce_exit(self) -> None:
        """Write that the process of this released rank is about to end."""
        with suppress(RuntimeError):  # the store went with rank 0's process
            self._store.set(_exit_key(self.launch_rank), "")

    def have_exited(self, locations: Sequence[RankLocation]) -> bool:
        """Return whether the processes of all these released ranks have announced their end."""
        with suppress(RuntimeError):
            return self._store.check([_exit_key(location.rank) for location in locations])
        return False

    def _part(self, name: str) -> BoundedStore:
        """Return the part of the store for the present world, or after :meth:`end` for the next."""
        return store_part(self._store, f"{name}/{self._comm.worlds_left}")

    def _wait_for_ranks(self, launch_ranks: Sequence[int]) -> None:
        """Wait until every one of ``launch_ranks`` is here: torch would wait for half an hour and not say for whom.

        Raises:
            RankLostError: one did not come in time.
        """
        store, here = self._part("here"), launch_ranks.index(self.launch_rank)
        try:
            absent_ranks = absent(store, len(launch_ranks), here, timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            raise self._comm.lose() from error
        if absent_ranks:
            who = f"ranks {[launch_ranks[rank] for rank in absent_ranks]} (as numbered at the launch)"
            raise self._comm.lose(f"{who} did not come to the new world within {self._timeout_seconds:g} s")


def of_stages(topology: ProcessTopology, stages: Sequence[int]) -> tuple[ProcessTopology, tuple[int, ...]]:
    """Return the topology of ``stages`` alone, in ascending order, and its ranks by their numbers in ``topology``."""
    axes = topology.get_axis_names()
    sizes = [len(stages) if axis == "pipe" else topology.get_dim(axis) for axis in axes]
    ranks = sorted(rank for stage in stages for rank in topology.get_axis_list(axis="pipe", idx=stage))
    return ProcessTopology(axes, sizes), tuple(ranks)


def _exit_key(launch_rank: int) -> str:
    return f"ds_dynmo/ends/{launch_rank}"


def store_part(store: BoundedStore, name: str) -> BoundedStore:
    """Make a view of a store whose keys are apart from all others."""
    return store.view(prefix_store(f"ds_dynmo/{name}", store.raw))


def launch_store(timeout_seconds: float) -> BoundedStore:
    """Get the store by which the launch's processes met."""
    return BoundedStore(without_prefixes(default_store()), timeout_seconds)
