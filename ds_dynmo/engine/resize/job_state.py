"""The state of a job for recalled ranks: counters that are the same on all ranks, and shared states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.comm.objects import to_bytes
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.resize.data_position import DataPosition
from ds_dynmo.engine.state.parameter_groups import options_of


class Stateful(Protocol):
    """State that a recalled rank loads from the others."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def describe_job(
    engine: DeepSpeedPipeline,
    comm: Communicator,
    data: DataPosition,
    progress: Stateful,
    states: Mapping[str, Stateful],
) -> bytes:
    """Pickle the state of the job on rank 0; empty elsewhere. Collective.

    Args:
        progress: counters that are the same on every rank.
        states: the shared states by name; their ``state_dict`` may be collective.

    Raises:
        MigrationError: harmless; a rank failed, or shares other states than rank 0.
    """
    comm.everywhere("engine.share_state is called alike, in one order", lambda: list(states), same=str)

    def describe() -> bytes:
        job = _job(engine, data, progress, states)  # on every rank: a holder may gather
        return to_bytes(job) if comm.here.rank == 0 else b""

    return comm.everywhere("describing the job", describe)


def _job(
    engine: DeepSpeedPipeline, data: DataPosition, progress: Stateful, states: Mapping[str, Stateful]
) -> dict[str, Any]:
    optimizer, scheduler = engine.basic_optimizer, engine.lr_scheduler
    return {
        "progress": progress.state_dict(),
        "batch_size": engine.train_batch_size(),
        "passed": data.passed,
        "options": [options_of(group) for group in optimizer.param_groups] if optimizer else [],
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "states": {name: holder.state_dict() for name, holder in states.items()},
    }


def restore_job(engine: DeepSpeedPipeline, data: DataPosition, progress: Stateful, job: Mapping[str, Any]) -> None:
    """Load the state of the job on a recalled rank."""
    data.others_took(job["passed"])
    if engine.train_batch_size() != job["batch_size"]:
        engine.set_train_batch_size(job["batch_size"])
    progress.load_state_dict(job["progress"])
    for group, options in zip(engine.basic_optimizer.param_groups if job["options"] else (), job["options"]):
        group.update(options)
    if job["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(job["scheduler"])


def load_states(job: Mapping[str, Any], states: Mapping[str, Stateful]) -> None:
    """Load the shared states on every rank, as from a checkpoint: the part of released ranks would be missing."""
    for name, holder in states.items():
        holder.load_state_dict(job["states"][name])
