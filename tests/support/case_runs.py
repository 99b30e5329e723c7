"""Small models of every dynamic case, trained in pipelines; every function runs on a rank."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.config import parse_section
from ds_dynmo.engine.deepspeed.module import layer_specs
from ds_dynmo.models import (
    MixtureOfExperts,
    ModelConfig,
    dynamic_cases,
    language_model_loss,
    local_layers,
    model_layers,
)
from ds_dynmo.models.early_exit.exits import ExitHead
from ds_dynmo.models.vocabulary import takes_labels, with_labels
from tests.support.configs import SECTION, Case, config
from tests.support.harness import run, run_each
from tests.support.training import drop_decision, reports_of, state, whole

SIZES = {"layers": 4, "hidden_size": 16, "heads": 2, "sequence_length": 12, "mlp_ratio": 2, "tied_embedding": False}
# Egeria evaluates before every step and freezes the first block once there is a slope: before the fourth of six steps.
EGERIA = {"interval": 0.17, "delay": 0.17, "start": 0.0, "window": 2, "threshold": 100.0}
# The "model" section of each dynamic case, as small as it can be.
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "freezing": {"case": {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]}},
    "pruning": {
        "case": {
            "kind": "pruning",
            "start": 0.1,
            "end": 0.7,
            "times": 3,
            "initial_sparsity": 0.2,
            "final_sparsity": 0.95,
        }
    },
    "pruning in CSR": {
        "case": {"kind": "pruning", "start": 0.1, "end": 0.4, "times": 1, "final_sparsity": 0.8, "csr_from": 0.5}
    },
    "freezing and pruning": {
        "case": [
            {"kind": "freezing", "schedule": [[0.3, 1], [0.5, 2], [0.7, 0]]},
            {
                "kind": "pruning",
                "start": 0.3,
                "end": 0.6,
                "times": 1,
                "initial_sparsity": 0.5,
                "final_sparsity": 0.8,
            },
        ]
    },
    "automatic freezing": {"case": {"kind": "freezing", "automatic": {"interval": 0.2, "start": 0.2}}},
    "moe auxiliary loss": {"case": {"kind": "moe", "experts": 4}},
    "moe sbase with capacity": {
        "case": {"kind": "moe", "experts": 4, "routing": "sbase", "capacity_factor": 0.8, "every": 2}
    },
    "moe bias": {"case": {"kind": "moe", "experts": 4, "routing": "bias", "bias_rate": 0.02, "dense_blocks": 1}},
    "moe bias and freezing": {
        "case": [
            {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]},
            {"kind": "moe", "experts": 4, "routing": "bias", "bias_rate": 0.02},
        ]
    },
    "moe auxiliary loss and freezing": {
        "case": [{"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]}, {"kind": "moe", "experts": 4}]
    },
    "hash-sparse attention": {"case": {"kind": "sparse_attention", "pattern": "hash", "buckets": 4}},
    "qk-sparse attention": {
        "case": {"kind": "sparse_attention", "pattern": "qk", "keep_queries": 0.6, "keep_keys": 0.4}
    },
    "egeria": {"case": {"kind": "freezing", "egeria": EGERIA}},
    "egeria and mod": {"case": [{"kind": "freezing", "egeria": EGERIA}, {"kind": "mod", "capacity": 0.25}]},
    "egeria and pruning": {
        "case": [
            {"kind": "freezing", "egeria": EGERIA},
            {"kind": "pruning", "start": 0.2, "end": 0.6, "times": 2, "initial_sparsity": 0.3, "csr_from": 0.5},
        ]
    },
    "mod": {"case": {"kind": "mod", "capacity": 0.25}},
    "mod topk": {"case": {"kind": "mod", "capacity": 0.25, "every": 1, "sampling": "topk"}},
    "mod threshold": {"case": {"kind": "mod", "threshold": 0.0, "every": 1, "min_capacity": 0.1, "max_capacity": 0.8}},
    "mod and freezing": {
        "case": [{"kind": "mod", "capacity": 0.25}, {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]}]
    },
    # With these thresholds some tokens leave at every exit. In the last case all leave.
    "exits, calm": {"case": {"kind": "early_exit", "method": "calm", "threshold": 0.02, "start": 0.3}},
    "exits, calm tied": {"case": {"kind": "early_exit", "method": "calm", "threshold": 0.1}, "tied_embedding": True},
    "exits, state": {"case": {"kind": "early_exit", "method": "calm", "confidence": "state", "threshold": 0.98}},
    "exits, adpc": {
        "case": {"kind": "early_exit", "method": "adpc", "depths": [1, 2], "threshold": 0.15, "evaluation": False}
    },
    "exits, all leave": {
        "case": {"kind": "early_exit", "method": "adpc", "depths": [2], "threshold": 0.0},
        "tied_embedding": True,
    },
    "mod, moe and hash-sparse attention": {
        "case": [
            {"kind": "mod", "capacity": 0.5},
            {"kind": "moe", "experts": 4},
            {"kind": "sparse_attention", "pattern": "hash", "buckets": 4},
        ]
    },
    "pruning and qk-sparse attention": {
        "case": [
            {"kind": "pruning", "start": 0.3, "end": 0.6, "times": 1, "final_sparsity": 0.8},
            {"kind": "sparse_attention", "pattern": "qk", "keep_queries": 0.6, "keep_keys": 0.4},
        ]
    },
    "slices tied, moe auxiliary loss": {
        "vocabulary_slices": 3,
        "tied_embedding": True,
        "case": {"kind": "moe", "experts": 4},
    },
    "slices, halves and freezing": {
        "vocabulary_slices": 3,
        "split_blocks": True,
        "case": {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]},
    },
    "halves, moe auxiliary loss and freezing": {
        "split_blocks": True,
        "case": [{"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]}, {"kind": "moe", "experts": 4, "every": 2}],
    },
    "halves, automatic freezing, pruning and qk-sparse attention": {
        "split_blocks": True,
        "case": [
            {"kind": "freezing", "automatic": {"interval": 0.2, "start": 0.2}},
            {"kind": "pruning", "start": 0.3, "end": 0.6, "times": 1, "final_sparsity": 0.8},
            {"kind": "sparse_attention", "pattern": "qk", "keep_queries": 0.6, "keep_keys": 0.4},
        ],
    },
}
CASES["slices and pruning"] = {**CASES["pruning"], "vocabulary_slices": 3}


@dataclass(frozen=True)
class CaseRun:
    """One training run of a case.

    Attributes:
        model: the "model" section without :data:`SIZES`, which a Hugging Face model does not accept.
        moves: by step, the partition to go to before it.
        precision: see ``configs.PRECISIONS``.
        dynmo: the "dynmo" section without "enabled"; by default nothing moves by itself.
        optimizer, clip: see ``configs.Case``.
    """

    model: Mapping[str, Any]
    stages: int = 2
    replicas: int = 1
    precision: str = "fp32"
    checkpoint_interval: int = 0
    steps: int = 6
    moves: Mapping[int, list[int]] = field(default_factory=dict)
    enabled: bool = True
    dynmo: Mapping[str, Any] = field(default_factory=lambda: {"interval": 0})
    optimizer: str = "AdamW"
    clip: float = 1.0

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas


def model_of(run: CaseRun) -> ModelConfig:
    """Return the "model" section of a run."""
    sizes = {} if "huggingface" in run.model else SIZES
    return parse_section(ModelConfig, {**sizes, **run.model}, "model")


def cases_of(run: CaseRun) -> list[dict[str, Any]]:
    """List the sections of a run's cases."""
    case = run.model.get("case", [])
    return [case] if isinstance(case, dict) else case


