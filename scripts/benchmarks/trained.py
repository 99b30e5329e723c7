"""One of the models of ds_configs as it is trained, and the static partitions that a profile of it says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, quietly, say, timed
from ds_dynmo.models import AUXILIARY_LOSS, LANGUAGE_MODEL_LOSS, dynamic_cases
from ds_dynmo.partitioners import PipelineModel
from simulation.statics import Statics
from train import VALIDATIONS, batches, build_engine, validate
from training.options import Run, prepare

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
SIZES = ("layers", "hidden_size", "heads", "sequence_length", "mlp_ratio", "tied_embedding", "seed", "vocab_size")
FIRST_PROFILE = 3  # batches of the profile that static partitions are taken from


@dataclass
class Trained:
    """An engine with its model's dynamic cases and its text, and what came of its batches."""

    arm: Arm
    run: Run
    cases: Any
    text: Any
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    auxiliary_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def build(cls, name: str, settings: dict[str, Any], steps: int) -> Trained:
        """From a configuration."""
        run = prepare(["--deepspeed_config", name, "--steps", str(steps)], settings)
        engine = quietly(partial(build_engine, run))
        cases = dynamic_cases(run.model, engine, total_steps=run.steps)
        return cls(Arm(name, engine), run, cases, batches(run, engine, "train"))

    @property
    def tokens(self) -> int:
        """In a batch."""
        return int(self.arm.engine.train_batch_size()) * self.run.model.sequence_length

    def batch(self, step: int) -> None:
        """Batch ``step`` of the run, with what the model changes before and after it."""
        for case in self.cases:
            case.before_batch(step)
        self.arm.engine.train_batch(self.text.iterate(step * self.arm.engine.micro_batches))
        for case in self.cases:
            case.after_batch(step + 1)

    def timed_batch(self, step: int) -> None:
        """One more batch of the record."""
        self.seconds.append(timed(partial(self.batch, step)))
        losses = self.arm.engine.get_additional_losses()
        self.losses.append(float(losses[LANGUAGE_MODEL_LOSS]))
        self.auxiliary_losses.append(float(losses[AUXILIARY_LOSS]))
        if (step + 1) * VALIDATIONS // self.run.steps > step * VALIDATIONS // self.run.steps:
            self.validation_losses.append((step + 1, validate(self.run, self.arm.engine)))


def settings_for(case: str, way: str) -> dict[str, Any]:
    """The case's configuration; "off" is the same model without moves, "dense" one of its size that never changes."""
    settings: dict[str, Any] = json.loads((CONFIGS / f"{case}.json").read_text())
    settings["dynmo"] = {**settings["dynmo"], "log": False, **({} if way == "on" else {"enabled": False})}
    if way == "dense":
        settings["model"] = {key: value for key, value in settings["model"].items() if key in SIZES}
    return settings


def statics_of(case: str, steps: int) -> Statics:
    """From a profile of the case's model over its first batch, again and again, so that nothing changes. Collective."""
    profile = {"batches": FIRST_PROFILE, "warmup_batches": 1}
    block = {"interval": 0, "min_improvement": 0.99, "initial_partition": "uniform", "log": False, "profile": profile}
    trained = Trained.build("profile", {**settings_for(case, "on"), "dynmo": block}, steps)
    engine = trained.arm.engine
    for _ in range(1 + FIRST_PROFILE):
        trained.batch(0)
    while engine.profile is None:  # the model said in its first batch that it had changed
        trained.batch(0)
    layers = engine.profile.layers
    pipeline = PipelineModel(
        tuple(layer.forward_seconds for layer in layers),
        tuple(layer.backward_seconds for layer in layers),
        engine.micro_batches,
        (1.0,) * engine.num_stages,
    )
    known = Statics.known(pipeline, [layer.trainable_parameters for layer in layers])
    for line in known.lines():
        say(f"{case}: {line}")
    return known
