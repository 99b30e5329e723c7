"""The memory limit of a rank, in training and while layers move."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo import partitioners
from ds_dynmo.engine.decide.decision_input import memory_model
from ds_dynmo.engine.measure import layer_sizes
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import MigrationError
from ds_dynmo.partitioners import MemoryModel, Overflow
from ds_dynmo.plan import HeldBytes, MigrationPlan, Profile

SHARE_IN_BATCH = 0.9  # of an accelerator: what a move during a batch may take without dynmo.memory_limit


@dataclass(frozen=True)
class HeldMemory:
    """The bytes of each layer between two batches. Pure.

    Attributes:
        limit: of a rank, in bytes.
        layers: per layer, its bytes on a rank of its stage.
        static_bytes: per layer, its bytes in training without activations.
        first_uses: per layer, the first layer with the same parameters; None: it is a function.
    """

    limit: int
    layers: tuple[HeldBytes, ...]
    static_bytes: tuple[int, ...]
    first_uses: tuple[int | None, ...]

    def overflow(
        self, plan: MigrationPlan, present: MemoryModel | None = None, *, overlapped: bool = False
    ) -> Overflow | None:
        """Find the stage that ``plan`` takes furthest above the limit; None: no stage exceeds it.

        Args:
            present: bytes that stages need now, with activations; None: without activations.
            overlapped: whether batches train while layers travel.
        """
        old = plan.old
        if present is None:
            present_bytes = [sum(self.static_bytes[index] for index in old.layers_of(stage)) for stage in old.stages]
        else:
            present_bytes = present.bytes_per_stage(old)
        training_bytes = self.static_bytes if overlapped else None
        return partitioners.overflow(
            plan, self.layers, self.first_uses, self.limit, present_bytes, training_bytes=training_bytes
        )


class MemoryLimit:
    """The memory that a rank may use.

    Attributes:
        limit: ``dynmo.memory_limit``: bytes, or a fraction of the accelerator's memory; None: no limit.
    """

    def __init__(self, stage: StageContext) -> None:
        self._stage = stage
        self.limit = stage.config.memory_limit
        self._agreed: tuple[int, int] | None = None  # worlds left before, and the limit of this one

    def bytes(self, *, in_batch: bool = False) -> int | None:
        """Return the smallest limit of all ranks, which may differ; None: no limit. Collective once in a world.

        Args:
            in_batch: whether it is for a move during a batch. Such a move needs more than one for which training waits,
                so it has a limit on an accelerator in any case.
        """
        limit = self.limit
        if limit is None and in_batch and get_accelerator().device_name() != "cpu":
            limit = SHARE_IN_BATCH
        if not isinstance(limit, float):
            return limit
        comm = self._stage.comm
        if self._agreed is None or self._agreed[0] != comm.worlds_left:
            mine = torch.tensor([-limit * get_accelerator().total_memory()], dtype=torch.float64, device="cpu")
            self._agreed = comm.worlds_left, int(-comm.max_over_world(mine).item())
        return self._agreed[1]

    @property
    def checkpoint_interval(self) -> int:
        """Layers per checkpointed segment; 0: no checkpointing."""
        return self._stage.layers.checkpoint_interval

    def held(self, *, in_batch: bool = False) -> HeldMemory | None:
        """Gather the bytes of each layer; None without a limit. Collective.

        Args:
            in_batch: as for :meth:`bytes`.

        Raises:
            MigrationError: harmless, on every rank; a rank cannot size its layers.
        """
        limit = self.bytes(in_batch=in_batch)
        if limit is None:
            return None
        layers = self._stage.layers
        table = self._stage.comm.max_over_world(layer_sizes.held_table(layers, self._stage.state))
        if layer_sizes.failed(table):
            raise MigrationError("a rank could not tell what its layers hold. No layer has moved", harmless=True)
        return HeldMemory(limit, *layer_sizes.held_from(table), tuple(layers.first_uses()))

    def check(self, plan: MigrationPlan, profile: Profile | None = None, *, overlapped: bool = False) -> None:
        """Refuse a plan that takes a rank above the limit while layers move. Collective, before a byte moves.

        Args:
            profile: of the decision; None: there is none, and activations do not count.
            overlapped: whether batches train while layers travel.

        Raises:
            MigrationError: harmless, on every rank, with both numbers.
        """
        overflow = self._overflow(plan, profile, overlapped=overlapped)
        if overflow is not None:
            raise MigrationError(
                f"from {plan.old} to {plan.new}, {overflow} (dynmo.memory_limit). No layer has moved",
                harmless=True,
            )

    def fits(self, plan: MigrationPlan, profile: Profile | None = None, *, overlapped: bool = False) -> bool:
        """Return whether :meth:`check` accepts a plan. Collective."""
        return self._overflow(plan, profile, overlapped=overlapped) is None

    def _overflow(self, plan: MigrationPlan, profile: Profile | None, *, overlapped: bool) -> Overflow | None:
        held = self.held(in_batch=overlapped)
        if held is None:
            return None
        present = memory_model(profile, held.limit, self.checkpoint_interval) if profile is not None else None
        return held.overflow(plan, present, overlapped=overlapped)
