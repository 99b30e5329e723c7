"""The "dynmo" block of the DeepSpeed JSON, as frozen pydantic models that refuse unknown keys and loose types.

Nothing here imports torch or DeepSpeed, so a configuration can be checked before anything is started.
:func:`parse_block` turns any object into any such model with errors that name the full key path.
"""

from __future__ import annotations

import base64
import difflib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ds_dynmo.errors import ConfigError

__all__ = [
    "DynMoConfig",
    "KubernetesConfig",
    "ProfileConfig",
    "RandomnessConfig",
    "RepackConfig",
    "TraceConfig",
    "load_json",
    "parse_block",
    "parse_type_partition",
    "read_dynmo_config",
]

BLOCK = "dynmo"
NAMED_PARTITIONS = ("uniform", "parameters", "profile")
TYPE_PREFIX = "type:"

Model = TypeVar("Model", bound=BaseModel)


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ProfileConfig(_Block):
    """How per-layer costs are measured: the "profile" object in the "dynmo" block."""

    batches: int = Field(default=1, ge=1, description="how many batches a profile takes")
    warmup_batches: int = Field(
        default=1, ge=0, description="how many batches are skipped before a profile, after the start and after a move"
    )


class RandomnessConfig(_Block):
    """What random draws in a layer, such as dropout, depend on: the "randomness" object in the "dynmo" block."""

    per_layer: bool = Field(
        default=True,
        description="true: on seed, step, micro-batch, layer number and data-parallel index, wherever the layer is; "
        "false: on the rank's own generators",
    )
    seed: int | None = Field(default=None, ge=0, lt=2**64, description="null: the PipelineModule's base_seed")


class TraceConfig(_Block):
    """The measured timeline of some batches, for Perfetto: the "trace" object in the "dynmo" block."""

    path: str = Field(min_length=1, description="file that rank 0 writes, in Chrome's trace format")
    steps: tuple[int, int] = Field(description="[first, last] batch that is traced, counted from 1")

    @field_validator("steps", mode="plain")
    @classmethod
    def _first_and_last(cls, steps: Any) -> tuple[int, int]:
        if isinstance(steps, list | tuple) and len(steps) == 2 and all(type(step) is int for step in steps):
            first, last = steps
            if 1 <= first <= last:
                return first, last
        raise ValueError("should be [first, last], two ints with 1 <= first <= last")


class KubernetesConfig(_Block):
    """How released ranks are given back to Kubernetes: the "kubernetes" object in the "repack" object.

    Credentials are those that Kubernetes gives the pod; none is configured.
    """

    action: Literal["delete_pod", "resize"] = Field(
        default="delete_pod",
        description='"delete_pod": the pod of a released rank is deleted; "resize": its container is given resources',
    )
    dry_run: bool = Field(default=True, description="true: the API server checks requests and carries out none")
    namespace: str | None = Field(default=None, min_length=1, description="of the pods; null: this pod's own")
    container: str | None = Field(
        default=None, min_length=1, description='for "resize": the name of the container; null: the pod\'s first one'
    )
    resources: dict[str, str] = Field(
        default={}, description='for "resize": requests and limits, such as {"cpu": "100m", "memory": "256Mi"}'
    )

    @model_validator(mode="after")
    def _something_to_resize(self) -> KubernetesConfig:
        if (self.action == "resize") != bool(self.resources):
            raise ValueError('action "resize" needs resources, and no other action takes them')
        return self