def num_layers(run: CaseRun) -> int:
    return len(model_layers(model_of(run)))


def build(run: CaseRun) -> tuple[Any, ModelConfig]:
    model = model_of(run)
    torch.manual_seed(0)
    module = PipelineModule(
        layers=model_layers(model),
        num_stages=run.stages,
        loss_fn=language_model_loss,
        partition_method="uniform",
        activation_checkpoint_interval=run.checkpoint_interval,
    )
    for part in module.modules():
        if isinstance(part, ExitHead):
            part.weight.data.mul_(40.0)  # an untrained model would not be confident of anything
    case = Case(precision=run.precision, optimizer=run.optimizer, clip=run.clip, dynmo=None)
    settings = {
        **config(case),
        "dynmo": {**SECTION, **run.dynmo, "enabled": run.enabled},
    }
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    if takes_labels(layer_specs(module)):
        engine.set_batch_fn(with_labels)
    return engine, model


def micro_batches(length: int, replica: int = 0, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield micro-batches of sequences of ``length`` tokens, which depend only on their number and the replica."""
    for number in itertools.count():
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * number + replica)
        tokens = torch.randint(0, 256, (2, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def batches(engine: Any, model: ModelConfig, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return micro_batches(model.sequence_length, engine.grid.get_data_parallel_id(), seed)


def train(run: CaseRun, folder: str | None = None, stop: int | None = None) -> dict[str, Any]:
    """Train, and return losses, the loss of an evaluation, and the final state of this rank's layers.

    And the least of their load signals when layers moved last, and when they were saved: had the case done something?

    Args:
        folder: where to save after ``stop`` steps, before another engine loads and continues.
        stop: number of steps before the checkpoint.
    """
    engine, model = build(run)
    data, losses, least = batches(engine, model), [], dict[str, float]()
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    for step in range(run.steps):
        if step == stop and folder is not None:
            least["saved"] = min(load_signals(engine).values(), default=1.0)
            states = json.dumps([case.state_dict() for case in cases])
            engine.save_checkpoint(folder)
            engine, model = build(run)
            engine.load_checkpoint(folder)
            cases = dynamic_cases(model, engine, total_steps=run.steps)
            for case, saved in zip(cases, json.loads(states), strict=True):
                case.load_state_dict(saved)
        for case in cases:
            case.before_batch(step)
        if step in run.moves:
            least["moved"] = min(load_signals(engine).values(), default=1.0)
            engine.rebalance(run.moves[step])
        if run.enabled:
            drop_decision(engine)
        losses.append(engine.train_batch(data).item())
        for case in cases:
            case.after_batch(step + 1)
    return {
        "losses": losses,
        "evaluated": engine.eval_batch(batches(engine, model, seed=1)).item(),
        "state": state(engine),
        "replica": engine.grid.get_data_parallel_id(),
        "signals": load_signals(engine),
        "least": least,
        "partition": engine.partition,
    }


def load_signals(engine: Any) -> dict[int, float]:
    """Return the load signals of this rank's layers."""
    modules = engine.stage.layers.counted_modules().items()
    return {index: module.load_signal() for index, module in modules if hasattr(module, "load_signal")}


# A "dynmo" section with a decision after every batch. At the first, all blocks are on the second of two stages.
EVERY: dict[str, Any] = {
    "interval": 1,
    "migration": "blocking",
    "min_improvement": 0.0,
    "profile": {"batches": 1, "warmup_batches": 0},
    "initial_partition": [0, 1, 7],
}


def experts(engine: Any) -> dict[int, MixtureOfExperts]:
    """Return this rank's layers of experts by layer number."""
    parts = {number: getattr(layer, "mlp", None) for number, layer in local_layers(engine.module)}
    return {number: part for number, part in parts.items() if isinstance(part, MixtureOfExperts)}


def train_and_decide(run: CaseRun) -> dict[str, Any]:
    """Train with the decisions of the "dynmo" section of ``run``."""
    engine, model = build(run)
    data = batches(engine, model)
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    losses = []
    for step in range(run.steps):
        for case in cases:
            case.before_batch(step)
        losses.append(engine.train_batch(data).item())
        for case in cases:
            case.after_batch(step + 1)
    signals = [layer.load_signal for layer in engine.profile.layers]
    decisions = [report for report in reports_of(engine) if report.reason != "initial"]
    steps, moved = [report.step for report in decisions], sum(report.moved for report in decisions)
    return {"losses": losses, "steps": steps, "signals": signals, "moved": moved}


def moved(case: CaseRun) -> CaseRun:
    """Return the same run with moves before almost every batch."""
    last = num_layers(case)
    there, back = [0, 2, last], [0, last - 2, last]
    if case.stages == 3:
        there, back = [0, 1, 4, last], [0, last - 3, last - 1, last]
    return replace(case, moves={1: there, 2: back, 4: there, 5: back})


def in_chunks(case: CaseRun, kind: str) -> CaseRun:
    """Return the same run with two chunks per stage, and moves to a chain and back."""
    last = num_layers(case)
    moves = {1: [0, 2, 3, last - 1, last], 2: [0, 2, last], 3: [0, 1, 2, 4, last]}
    return replace(case, dynmo={**case.dynmo, "schedule": {"kind": kind}}, moves=moves)


def check_two_chunks_change_nothing(case: CaseRun, kind: str, still: list[dict[str, Any]] | None = None) -> None:
    """Check that a run of ``kind``, with moves to a chain and back too, equals a chain without moves.

    Args:
        still: results of the chain, if they are known.
    """
    if still is None:
        still, found = run_each(case.ranks, train, (case,), (in_chunks(case, kind),))
    else:
        found = run(case.ranks, train, in_chunks(case, kind))
    check_same(still, found)
    assert still[0]["partition"] != found[0]["partition"]


def ways(case: CaseRun, folder: str) -> dict[str, tuple[Any, ...]]:
    """Return calls of :func:`train` that should find what it finds of ``case``, without moves.

    Args:
        folder: for checkpoints.
    """
    recomputed, stop = replace(case, checkpoint_interval=1), case.steps - 2
    split = replace(case, dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}})
    return {
        "moved": (moved(case),),
        "moved, recomputed": (moved(recomputed),),
        "moved, recomputed, resumed": (moved(recomputed), f"{folder}/moved", stop),
        "moved with split backward passes": (moved(split),),
        "moved in a loop": (in_chunks(case, "loop"),),
        "moved in a V": (in_chunks(case, "v"),),
        "moved in a V, recomputed, resumed": (in_chunks(recomputed, "v"), f"{folder}/v", stop),
        "recomputed": (recomputed,),
        "resumed": (case, f"{folder}/resumed", stop),
        "switched off": (replace(case, enabled=False),),
    }


