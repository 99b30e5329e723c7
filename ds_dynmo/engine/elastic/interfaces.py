"""What re-packing needs of the rest of the engine: DeepSpeed's public attributes, and two parts of ours."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.balancing.policy import CostModel
from ds_dynmo.engine.migration.migrate import MigrationContext
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan, Profile, RebalanceReport


class Engine(Protocol):
    """Public attributes of DeepSpeed's ``PipelineEngine``, and of ours: the block and ``released``."""

    dynmo: DynMoConfig
    released: bool
    module: Any
    grid: Any
    device: torch.device
    global_rank: int
    world_size: int
    global_steps: int
    global_samples: int
    micro_batches: int
    num_stages: int
    stage_id: int
    data_iterator: Any
    training_data: Any
    basic_optimizer: Any
    lr_scheduler: Any

    @property
    def partition(self) -> list[int]: ...

    def is_first_stage(self) -> bool: ...

    def is_last_stage(self) -> bool: ...

    def train_batch_size(self) -> int: ...

    def set_train_batch_size(self, train_batch_size: int) -> None: ...

    def train_micro_batch_size_per_gpu(self) -> int: ...

    def deepspeed_io(self, dataset: Any, *, data_sampler: Any) -> Any: ...

    def set_dataloader(self, loader: Any) -> None: ...

    def save_checkpoint(self, save_dir: str, tag: str | None = None) -> bool: ...


class Stateful(Protocol):
    """What a rank that comes back, or joins, has to load from the others."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Balancer(Protocol):
    """Costs of layers, and where a decision about them left off.

    Attributes:
        cost_model: what was learnt of layers and stages.
    """

    cost_model: CostModel

    @property
    def profile(self) -> Profile | None:
        """Give the latest profile; None before the first and on a released rank."""
        ...

    def forget_profile(self) -> None:
        """Drop the profile: this rank has no layers any more."""
        ...

    def memory_limit_bytes(self) -> int | None:
        """Agree on the least limit of all ranks. Collective."""
        ...

    def train_until_profiled(self) -> float:
        """Train until there is a profile. Collective."""
        ...

    def check_room(self, plan: MigrationPlan) -> None:
        """Refuse a plan that takes a rank above the memory limit. Collective; MigrationError, harmless."""
        ...

    def move_to(self, partition: tuple[int, ...]) -> RebalanceReport:
        """Move layers to a partition of the present stages. Collective."""
        ...

    def stages_changed(self, placement: Placement) -> None:
        """Discard what was learnt of stages, and keep what was learnt of layers, which are at ``placement`` now."""
        ...


class Migrator(Protocol):
    """Moves layers between the stages of one world."""

    def context(self) -> MigrationContext:
        """Describe this rank's stage as it is now."""
        ...