class RepackConfig(_Block):
    """Fewer ranks for a model whose work has shrunk: the "repack" object in the "dynmo" block."""

    enabled: bool = Field(default=False, description="true: re-pack at decisions; false: by engine.repack alone")
    planner: Literal["throughput", "first_fit"] = Field(
        default="throughput",
        description='"throughput": the fewest stages that are as fast as the run was at its start, less max_slowdown; '
        '"first_fit": the paper\'s algorithm 2, by memory alone',
    )
    min_stages: int = Field(default=1, ge=1, description="never go on with fewer stages")
    max_slowdown: float = Field(
        default=0.05, ge=0, lt=1, description="largest loss of throughput against the start of the run, as a fraction"
    )
    release: Literal["exit", "park", "checkpoint", "command", "kubernetes"] = Field(
        default="exit",
        description='what becomes of a released rank: "exit": its process ends; "park": it waits and can be taken '
        'back; "checkpoint": all ranks stop after a checkpoint, to be launched anew; "command": its process ends and '
        'a program of yours is told; "kubernetes": likewise, its pod is released',
    )
    checkpoint: str | None = Field(
        default=None, min_length=1, description='for release "checkpoint": the folder that it goes to'
    )
    command: tuple[str, ...] | None = Field(
        default=None, description='for release "command": the program and its arguments; it gets JSON on standard input'
    )
    kubernetes: KubernetesConfig = Field(
        default=KubernetesConfig(), description='for release "kubernetes": what becomes of pods'
    )
    release_attempts: int = Field(
        default=5, ge=1, description="how often a release is tried that is refused, with longer and longer pauses"
    )
    release_timeout_seconds: float = Field(default=60.0, gt=0, description="how long one attempt may take")

    @field_validator("command", mode="plain")
    @classmethod
    def _program(cls, command: Any, info: ValidationInfo) -> tuple[str, ...] | None:
        words = command if isinstance(command, list | tuple) else ()
        if command is not None and (not words or not all(isinstance(word, str) and word for word in words)):
            raise ValueError("should be null or a list of one string or more")
        return tuple(words) or None

    @model_validator(mode="after")
    def _what_it_needs(self) -> RepackConfig:
        if (self.release == "checkpoint") != (self.checkpoint is not None):
            raise ValueError('release "checkpoint" needs checkpoint, a folder, and no other release takes one')
        if (self.release == "command") != (self.command is not None):
            raise ValueError('release "command" needs command, a list of strings, and no other release takes one')
        return self


class DynMoConfig(_Block):
    """The "dynmo" block. Every key has a default; each field's ``description`` says what it means.

    Build it with :func:`read_dynmo_config` or :func:`parse_block`, which raise :class:`ConfigError`;
    the constructor itself raises pydantic's ``ValidationError`` (a ``ValueError`` too).
    """

    enabled: bool = Field(default=True, description="false: never profiles, never moves a layer")
    interval: int = Field(default=100, ge=0, description="steps between automatic rebalances; 0: by hand only")
    start_step: int = Field(default=0, ge=0, description="first step at which an automatic rebalance may happen")
    stop_step: int | None = Field(
        default=None, ge=0, description="last such step, at least start_step; null: no last one"
    )
    balancer: str = Field(
        default="partition", description="partition, diffusion, schedule, or the name of a registered balancer"
    )
    balance_by: Literal["time", "parameters"] = Field(default="time", description="what a layer costs")
    decentralized: bool = Field(
        default=False,
        description='neighbours exchange point to point, nothing is gathered; only with balancer "diffusion"',
    )
    profile: ProfileConfig = Field(default=ProfileConfig(), description="how per-layer costs are measured")
    min_improvement: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        description="least predicted fall of the bottleneck, as a fraction, that is worth a move; "
        'with balancer "schedule" of an iteration\'s seconds',
    )
    memory_limit: int | float | None = Field(
        default=None, description="per device: an int is bytes, a float in (0, 1] a fraction of the device's memory"
    )
    repack: RepackConfig = Field(
        default=RepackConfig(), validate_default=True, description="fewer ranks for a model whose work has shrunk"
    )
    initial_partition: tuple[int, ...] | str | None = Field(
        default=None,
        description='boundaries such as [0, 3, 8], "uniform", "parameters", "profile" or '
        '"type:<regex>[:weight][|<regex>[:weight]...]"; null: the partition that the model was built with',
    )
    randomness: RandomnessConfig = Field(
        default=RandomnessConfig(), description="what random draws in a layer depend on"
    )
    timeout_seconds: float = Field(default=300.0, gt=0, description="how long a rebalance waits for the other ranks")
    report: str | None = Field(default=None, min_length=1, description="path of the JSON lines that rank 0 writes")
    log: bool = Field(default=True, description="one line per rebalance on rank 0")
    monitor: bool = Field(default=True, description="numbers to DeepSpeed's monitor under DynMo/")
    trace: TraceConfig | None = Field(default=None, description="the measured timeline of some batches; null: none")

    @field_validator("stop_step")
    @classmethod
    def _not_before_start(cls, stop_step: int | None, info: ValidationInfo) -> int | None:
        start_step = info.data.get("start_step", 0)
        if stop_step is not None and stop_step < start_step:
            raise ValueError(f"should be at least start_step, {start_step}")
        return stop_step

    @field_validator("balancer")
    @classmethod
    def _registered(cls, balancer: str) -> str:
        from ds_dynmo.partitioners.registry import names  # here, so that reading a block needs no numpy

        known = sorted(names())
        if balancer not in known:
            raise ValueError(f"is no registered balancer; {_suggest(balancer, known)}")
        return balancer

    @field_validator("balance_by")
    @classmethod
    def _time_for_a_schedule(cls, balance_by: str, info: ValidationInfo) -> str:
        if balance_by != "time" and info.data.get("balancer") == "schedule":
            raise ValueError('should be "time": balancer "schedule" minimises the time of an iteration')
        return balance_by

    @field_validator("decentralized")
    @classmethod
    def _only_diffusion(cls, decentralized: bool, info: ValidationInfo) -> bool:
        balancer = info.data.get("balancer", "diffusion")  # absent if it is wrong itself
        if decentralized and balancer != "diffusion":
            raise ValueError(f'needs balancer "diffusion", not "{balancer}"')
        return decentralized

    @field_validator("memory_limit", mode="plain")
    @classmethod
    def _bytes_or_fraction(cls, limit: Any) -> int | float | None:
        if limit is None or (type(limit) is int and limit > 0) or (type(limit) is float and 0 < limit <= 1):
            return limit
        raise ValueError("should be null, an int of bytes > 0 or a float in (0, 1]")

    @field_validator("repack")
    @classmethod
    def _memory_for_first_fit(cls, repack: RepackConfig, info: ValidationInfo) -> RepackConfig:
        if repack.enabled and repack.planner == "first_fit" and info.data.get("memory_limit") is None:
            raise ValueError('planner "first_fit" packs by memory: it needs memory_limit')
        return repack

    @field_validator("initial_partition", mode="plain")
    @classmethod
    def _boundaries_or_method(cls, partition: Any) -> tuple[int, ...] | str | None:
        if partition is None:
            return None
        if isinstance(partition, str):
            if partition.startswith(TYPE_PREFIX):
                parse_type_partition(partition)
            elif partition not in NAMED_PARTITIONS:
                raise ValueError(f"is no way to partition; {_suggest(partition, (*NAMED_PARTITIONS, TYPE_PREFIX))}")
            return partition
        if not isinstance(partition, list | tuple) or any(type(bound) is not int for bound in partition):
            raise ValueError("should be null, a string or a list of ints")
        if len(partition) < 2 or partition[0] != 0 or any(b <= a for a, b in zip(partition, partition[1:])):
            raise ValueError("should be two or more boundaries, strictly increasing from 0")
        return tuple(partition)


