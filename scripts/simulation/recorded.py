"""Recordings of real training: what ``ds-dynmo-train --record`` writes, read as a load model.

A recording is a file of JSON lines. The first is its header; each other line is an iteration, with lists that have an
entry per layer. A list that is the same as in the line before is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import numpy as np

from ds_dynmo.errors import ConfigError, reason_of
from simulation.load_models import LOAD_MODELS, LoadModel
from simulation.phases import Phase

CASE_HELP = f"one of {', '.join(LOAD_MODELS)}, or with --recorded of its cases; default: all; may be repeated"
UNDIVIDED_HELP = "recorded slices of a vocabulary and halves of blocks are one layer for every balancer"
RECORDED_HELP = "what ds-dynmo-train --record wrote, in place of the load models; may be repeated"
KIND = "recording"
FORWARD, BACKWARD, TRAINABLE = "forward_us", "backward_us", "trainable_parameters"
NUMBERS = (FORWARD, BACKWARD, TRAINABLE, "parameters", "static_bytes")  # per layer; load signals may be null too
HEADER = {"case": None, "interval": 0, "layers": 1, "stages": 1}  # keys that are read: the least number; None: a name
FIRST = 5  # iterations at most, whose median is the model before it changes


@dataclass(frozen=True)
class Iteration:
    """One recorded iteration, per layer.

    Attributes:
        forward, backward: microseconds per micro-batch.
        trainable: parameters that train.
        changed: it is the first one after the model said that its work had changed.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    trainable: tuple[float, ...]
    changed: bool

    def merged(self, begins: Sequence[int]) -> Iteration:
        """Add up layers, from each of ``begins`` up to the next."""
        forward, backward, trainable = (
            tuple(np.add.reduceat(part, begins[:-1]).tolist()) for part in (self.forward, self.backward, self.trainable)
        )
        return Iteration(forward, backward, trainable, self.changed)


@dataclass(frozen=True)
class Recorded(LoadModel):
    """A recorded run as a load model, with the interval that it was trained with.

    A share of 1 is the mean layer of the first iterations: the first :data:`FIRST`, or those before the first change.
    At interval 1 they are one phase, their median, and every later iteration is a phase as it was recorded. At others a
    phase is the median of consecutive iterations, each layer by itself, between which the model announced no change.
    A run's first phase counts as announced: the first profile places the layers (``initial_partition`` "profile").

    Attributes:
        whole: where layers of the undivided model begin, and where the last one ends: slices of its vocabulary and
            halves of its blocks are layers of a recording too.
    """

    random: ClassVar[bool] = False

    path: Path = Path()
    iterations: tuple[Iteration, ...] = ()
    whole: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Read a recording.

        Raises:
            ConfigError: a file that cannot be read, is no recording, was cut off, or has iterations of other layers.
        """
        header, *records = _objects(path)
        if header.get("kind") != KIND:
            raise ConfigError(f"{path}: is not a recording: its first line is not the header that --record writes")
        _check_header(path, header)
        layers, iterations, known = header["layers"], [], dict[str, Any]()
        for number, record in enumerate(records, start=2):
            if type(record.get("step")) is not int or record["step"] <= known.get("step", 0):
                raise ConfigError(f"{path}, line {number}: is not a later step of the same recording")
            known |= record
            _check(f"{path}, line {number}", known, layers)
            forward, backward, trainable = (tuple(known[key]) for key in (FORWARD, BACKWARD, TRAINABLE))
            iterations.append(Iteration(forward, backward, trainable, changed="changed" in record))
        if len(iterations) <= FIRST:
            raise ConfigError(f"{path}: holds {len(iterations)} iterations, should be more than {FIRST}")
        return cls(
            name=header["case"],
            interval=header["interval"] or len(iterations),
            layers=layers,
            stages=header["stages"],
            replicas=1,
            path=path,
            iterations=tuple(iterations),
            whole=tuple(header.get("whole_layers", range(layers + 1))),
        )

    def undivided(self) -> Recorded:
        """Return the recording with the costs of slices and halves added up to those of whole layers."""
        whole, layers = tuple(range(len(self.whole))), len(self.whole) - 1
        return replace(
            self, layers=layers, whole=whole, iterations=tuple(one.merged(self.whole) for one in self.iterations)
        )

    def whole_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return where layers of the undivided model begin."""
        self._check_layers(num_layers)
        return self.whole

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        """Return every iteration at interval 1, else phases of at most a ``count``-th of the recording."""
        self._check_layers(num_layers)
        if self.interval == 1:
            return self._each
        longest = math.ceil(len(self.iterations) / count)
        begins = [number for number, iteration in enumerate(self.iterations) if iteration.changed or number == 0]
        ends = [*begins[1:], len(self.iterations)]
        return [
            self._phase(self.iterations[place : min(place + longest, end)])
            for begin, end in zip(begins, ends)
            for place in range(begin, end, longest)
        ]

    def turns(self, num_layers: int, count: int, size: int, *, seed: int = 0) -> list[list[Phase]]:
        """Spread the turns evenly over the recording."""
        self._check_layers(num_layers)
        last = len(self._each) - size - 1
        if last < 0:
            raise ConfigError(f"{self.path}: holds {len(self.iterations)} iterations, too few for {size} in a row")
        begins = [round(number * last / max(1, count - 1)) for number in range(count)]
        return [self._each[begin : begin + size + 1] for begin in begins]

    def dense(self, num_layers: int) -> Phase:
        """Return the loads at the beginning: the median of the first iterations."""
        self._check_layers(num_layers)
        return self._each[0]

    @property
    def unit_us(self) -> float:
        """The microseconds of a share of 1."""
        return self._units[0]

    @cached_property
    def _each(self) -> list[Phase]:
        """The first iterations as one phase, and each later one."""
        first = len(self._first)
        return [self._phase(self._first), *(self._phase([iteration]) for iteration in self.iterations[first:])]

    @cached_property
    def _first(self) -> tuple[Iteration, ...]:
        """The iterations before the model changes."""
        changes = (number for number, iteration in enumerate(self.iterations) if iteration.changed and number)
        return self.iterations[: min(FIRST, next(changes, FIRST))]

    @cached_property
    def _units(self) -> tuple[float, float]:
        """The microseconds of a share of 1, and the parameters of the largest layer."""
        unit = fmean(fmean(iteration.forward) + fmean(iteration.backward) for iteration in self._first) / 3
        return unit, max(max(iteration.trainable) for iteration in self.iterations)

    def _phase(self, iterations: Sequence[Iteration]) -> Phase:
        unit, largest = self._units
        forward, backward = (
            tuple(map(median, zip(*lists)))
            for lists in zip(*((iteration.forward, iteration.backward) for iteration in iterations))
        )
        return Phase(
            len(iterations),
            tuple(value / unit for value in forward),
            tuple(value / (2 * unit) for value in backward),
            tuple(value / largest for value in iterations[-1].trainable),
            announced=iterations[0].changed or iterations[0] is self.iterations[0],
        )

    def _check_layers(self, num_layers: int) -> None:
        if num_layers != self.layers:
            raise ConfigError(f"--layers {num_layers}: {self.path} is a recording of {self.layers} layers")