def check_all_ways(case: CaseRun, folder: str) -> None:
    """Check that none of :func:`ways` changes anything."""
    still = run(case.ranks, train, case)
    for way, call in ways(case, folder).items():
        results = run(case.ranks, train, *call)
        check_same(still, results, way)
        assert (results[0]["partition"] == still[0]["partition"]) == ("moved" not in way), way


def check_slices_move(still: CaseRun, chain: dict[int, list[int]]) -> None:
    """Check that 13 layers on two stages train the same with the moves of ``chain`` under zero bubble, and in a V."""
    folded = {1: [0, 1, 5, 9, 13], 2: [0, 3, 11, 12, 13], 3: [0, 12, 13], 5: [0, 2, 6, 11, 13]}
    ours = [
        replace(still, moves=moves, dynmo={"interval": 0, "schedule": {"kind": kind}})
        for kind, moves in (("zero_bubble", chain), ("v", folded))
    ]
    expected, *others = run_each(2, train, (still,), *((one,) for one in ours))
    for one, found in zip(ours, others, strict=True):
        assert found[0]["losses"] == expected[0]["losses"] and found[0]["evaluated"] == expected[0]["evaluated"]
        assert whole(found) == whole(expected)
        assert found[0]["partition"] == one.moves[max(step for step in one.moves if step < one.steps)]