def parse_type_partition(text: str) -> tuple[tuple[str, float], ...]:
    """The patterns and weights of ``"type:<regex>[:weight][|<regex>[:weight]...]"``, in the order given.

    A weight is the cost of each layer whose class name (function name, for a plain function) the regular
    expression matches: searched anywhere in the name, ignoring case, as DeepSpeed's ``type:`` does. The
    first pattern that matches counts; a layer that none matches costs 0. ``:`` and ``|`` separate, so a
    regular expression cannot hold either.

    >>> parse_type_partition("type:embed:2|block")
    (('embed', 2.0), ('block', 1.0))

    Raises:
        ConfigError: no ``type:`` in front, a regular expression that does not compile, a weight that is
            not a finite number > 0.
    """
    if not text.startswith(TYPE_PREFIX):
        raise ConfigError(f'should begin with "{TYPE_PREFIX}", got "{text}"')
    return tuple(_parse_type(part) for part in text[len(TYPE_PREFIX) :].split("|"))


def _parse_type(text: str) -> tuple[str, float]:
    pattern, _, weight_text = text.partition(":")
    separators = '":" and "|" separate, a regex cannot hold them'
    if not pattern:
        raise ConfigError(f'no regex in "{text}", should be <regex>[:weight]; {separators}')
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f'"{pattern}" is no regular expression ({error}); {separators}') from error
    if ":" not in text:
        return pattern, 1.0
    try:
        weight = float(weight_text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ConfigError(f'the weight of "{pattern}" should be a number > 0, got "{weight_text}"; {separators}')
    return pattern, weight


def read_dynmo_config(config: str | os.PathLike[str] | dict[str, Any]) -> DynMoConfig | None:
    """The "dynmo" block of a DeepSpeed configuration, None if there is none.

    Args:
        config: what ``deepspeed.initialize`` takes, a path to a JSON file, a dict or the JSON in URL-safe
            base64; or a ``pathlib.Path``.

    Raises:
        ConfigError: a configuration that cannot be read, a wrong block, or a top-level key that looks like a
            misspelt "dynmo". All that is wrong with the block is in the one message, a line each.
    """
    settings = _load_deepspeed_config(config)
    for key in settings:
        if key != BLOCK and isinstance(key, str) and _is_misspelt(key):
            raise ConfigError(f'{key}: unknown top-level key; did you mean "{BLOCK}"?')
    if BLOCK not in settings:
        return None
    return parse_block(DynMoConfig, settings[BLOCK], BLOCK)


def load_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in the file at ``path``.

    Raises:
        ConfigError: no such file, no JSON (comments and trailing commas, which DeepSpeed itself lets pass,
            are none), no object, or a key given twice in one object.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {error}") from error
    return _parse_object(text, os.fspath(path))


def parse_block(model_class: type[Model], data: Any, name: str) -> Model:
    """``data`` as a ``model_class``; ``name`` is its key in the configuration, the head of every key path.

    Raises:
        ConfigError: one line for each thing that is wrong: its full key path, its value, what is allowed.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{name} = {_show(data)}: should be an object, such as {{}} for all defaults")
    try:
        return model_class.model_validate(data)
    except ValidationError as error:
        lines = _explain(error, model_class, data, name)
    raise ConfigError("\n".join(lines))


def _load_deepspeed_config(config: Any) -> dict[str, Any]:
    if isinstance(config, dict):
        return config
    if isinstance(config, os.PathLike) or (isinstance(config, str) and os.path.exists(config)):
        return load_json(config)
    if isinstance(config, str):
        try:
            text = base64.urlsafe_b64decode(config).decode("utf-8")
        except ValueError:
            text = ""
        if text.lstrip().startswith("{"):
            return _parse_object(text, "the base64 DeepSpeed config")
        raise ConfigError(f"{_show(config)}: no such file, and no JSON object in base64 either")
    raise ConfigError(f"a DeepSpeed config should be a path, a dict or a base64 string, got {type(config).__name__}")


def _parse_object(text: str, source: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if duplicates:
            raise ConfigError(f"{source}: keys given more than once in one object: {', '.join(duplicates)}")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: should be plain JSON (no comments, no trailing commas): {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: should hold a JSON object, got {_show(value)}")
    return value


def _is_misspelt(key: str) -> bool:
    """Is ``key`` "dynmo" but for case, punctuation or a letter? No key of DeepSpeed's is."""
    letters = re.sub(r"[\W_]", "", key.lower())
    return difflib.SequenceMatcher(None, letters, BLOCK).ratio() >= 0.8


def _explain(error: ValidationError, model_class: type[BaseModel], data: Any, name: str) -> Iterator[str]:
    """One line per key that is wrong; the branches of a union, each with a complaint of its own, share one."""
    complaints: dict[tuple[int | str, ...], list[Any]] = {}
    for detail in error.errors(include_url=False):
        complaints.setdefault(_key_path(detail["loc"], data, detail["type"]), []).append(detail)
    for path, details in complaints.items():
        dotted = name + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
        owners = _models_at(model_class, path[:-1])
        fields = {key: field for owner in owners for key, field in owner.model_fields.items()}
        description = fields[str(path[-1])].description if path and path[-1] in fields else None
        own_words = details[0]["type"] == "value_error"  # a validator of the model says itself what is allowed
        suffix = f" ({description})" if description and not own_words else ""
        if details[0]["type"] == "missing":
            yield f"{dotted}: is required{suffix}"
        elif details[0]["type"] == "extra_forbidden":
            yield f"{dotted} = {_show(details[0]['input'])}: unknown key; {_suggest(str(path[-1]), fields)}"
        else:
            problem = " or ".join(dict.fromkeys(_problem(detail) for detail in details))
            yield f"{dotted} = {_show(details[0]['input'])}: {problem}{suffix}"


def _problem(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])  # without pydantic's "Value error, "
    if detail["type"] in ("model_type", "model_attributes_type"):
        return "should be an object"
    return str(detail["msg"]).removeprefix("Input ")


def _key_path(loc: tuple[int | str, ...], data: Any, kind: str) -> tuple[int | str, ...]:
    """``loc`` without what pydantic puts in to tell the branches of a union apart: those are not keys of ``data``."""
    path: list[int | str] = []
    for part in loc:
        in_list = isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        known = in_list or (isinstance(data, dict) and part in data)
        if known:
            data = data[part]
        if known or (kind == "missing" and part == loc[-1]):
            path.append(part)
    return tuple(path)


def _models_at(model_class: type[BaseModel], path: Iterable[int | str]) -> list[type[BaseModel]]:
    """The models that the object at ``path`` may be."""
    models = [model_class]
    for key in path:
        if isinstance(key, str):
            fields = [field for model in models for name, field in model.model_fields.items() if key == name]
            models = [model for field in fields for model in _models_in(field.annotation)]
    return models


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _suggest(word: str, known: Iterable[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    nearest = difflib.get_close_matches(word.lower(), by_lower, n=1)
    if nearest:
        return f'did you mean "{by_lower[nearest[0]]}"?'
    return f"should be one of {', '.join(by_lower.values())}"


def _show(value: Any) -> str:
    """``value`` as the JSON has it, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."
