"""How a job stands: what a rank that comes back, or joins, has to be told, and how it takes it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_dynmo.engine.checkpoint.progress import counters_of, restore_counters
from ds_dynmo.engine.elastic.data import DataPosition
from ds_dynmo.engine.elastic.release import Place
from ds_dynmo.engine.optimizer.parameter_groups import options_of
from ds_dynmo.engine.serialization.objects import to_bytes
from ds_dynmo.errors import MigrationError

_COUNTED = (  # of DeepSpeed 0.19.8's engine and of ours, alike on every rank
    "global_steps",
    "global_samples",
    "skipped_steps",
    "_global_grad_norm",
    "agg_train_loss",
    "agg_additional_losses",
    "_profile",
    "_trainable",
    "_tied_trainable",
    "_prefix",
)


@dataclass(frozen=True)
class JobSnapshot:
    """How things stand when stages come back.

    Attributes:
        old: boundaries, with those stages empty; ``new``: as they are to be.
        parked: stages of the job that stay parked.
        places: where every rank runs.
        first_seconds: what an iteration at the start of the run took counts as from now on; None: as before.
        job: of :func:`describe_job`, for ``from_bytes``.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    parked: tuple[int, ...]
    places: dict[int, Place]
    first_seconds: float | None
    job: bytes


def describe_job(engine: Any, data: DataPosition, states: Mapping[str, Any]) -> bytes:
    """What there is to tell of the job, pickled, on rank 0; nothing elsewhere. Collective, while all are together.

    Args:
        states: holders that may gather theirs, by name.

    Raises:
        MigrationError: harmless; a rank could not tell, or shares other states than rank 0.
    """
    every = engine._comm.gather_objects(list(states))
    for rank, names in enumerate(every):
        if names != every[0]:
            raise MigrationError(
                f"engine.share_state was called with {every[0]} on rank 0, with {names} on rank {rank}: every rank has "
                "to call it alike, in one order. No layer has moved",
                harmless=True,
            )

    def describe() -> bytes:
        job = _job(engine, data, states)  # on every rank: a holder may gather
        return to_bytes(job) if engine.global_rank == 0 else b""

    job: bytes = engine._comm.make_or_fail("telling how the job stands", describe)
    return job


def _job(engine: Any, data: DataPosition, states: Mapping[str, Any]) -> dict[str, Any]:
    """All that the ranks count alike."""
    optimizer, scheduler = engine.basic_optimizer, engine.lr_scheduler
    return {
        "attributes": {name: getattr(engine, name) for name in _COUNTED},
        "batch_size": engine.train_batch_size(),
        "passed": data.passed,
        "counters": counters_of(engine),
        "options": [options_of(group) for group in optimizer.param_groups] if optimizer else [],
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "states": {name: holder.state_dict() for name, holder in states.items()},
    }


def learn(engine: Any, data: DataPosition, job: Mapping[str, Any]) -> None:
    """On a rank that was away."""
    data.others_took(job["passed"])
    if engine.train_batch_size() != job["batch_size"]:
        engine.set_train_batch_size(job["batch_size"])
    for name, value in job["attributes"].items():
        setattr(engine, name, value)
    restore_counters(engine, job["counters"], same_partition=True)
    for group, options in zip(engine.basic_optimizer.param_groups if job["options"] else (), job["options"]):
        group.update(options)
    if job["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(job["scheduler"])


def load_states(job: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """On every rank, as when a job is resumed: what a rank kept of them for itself went with it."""
    for name, holder in states.items():
        holder.load_state_dict(job["states"][name])
