"""The "repack" object in the "dynmo" section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ds_dynmo.config.section import Section


class KubernetesConfig(Section):
    """How pods are released: the "kubernetes" object in the "repack" object.

    Credentials are those that Kubernetes gives the pod; none are configured.
    """

    action: Literal["delete_pod", "resize"] = Field(
        default="delete_pod",
        description='"delete_pod": the pod of a released rank is deleted; "resize": its container is given resources',
    )
    dry_run: bool = Field(default=True, description="true: the API server checks requests and carries out none")
    namespace: str | None = Field(default=None, min_length=1, description="namespace of the pods; null: this pod's own")
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


class RepackConfig(Section):
    """Re-packing a model whose work has shrunk onto fewer ranks: the "repack" object in the "dynmo" section."""

    enabled: bool = Field(default=False, description="true: re-pack at decisions; false: only by engine.repack")
    planner: Literal["throughput", "first_fit"] = Field(
        default="throughput",
        description='"throughput": the fewest stages that are as fast as the start of the run, less max_slowdown; '
        '"first_fit": the paper\'s algorithm 2, by memory alone, which needs memory_limit',
    )
    min_stages: int = Field(
        default=1, ge=1, description="fewest stages that a planner chooses; engine.repack may go below"
    )
    max_slowdown: float = Field(
        default=0.05, ge=0, lt=1, description="largest loss of throughput against the start of the run, as a fraction"
    )
    release: Literal["exit", "checkpoint", "command", "kubernetes"] = Field(
        default="exit",
        description='what happens to a released rank: "exit": its process ends; "checkpoint": all ranks stop after a '
        'checkpoint, to be launched again; "command": its process ends and a program of yours is called; '
        '"kubernetes": its process ends and its pod is released',
    )
    checkpoint: str | None = Field(
        default=None, min_length=1, description='for release "checkpoint": the folder for it'
    )
    command: tuple[str, ...] | None = Field(
        default=None, description='for release "command": the program and its arguments; it gets JSON on standard input'
    )
    kubernetes: KubernetesConfig = Field(
        default=KubernetesConfig(), description='for release "kubernetes": what happens to pods'
    )
    release_delay_seconds: float = Field(
        default=5.0,
        ge=0,
        description="how long the process of a released rank may take to end, after its script, before the policy acts",
    )
    release_timeout_seconds: float = Field(
        default=60.0, gt=0, description="how long a program of yours, or one request, may take"
    )

    @field_validator("command", mode="before")
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
