"""How ranks of another launch come into a running job: as stages of it that wait to be called, like parked ones.

The job says over the store of its launch what it is. Whoever wants to join finds out whether it would fit in, takes the
next free numbers of stages, gives up its own layers and its own world, and says where it runs.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.elastic.release import Place
from ds_dynmo.engine.elastic.world import World, part_of
from ds_dynmo.errors import ConfigError

_JOB = "ds_dynmo/job"  # in the store of a launch: the name of the job that it runs now
_FORMAT = 1  # of what ranks tell each other here
_EACH_LAUNCHS_OWN = {"dynmo", "steps_per_print"}  # of DeepSpeed's configuration
_OF_BLOCK_TOO = {"initial_partition", "report", "log", "monitor"}  # likewise of the "dynmo" block


@dataclass(frozen=True)
class Job:
    """What a job is.

    Attributes:
        axes: the size of each axis of its launch, by name, in order.
        traits: by name, what every rank of it has to have in common, in short.
    """

    axes: dict[str, int]
    traits: dict[str, str]

    def differences(self, other: Job) -> list[str]:
        """Where ``other`` could not take part, in words."""
        across = {axis: size for axis, size in self.axes.items() if axis != "pipe"}
        there = {axis: size for axis, size in other.axes.items() if axis != "pipe"}
        found = [f"its axes beside the stages are {across}, here they are {there}"] if across != there else []
        names = sorted({*self.traits, *other.traits})
        return found + [name for name in names if self.traits.get(name) != other.traits.get(name)]


def job_of(engine: Any, world: World) -> Job:
    """The job that this engine is a part of."""
    settings = {key: value for key, value in _settings(engine).items() if key not in _EACH_LAUNCHS_OWN}
    settings["dynmo"] = engine.dynmo.model_dump(mode="json", exclude=_OF_BLOCK_TOO)
    origins = {index: asdict(origin) for index, origin in engine._origin.layers.items()}
    return Job(
        world.axes,
        {
            "ds_dynmo": str(_FORMAT),
            "the accelerator": get_accelerator().device_name(),
            "the backend": world.backend,
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "the optimizer": type(engine.basic_optimizer).__name__,
            "the layers": _digest([engine._layers.num_layers, sorted((i, repr(of)) for i, of in origins.items())]),
            **{f'"{key}" in the configuration': _digest(value) for key, value in settings.items()},
        },
    )


def _settings(engine: Any) -> dict[str, Any]:
    """DeepSpeed's configuration as it was given. Private; read in DeepSpeed 0.19.8, runtime/config.py."""
    settings: dict[str, Any] = engine._config._param_dict
    return settings


def _digest(value: Any) -> str:
    """Nothing of a configuration itself goes into the store."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def new_name() -> str:
    """Of a job, as no other has it: a launcher may start a job again on the same store."""
    return uuid.uuid4().hex


def announce(launch_store: Any, name: str, job: Job) -> None:
    """Say in the store of the launch that it runs this job. Rank 0 does this."""
    part_of(launch_store, name).set("what", json.dumps(asdict(job)))
    launch_store.set(_JOB, name)


def find(launch_store: Any, timeout_seconds: float) -> tuple[Any, Job]:
    """The job that a launch runs: its part of the launch's store, and what it is.

    Raises:
        ConfigError: it runs none.
    """
    try:
        launch_store.wait([_JOB], timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise ConfigError(
            f"the launch runs no job of ds_dynmo, or had not begun it within {timeout_seconds:g} s"
        ) from error
    store = part_of(launch_store, launch_store.get(_JOB).decode())
    try:
        return store, Job(**json.loads(store.get("what").decode()))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"the launch runs a job of another version, or has just ended it ({error})") from error


def take_numbers(store: Any, job: Job, count: int) -> int:
    """The first of so many stages that join; each number is given once."""
    return job.axes["pipe"] + int(store.add("joined", count)) - count


def say_where(store: Any, place: Place) -> None:
    """This rank, which joined, can be called."""
    store.set(f"place/{place.rank}", json.dumps(place.as_record()))


def arrivals(store: Any, world: World, known: Mapping[int, Place]) -> tuple[list[int], list[Place]]:
    """The stages that have joined, all of whose ranks can be called, and where those run; without ``known`` ranks."""
    first = world.axes["pipe"]
    stages, places = [], []
    for stage in range(first, first + int(store.add("joined", 0))):
        homes = world.homes([stage])
        if homes[0] not in known and store.check([f"place/{home}" for home in homes]):
            with suppress(TypeError, ValueError):  # what cannot be read has not joined
                places += [Place(**json.loads(store.get(f"place/{home}").decode())) for home in homes]
                stages.append(stage)
    return stages, places


def check_fits(job: Job, own: Job) -> None:
    """Refuse to join what does something else.

    Raises:
        ConfigError: says what differs.
    """
    differ = job.differences(own)
    if differ:
        raise ConfigError(f"the job does something else. What differs: {', '.join(differ)}")