def train_moved(case: CaseRun) -> dict[str, Any]:
    return train(moved(case))


def signals(results: list[dict[str, Any]]) -> dict[int, float]:
    """Return the load signals by layer."""
    return {layer: signal for result in results for layer, signal in result["signals"].items()}


def check_same(expected: list[dict[str, Any]], found: list[dict[str, Any]], how: str = "") -> None:
    """Check that two runs have the same losses, state and load signals, to the bit."""
    assert expected[0]["losses"] == found[0]["losses"] and expected[0]["evaluated"] == found[0]["evaluated"], how
    assert whole(expected) == whole(found), how
    assert signals(expected) == signals(found), how


def check_moves_change_nothing(
    case: CaseRun, still: list[dict[str, Any]] | None = None, elsewhere: list[dict[str, Any]] | None = None
) -> None:
    """Check that a run with moves equals one without, in which the case does something.

    Args:
        still: results without moves, if they are known.
        elsewhere: results with moves, if they are known.
    """
    if still is None:
        still, elsewhere = run_each(case.ranks, train, (case,), (moved(case),))
    elif elsewhere is None:
        elsewhere = run(case.ranks, train, moved(case))
    check_same(still, elsewhere)
    if any(one["kind"] == "early_exit" for one in cases_of(case)):
        assert min(signals(still).values()) < 1.0  # tokens left, so there is something to compare
    assert still[0]["partition"] != elsewhere[0]["partition"]
    assert all(math.isfinite(loss) for loss in still[0]["losses"])


def refusals(runs: Sequence[CaseRun]) -> list[str]:
    """Return the error of ``initialize`` for each run, "" where there is none."""
    said = []
    for one in runs:
        try:
            build(one)
            said.append("")
        except ds_dynmo.ConfigError as error:
            said.append(str(error))
    return said
