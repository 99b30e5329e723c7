"""Describe what a job does: ranks of another launch can join it if theirs does the same.

Ranks that join become stages of the job, which wait to be called like parked ones; ``join_server`` admits them. The
store of the job's launch shows its name to everybody, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.checkpoint.initial_model import InitialModelSpec
from ds_dynmo.engine.comm.bounded import BoundedStore
from ds_dynmo.engine.deepspeed_adapter.settings import settings_of
from ds_dynmo.engine.elastic.world import World
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import ConfigError

_JOB = "ds_dynmo/job"  # in the store of a launch: the name of the job that it runs now
_FORMAT = 3  # of what ranks of several launches send each other
_OWN_KEYS = {"dynmo", "steps_per_print"}  # of DeepSpeed's configuration: each launch has its own
_OWN_BLOCK_KEYS = {"initial_partition", "report", "log", "monitor"}  # likewise of the "dynmo" block


@dataclass(frozen=True)
class JobSpec:
    """What ranks compare before they join.

    Attributes:
        axes: the size of each axis of its launch, by name, in order.
        traits: by name, a short text or a digest of what all of its ranks have in common.
    """

    axes: dict[str, int]
    traits: dict[str, str]

    def differences(self, other: JobSpec) -> list[str]:
        """Name what differs in ``other``, so that its ranks cannot take part."""
        across = {axis: size for axis, size in self.axes.items() if axis != "pipe"}
        there = {axis: size for axis, size in other.axes.items() if axis != "pipe"}
        found = [f"its axes beside the stages are {across}, here they are {there}"] if across != there else []
        names = sorted({*self.traits, *other.traits})
        return found + [name for name in names if self.traits.get(name) != other.traits.get(name)]


def job_spec_of(stage: StageContext, world: World, initial_model: InitialModelSpec) -> JobSpec:
    """Describe the job that this rank is a part of."""
    settings = {key: value for key, value in settings_of(stage.engine).items() if key not in _OWN_KEYS}
    settings["dynmo"] = stage.config.model_dump(mode="json", exclude=_OWN_BLOCK_KEYS)
    origins = {index: asdict(origin) for index, origin in initial_model.layers.items()}
    return JobSpec(
        world.axes,
        {
            "ds_dynmo": str(_FORMAT),
            "the accelerator": get_accelerator().device_name(),
            "the backend": world.backend,
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "the optimizer": type(stage.engine.basic_optimizer).__name__,
            "the layers": _digest(
                [initial_model.placement.num_layers, sorted((i, repr(of)) for i, of in origins.items())]
            ),
            **{f'"{key}" in the configuration': _digest(value) for key, value in settings.items()},
        },
    )


def _digest(value: Any) -> str:
    """Hash a value: nothing of a configuration itself goes into the store."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def new_job_name() -> str:
    """Draw a name that no other job has: a launcher may start a job again on the same store."""
    return uuid.uuid4().hex


def publish_job(launch_store: BoundedStore, name: str) -> None:
    """Write the name of this job, which can be joined, into the store of the launch. Rank 0 does this."""
    launch_store.set(_JOB, name)


def withdraw_job(launch_store: BoundedStore) -> None:
    """Delete what :func:`publish_job` wrote."""
    with suppress(RuntimeError):  # the store went with the job
        launch_store.delete_key(_JOB)


def find_job(launch_store: BoundedStore, timeout_seconds: float) -> str:
    """Read the name of the job that a launch runs. Anybody may have written it: it is used as a name alone.

    Raises:
        ConfigError: it runs none that can be joined.
    """
    try:
        launch_store.wait([_JOB], timedelta(seconds=timeout_seconds))
        name = launch_store.get(_JOB).decode()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the launch runs no job that can be joined (dynmo.repack.accept_joins = true), or had not begun it within "
            f"{timeout_seconds:g} s"
        ) from error
    if not re.fullmatch(r"[0-9a-f]{32}", name):
        raise ConfigError(f"the launch runs a job of another version: {name[:40]!r}")
    return name


def check_fits(job: JobSpec, own: JobSpec) -> None:
    """Refuse to join a job that does something else.

    Raises:
        ConfigError: says what differs.
    """
    differ = job.differences(own)
    if differ:
        raise ConfigError(refusal(differ))


def refusal(differences: Sequence[str]) -> str:
    """Say why a launch does not fit."""
    return f"the job does something else. What differs: {', '.join(differences)}"
