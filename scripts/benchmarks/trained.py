"""Train one of the models of ds_configs, and make the static partitions from a profile of it."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, say, timed
from benchmarks.rows import passes_of
from ds_dynmo.cli.train import batches, build_engine
from ds_dynmo.cli.training.options import TrainingRun, prepare
from ds_dynmo.config import load_settings
from ds_dynmo.models import dynamic_cases
from ds_dynmo.partitioners import PipelineModel
from simulation.statics import Statics

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
FIRST_PROFILE = 3  # batches of the profile that static partitions are taken from


@dataclass
class Trained:
    """An engine with its model's dynamic cases, its text, and the seconds of its timed batches."""

    arm: Arm
    run: TrainingRun
    cases: Any
    text: Any
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def build(cls, name: str, case: str, block: dict[str, Any], steps: int) -> Trained:
        """Build the case's model with this "dynmo" section. "dense" is the same one without what changes it."""
        settings = {**configuration(case), "dynmo": block}
        if name == "dense":
            settings["model"] = without_case(settings["model"])
        run = prepare(["--deepspeed_config", name, "--steps", str(steps)], settings)
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints lines about each layer
            engine = build_engine(run)
        cases = dynamic_cases(run.model, engine, total_steps=run.steps)
        return cls(Arm(name, engine), run, cases, batches(run, engine, "train"))

    @property
    def tokens(self) -> int:
        """Return the tokens of a batch."""
        return int(self.arm.engine.train_batch_size()) * self.run.model.sequence_length

    def batch(self, step: int) -> None:
        """Train on batch ``step`` of the run, with what the model changes before and after it."""
        for case in self.cases:
            case.before_batch(step)
        self.arm.engine.train_batch(self.text.iterate(step * self.arm.engine.micro_batches))
        for case in self.cases:
            case.after_batch(step + 1)

    def timed_batch(self, step: int) -> None:
        self.seconds.append(timed(partial(self.batch, step)))


def configuration(case: str) -> dict[str, Any]:
    return load_settings(CONFIGS / f"{case}.json")


def without_case(model: dict[str, Any]) -> dict[str, Any]:
    """Leave the dynamic case out of a "model" section."""
    return {key: value for key, value in model.items() if key != "case"}


def statics_of(case: str, steps: int) -> Statics:
    """Profile the case's model on its first batch, repeated so that nothing changes. Collective."""
    profile = {"batches": FIRST_PROFILE, "warmup_batches": 1}
    block = {"interval": 0, "min_improvement": 0.99, "initial_partition": "uniform", "log": False, "profile": profile}
    trained = Trained.build("profile", case, block, steps)
    engine = trained.arm.engine
    for _ in range(1 + FIRST_PROFILE):
        trained.batch(0)
    while engine.profile is None:  # the model said in its first batch that it had changed
        trained.batch(0)
    pipeline = PipelineModel(*passes_of(engine.profile), engine.micro_batches, (1.0,) * engine.num_stages)
    known = Statics.known(pipeline, engine.profile.costs("parameters"))
    for line in known.lines():
        say(f"{case}: {line}")
    return known
