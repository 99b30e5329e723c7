"""The "dynmo" section itself, and its smaller objects."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ds_dynmo.config.explain import suggest
from ds_dynmo.config.keep_together import parse_keep_together
from ds_dynmo.config.memory_limit import parse_memory_limit
from ds_dynmo.config.repack import RepackConfig
from ds_dynmo.config.section import Section
from ds_dynmo.config.type_partition import TYPE_PREFIX, parse_type_partition
from ds_dynmo.errors import PartitionError
from ds_dynmo.layer_groups import KeepRule
from ds_dynmo.placement import Placement

NAMED_PARTITIONS = ("uniform", "parameters", "profile")


class ProfileConfig(Section):
    """How per-layer costs are measured: the "profile" object in the "dynmo" section."""

    batches: int = Field(default=1, ge=1, description="how many batches a profile takes: the last before a decision")
    warmup_batches: int = Field(
        default=1, ge=0, description="how many batches are skipped before a profile, after the start and after a move"
    )


class RandomnessConfig(Section):
    """What random draws in a layer, such as dropout, depend on: the "randomness" object in the "dynmo" section."""

    per_layer: bool = Field(
        default=True,
        description="true: random numbers in a layer depend on seed, step, micro-batch, layer number and data-parallel "
        "index, wherever the layer is; false: on the rank's generators",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**64,
        description="seed of these numbers; null: the PipelineModule's base_seed, if it is not 1234, its default; else "
        "that of torch on rank 0 at initialize, which checkpoints save: a resumed run keeps that",
    )


class ScheduleConfig(Section):
    """In which order a stage runs its passes: the "schedule" object in the "dynmo" section."""

    kind: Literal["auto", "1f1b", "zero_bubble", "v", "loop"] = Field(
        default="1f1b",
        description='"1f1b": DeepSpeed\'s order; "zero_bubble": backward passes in two parts, in the order that is '
        'shortest by what was measured; "v", "loop": the same with two chunks of layers per stage, down the stages and '
        'back up, or down them twice; "auto": which of these is predicted to be the shortest',
    )
    memory: float = Field(
        default=1.0,
        ge=1,
        description="at least 1: how much a rank may hold for passes in flight, as a multiple of what the largest "
        "stage holds under 1F1B",
    )


class MigrationConfig(Section):
    """How layers move after an automatic decision: the "migration" object in the "dynmo" section."""

    kind: Literal["blocking", "background"] = Field(
        default="background",
        description='"blocking": between two batches, while training waits; "background": while the next batch trains, '
        "and in place before its optimizer step",
    )


class CheckpointConfig(Section):
    """How checkpoints are written: the "checkpoint" object in the "dynmo" section."""

    kind: Literal["blocking", "background"] = Field(
        default="blocking",
        description='"blocking": training waits until a checkpoint is written; "background": it waits until its state '
        "is copied to host memory, and goes on while a thread writes the copy",
    )
    keep: int | None = Field(
        default=None,
        ge=1,
        description="checkpoints of a run that stay in a folder; older ones named global_stepN are removed once a new "
        "one is whole; null: all stay",
    )


class TraceConfig(Section):
    """Which batches are traced, for Perfetto: the "trace" object in the "dynmo" section."""

    path: str = Field(min_length=1, description="file that rank 0 writes, in Chrome's trace format")
    steps: tuple[int, int] = Field(description="[first, last] batch that is traced, counted from 1")

    @field_validator("steps", mode="before")
    @classmethod
    def _first_and_last(cls, steps: Any) -> tuple[int, int]:
        if isinstance(steps, list | tuple) and len(steps) == 2 and all(type(step) is int for step in steps):
            first, last = steps
            if 1 <= first <= last:
                return first, last
        raise ValueError("should be [first, last], two ints with 1 <= first <= last")


class DynMoConfig(Section):  # a validator sees only the keys above its own: the order of keys matters
    """The "dynmo" section. Every key has a default and a ``description``.

    Build it with :func:`read_dynmo_config` or :func:`parse_section`, which raise :class:`ConfigError`. The constructor
    raises pydantic's ``ValidationError``, which is a ``ValueError`` too.
    """

    enabled: bool = Field(
        default=True,
        description="false: layers stay at initial_partition, and engine.rebalance and engine.repack are refused",
    )
    interval: int = Field(default=100, ge=0, description="steps between automatic decisions; 0: only on request")
    start_step: int = Field(default=0, ge=0, description="first step at which an automatic decision may be due")
    stop_step: int | None = Field(
        default=None, ge=0, description="last such step, at least start_step; null: there is no last one"
    )
    balancer: str = Field(
        default="makespan",
        description='"makespan": the shortest simulated iteration; "partition" or "diffusion": the smallest '
        'bottleneck; or a name that you registered; or "module:function", which imports yours; with balance_by '
        '"parameters" the default is "partition"',
    )
    balance_by: Literal["time", "parameters"] = Field(
        default="time",
        description='cost of a layer: the "time" that was measured, or its trainable "parameters"; "makespan" needs '
        '"time"',
    )
    profile: ProfileConfig = Field(default=ProfileConfig(), description="how per-layer costs are measured")
    min_improvement: float = Field(
        default=0.03,
        ge=0,
        lt=1,
        description="least predicted fall of the bottleneck, as a fraction, that is worth a move; with balancer "
        '"makespan", or where the bottleneck stays the same, of the seconds of an iteration',
    )
    memory_limit: int | float | None = Field(
        default=None,
        description="per rank, for training and the peak of a move: an int is bytes, a float in (0, 1] a fraction of "
        'the device\'s memory; or a string such as "30GiB", "30GB" or "80%"',
    )
    repack: RepackConfig = Field(
        default=RepackConfig(), validate_default=True, description="fewer ranks for a model whose work has shrunk"
    )
    initial_partition: tuple[int, ...] | str | None = Field(
        default=None,
        description='boundaries such as [0, 3, 8], "uniform", "parameters", "profile" or '
        '"type:<regex>[:weight][|<regex>[:weight]...]"; null: the partition that the model was built with; "profile": '
        "as null, and layers move after the first profile",
    )
    keep_together: tuple[KeepRule, ...] = Field(
        default=(),
        description="where no partition cuts: inside runs of layers such as [6, 7], and directly before layers whose "
        'class name "type:REGEX" matches',
    )
    rank_attributes: tuple[str, ...] = Field(
        default=(),
        description="names of attributes, in any module of a layer, that belong to the rank: they do not travel, and a "
        "layer that arrives has the values with which it is built there",
    )
    randomness: RandomnessConfig = Field(
        default=RandomnessConfig(), description="what random draws in a layer depend on"
    )
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(), description="in which order a stage runs its passes; a string is its kind"
    )
    migration: MigrationConfig = Field(
        default=MigrationConfig(), description="how layers move after an automatic decision; a string is its kind"
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="how checkpoints are written; a string is its kind"
    )
    compile: bool = Field(
        default=False,
        description="true: torch compiles each layer (nn.Module.compile), where it is and again where it arrives",
    )
    timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        description="how long ranks that have begun the same operation of ds_dynmo wait for each other, a request for "
        "the launch's store, and a release for processes to end; a rank that is silent for longer is lost",
    )
    report: str | None = Field(
        default=None,
        min_length=1,
        description="file to which rank 0 writes JSON lines, for each decision, outcome and profile; null: none",
    )
    log: bool = Field(default=True, description="true: rank 0 logs a line for each move and re-packing")
    monitor: bool = Field(
        default=True,
        description="true: DeepSpeed's monitor (TensorBoard, W&B, CSV) gets numbers, under DynMo/",
    )
    trace: TraceConfig | None = Field(default=None, description="which batches are traced, for Perfetto; null: none")

    @model_validator(mode="before")
    @classmethod
    def _default_balancer(cls, section: Any) -> Any:
        """Choose "makespan" for time, the paper's "partition" for parameters."""
        if isinstance(section, dict) and section.get("balancer") is None:
            return {**section, "balancer": "partition" if section.get("balance_by") == "parameters" else "makespan"}
        return section

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
        from ds_dynmo.partitioners.registry import get  # here, so that reading a section needs no numpy

        get(balancer)
        return balancer

    @field_validator("balance_by")
    @classmethod
    def _time_for_makespan(cls, balance_by: str, info: ValidationInfo) -> str:
        if balance_by != "time" and info.data.get("balancer") == "makespan":
            raise ValueError('should be "time": balancer "makespan" minimises the time of an iteration')
        return balance_by

    @field_validator("memory_limit", mode="plain")
    @classmethod
    def _bytes_or_fraction(cls, limit: Any) -> int | float | None:
        return parse_memory_limit(limit)

    @field_validator("schedule", "migration", "checkpoint", mode="before")
    @classmethod
    def _kind_alone(cls, section: Any) -> Any:
        """Take a string for the object that has only this kind."""
        return {"kind": section} if isinstance(section, str) else section

    @field_validator("rank_attributes", mode="before")
    @classmethod
    def _attribute_names(cls, names: Any) -> tuple[str, ...]:
        if isinstance(names, list | tuple) and all(isinstance(name, str) and name.isidentifier() for name in names):
            return tuple(names)
        raise ValueError('should be a list of attribute names, such as ["_args"]')

    @field_validator("repack")
    @classmethod
    def _memory_for_first_fit(cls, repack: RepackConfig, info: ValidationInfo) -> RepackConfig:
        if repack.enabled and repack.planner == "first_fit" and info.data.get("memory_limit") is None:
            raise ValueError('planner "first_fit" packs by memory: it needs memory_limit')
        return repack

    @field_validator("keep_together", mode="before")
    @classmethod
    def _runs_and_types(cls, rules: Any) -> tuple[KeepRule, ...]:
        return parse_keep_together(rules)

    @field_validator("initial_partition", mode="before")
    @classmethod
    def _boundaries_or_method(cls, partition: Any) -> tuple[int, ...] | str | None:
        if partition is None:
            return None
        if isinstance(partition, str):
            if partition.startswith(TYPE_PREFIX):
                parse_type_partition(partition)
            elif partition not in NAMED_PARTITIONS:
                raise ValueError(f"is not a way to partition; {suggest(partition, (*NAMED_PARTITIONS, TYPE_PREFIX))}")
            return partition
        if not isinstance(partition, list | tuple) or any(type(bound) is not int for bound in partition):
            raise ValueError("should be null, a string or a list of ints")
        try:
            return Placement.chain(partition).boundaries
        except PartitionError as error:
            raise ValueError("should be two or more boundaries, strictly increasing from 0") from error
