"""What each device allocates at most in a batch, beside what decisions under a memory limit count with."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.arms import engines_end_here, say
from benchmarks.held_bytes import PRECISIONS, of_all_ranks, predicted_peaks, profiled_engine, show_peaks, tokens
from ds_dynmo.cli.command_line import check_at_least_1
from ds_dynmo.engine.decide.decision_input import memory_model
from ds_dynmo.partitioners import loads

OPTIONS = {"micro_batches": 8, "hidden_size": 1024, "sequence_length": 1024}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare what devices allocate at most in a batch of a GPT with what stages are predicted to need.

    Two blocks a stage. Forward and backward passes apart from the optimizer's step. A CPU does not count what is
    allocated: there it is what the process holds.
    """
    check_at_least_1(arguments, "micro_batches", "hidden_size", "sequence_length")
    rows = []
    for case in itertools.product(("1f1b", "zero_bubble"), PRECISIONS, ("none", "non-reentrant")):
        with engines_end_here():
            rows.append(measure_one(arguments, *case))
        say(", ".join(case))
    return {"rows": rows}


def measure_one(arguments: argparse.Namespace, kind: str, precision: str, checkpointing: str) -> dict[str, Any]:
    """Measure a batch after a profile. Collective."""
    accelerator = get_accelerator()
    held_before = accelerator.memory_allocated()
    engine = profiled_engine(arguments, kind, precision, checkpointing)
    peaks = []

    def take_peak(*_: Any) -> None:
        peaks.append(accelerator.max_memory_allocated() - held_before)
        accelerator.reset_peak_memory_stats()

    accelerator.reset_peak_memory_stats()
    hook = engine.basic_optimizer.register_step_pre_hook(take_peak)
    engine.train_batch(tokens(arguments))
    hook.remove()
    take_peak()
    in_passes, in_step = peaks
    return {
        "schedule": kind,
        "precision": precision,
        "checkpointing": checkpointing,
        "measured_bytes": of_all_ranks(in_passes),
        "step_bytes": of_all_ranks(in_step),
        "predicted_bytes": predicted_bytes(engine),
    }


def predicted_bytes(engine: Any) -> list[int]:
    """Predict what each stage needs, as a decision under a memory limit does."""
    layers = engine.profile.layers
    workspace = max(layer.workspace_bytes for layer in layers)  # what every stage sets aside for the layer that runs
    if engine.stage.schedule.may_choose_schedule:
        static = loads([layer.static_bytes for layer in layers], engine.partition)
        return [int(held) + peak + workspace for held, peak in zip(static, predicted_peaks(engine))]
    model = memory_model(
        engine.profile, get_accelerator().total_memory(), engine.rebalancer.decider.memory.checkpoint_interval
    )
    assert model is not None
    return [needed + workspace for needed in model.bytes_per_stage(engine.stage.placement)]


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    print("\nIn passes")
    show_peaks(found["rows"], "measured_bytes", arguments)
    print("\nIn the optimizer's step")
    show_peaks(found["rows"], "step_bytes", arguments)
