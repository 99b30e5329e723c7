"""Worlds of processes: end the present one and continue in a smaller or larger one, in the same processes.

A torch world cannot be resized. So its groups are destroyed, and the continuing ranks form a new world by the store of
the launch, which is in rank 0's process. Therefore rank 0 always continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_dynmo.engine.comm.bounded import BoundedStore, NoAnswer, bindable_device, default_timeout
from ds_dynmo.errors import MigrationError
from ds_dynmo.torch_private import default_store, prefix_store, without_prefixes

STORE_LOST = (dist.DistNetworkError, NoAnswer)  # errors of a store whose server, rank 0's process, is out of reach


class World:
    """The stages of the job that are at work; the same on every rank at work.

    A process keeps its *launch rank*, its rank at the launch. Its rank in the present world changes.

    Attributes:
        launch_stages_at_work: the stages at work, in order, by their numbers at the launch. With extra replicas: the
            stages of the first replicas, then those of each copy in the same order.
        replica_multiplier: number of replicas over that of the launch; 1: no extra replicas.
        launch_rank: this process's rank at the launch.
        store: for messages between the job's processes outside of process groups.
    """

    def __init__(self, launch: ProcessTopology, store: BoundedStore) -> None:
        self._launch = launch
        self.launch_rank = dist.get_rank()
        self.launch_stages_at_work: tuple[int, ...] = tuple(range(launch.get_dim("pipe")))
        self.replica_multiplier = 1
        self.store = store
        config = dist.get_backend_config()
        self.backend = config if "," in config else dist.get_backend()  # the name determines torch's default time-outs
        self._timeout = default_timeout()
        self._device = bindable_device()
        self._generation = 0

    @property
    def axes(self) -> dict[str, int]:
        """The size of each axis of the launch, by name, in order."""
        return {axis: int(self._launch.get_dim(axis)) for axis in self._launch.get_axis_names()}

    @property
    def last_stage(self) -> int:
        """The last stage of the launch."""
        return int(self._launch.get_dim("pipe")) - 1

    @property
    def num_stages(self) -> int:
        """The number of stages of a pipeline in the present world."""
        return len(self.launch_stages_at_work) // self.replica_multiplier

    @property
    def launch_stage(self) -> int:
        """The stage that this process had at the launch."""
        return int(self._launch.get_coord(self.launch_rank).pipe)

    @property
    def rank(self) -> int:
        """The rank of this process in the present world."""
        return dist.get_rank()

    @property
    def timeout_seconds(self) -> float:
        """The time-out of the default group's collectives, and of its creation."""
        return self._timeout.total_seconds()

    @property
    def generation(self) -> int:
        """The number of worlds before this one."""
        return self._generation

    def launch_ranks(self, stages: Sequence[int]) -> tuple[int, ...]:
        """List the launch's ranks of all replicas and slices of these stages."""
        return tuple(sorted(rank for stage in stages for rank in self._launch.get_axis_list(axis="pipe", idx=stage)))

    @property
    def has_replica_axis(self) -> bool:
        """Whether extra replicas are possible."""
        return "data" in self.axes

    @property
    def launch_replicas(self) -> int:
        """Data-parallel replicas of the launch."""
        return self.axes.get("data", 1)

    @property
    def copy_index(self) -> int:
        """The index of this process's copy of the launch's replicas: 0 is the original."""
        return self.launch_stages_at_work.index(self.launch_stage) // self.num_stages

    def _topology(self) -> ProcessTopology:
        """Build a topology with the launch's axes, over the present stages and replicas."""
        sizes = {**self.axes, "pipe": self.num_stages}
        if self.replica_multiplier > 1:
            sizes["data"] *= self.replica_multiplier
        return ProcessTopology(list(sizes), list(sizes.values()))

    def end(self) -> None:
        """Leave the present world; every rank of it does. Nothing can be sent until :meth:`begin`."""
        get_accelerator().synchronize()
        deepspeed.comm.destroy_process_group()

    def begin(
        self, stages: Sequence[int], generation: int, *, timeout_seconds: float, replica_multiplier: int = 1
    ) -> tuple[ProcessTopology, Any]:
        """Meet the ranks of ``stages``, all of which call this, in world number ``generation``.

        Args:
            replica_multiplier: how many copies of the launch's replicas ``stages`` has, one after the other.

        Returns:
            Its topology, and DeepSpeed's group of all its ranks.

        Raises:
            MigrationError: names the ranks that did not come.
        """
        self._wait_for_ranks(self.launch_ranks(stages), generation, timeout_seconds)
        self.launch_stages_at_work, self.replica_multiplier = tuple(stages), replica_multiplier
        self._generation = generation
        topology = self._topology()
        place = self._launch.get_coord(self.launch_rank)
        if replica_multiplier > 1:
            place = place._replace(data=self.copy_index * self.launch_replicas + place.data)
        place = place._replace(pipe=self.launch_stages_at_work.index(self.launch_stage) % self.num_stages)
        dist.init_process_group(
            self.backend,
            store=store_part(self.store, f"world/{generation}").raw,
            rank=topology.get_rank(**place._asdict()),
            world_size=topology.world_size(),
            timeout=self._timeout,
            device_id=self._device if topology.world_size() > 1 else None,  # DeepSpeed binds no single rank either
        )
        return topology, deepspeed.comm.new_group(ranks=range(topology.world_size()))

    def unresponsive_ranks(self, timeout_seconds: float) -> list[int]:
        """Find ranks of the present world, as numbered at the launch, that do not call this too within the time-out."""
        alive = store_part(self.store, f"alive/{self._generation}")
        launch_ranks = self.launch_ranks(self.launch_stages_at_work)
        try:
            alive.set(str(self.launch_rank), "")
            return _unresponsive(alive, launch_ranks, timeout_seconds)
        except STORE_LOST:
            return [0]

    def _wait_for_ranks(self, launch_ranks: Sequence[int], generation: int, timeout_seconds: float) -> None:
        """Wait until every one of ``launch_ranks`` is here: torch would wait for half an hour and not say for whom."""
        here = store_part(self.store, f"here/{generation}")
        try:
            here.set(str(self.launch_rank), "")
            unresponsive = _unresponsive(here, launch_ranks, timeout_seconds)
        except STORE_LOST as error:
            raise MigrationError(
                "rank 0's process is gone or out of reach, and with it the store of the launch. Resume the job from "
                "its last checkpoint"
            ) from error
        if unresponsive:
            raise MigrationError(
                f"ranks {unresponsive} (as numbered at the launch) did not come to the new world within "
                f"{timeout_seconds:g} s. Resume the job from its last checkpoint, with as many stages as are left"
            )


def _unresponsive(store: BoundedStore, launch_ranks: Sequence[int], timeout_seconds: float) -> list[int]:
    """Wait for ranks to write that they are here; return those that do not within the time-out."""
    try:
        store.wait([str(launch_rank) for launch_rank in launch_ranks], timedelta(seconds=timeout_seconds))
    except STORE_LOST:
        raise
    except RuntimeError:
        return [launch_rank for launch_rank in launch_ranks if not store.check([str(launch_rank)])]
    return []


def store_part(store: BoundedStore, name: str) -> BoundedStore:
    """Make a view of a store whose keys are apart from all others."""
    return store.view(prefix_store(f"ds_dynmo/{name}", store.raw))


def launch_store(timeout_seconds: float) -> BoundedStore:
    """Get the store by which the launch's processes met."""
    return BoundedStore(without_prefixes(default_store()), timeout_seconds)