def chosen_load_models(
    names: Sequence[str] | None, recorded: Sequence[Path] | None, *, undivided: bool = False
) -> list[LoadModel]:
    """Return the load models of the cases called ``names``, or all: of recordings, or else of the paper's formulas.

    Args:
        recorded: files, and folders that hold ``*.jsonl``.
        undivided: slices and halves of recorded layers are one layer.

    Raises:
        ConfigError: a folder without a recording, a name that none has; else as :meth:`Recorded.read`.
    """
    load_models = [*LOAD_MODELS.values()] if recorded is None else recordings(recorded, undivided=undivided)
    if missing := set(names or ()) - {load_model.name for load_model in load_models}:
        have = ", ".join(load_model.name for load_model in load_models)
        raise ConfigError(f"--case {missing.pop()}: there are {'' if recorded is None else 'recordings of '}{have}")
    if recorded is None and names:
        return [LOAD_MODELS[name] for name in names]
    return [load_model for load_model in load_models if not names or load_model.name in names]


def recordings(paths: Iterable[Path], *, undivided: bool) -> list[LoadModel]:
    """Read recordings: files, and those in folders."""
    load_models = list[LoadModel]()
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"--recorded {path}: the folder holds no *.jsonl")
        read = [Recorded.read(file) for file in files]
        load_models += [recorded.undivided() for recorded in read] if undivided else read
    return load_models


def _objects(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from error
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            objects.append(dict(json.loads(line)))
        except (TypeError, ValueError) as error:
            torn = number == len(lines) > 1
            why = "the last one, is torn: remove it" if torn else "is not a JSON object: this is not a recording"
            raise ConfigError(f"{path}: line {number}, {why}") from error
    if not objects:
        raise ConfigError(f"{path}: is not a recording: it is empty")
    return objects


def _check_header(path: Path, header: dict[str, Any]) -> None:
    if lacks := [key for key in HEADER if key not in header]:
        raise ConfigError(f"{path}: its header lacks {', '.join(lacks)}")
    for key, least in HEADER.items():
        value = header[key]
        if least is None and not isinstance(value, str):
            raise ConfigError(f"{path}: its header has {key} = {value!r}: should be a name")
        if least is not None and (type(value) is not int or value < least):
            raise ConfigError(f"{path}: its header has {key} = {value!r}: should be an integer, at least {least}")
    whole = header.get("whole_layers", [0, header["layers"]])
    if (
        not isinstance(whole, list)
        or any(type(one) is not int for one in whole)
        or not _divides(whole, header["layers"])
    ):
        raise ConfigError(
            f"{path}: its header has whole_layers = {whole!r}: should be increasing layer numbers, from 0 to "
            f"{header['layers']}"
        )


def _divides(begins: Sequence[int], layers: int) -> bool:
    """Return whether ``begins`` increase from 0 to ``layers``."""
    return begins[:1] == [0] and begins[-1] == layers and all(one < next_ for one, next_ in zip(begins, begins[1:]))


def _check(where: str, known: dict[str, Any], layers: int) -> None:
    for key in NUMBERS:
        values = known.get(key)
        if not isinstance(values, list):
            raise ConfigError(f"{where}: has no list {key}, and none came before it")
        if len(values) != layers:
            raise ConfigError(f"{where}: {key} has {len(values)} layers, the recording has {layers}")
        if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in values):
            raise ConfigError(f"{where}: {key} = {values}: should be finite numbers, none of them negative")
