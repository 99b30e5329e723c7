"""Hugging Face models in a pipeline: moves change nothing, and training equals that of transformers' model."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import dynamic_cases, huggingface, local_layers
from ds_dynmo.models.huggingface import verification
from ds_dynmo.models.huggingface.modules import DecoderLayer
from tests.support import case_runs
from tests.support.case_runs import CaseRun, moved
from tests.support.harness import run, run_each
from tests.support.huggingface_families import nightly, tiny_values
from tests.support.huggingface_runs import (
    FREEZING,
    MICRO_BATCHES,
    MODELS,
    PARTITIONS,
    QWEN3,
    case,
    check_exported,
    engine_of,
    fine_tune,
    library_model,
    micro_batches,
    module_of,
    train_at,
    train_library,
)
from tests.support.training import drop_decision, state, whole

pytestmark = pytest.mark.ranks

transformers = pytest.importorskip("transformers")


# -- moves ------------------------------------------------------------------------------------------------------------


def in_chains(run: CaseRun) -> dict[int, list[int]]:
    """Return moves to chains, by step."""
    return dict(moved(run).moves)


def in_chunks(run: CaseRun) -> dict[int, list[int]]:
    """Return moves to chains and to two chunks per stage, by step."""
    last = case_runs.num_layers(run)
    return {1: [0, 1, 2, 4, last], 2: [0, 2, 3, last - 1, last], 3: [0, 2, last], 4: [0, 1, 3, last - 1, last]}


def check_as_still(run: CaseRun, kind: str, *resumed: Any) -> list[dict[str, Any]]:
    """Check that a run under a schedule of ``kind``, with moves, equals 1F1B without, and return what its ranks found.

    Args:
        resumed: a folder, and the step after which a checkpoint there is loaded.
    """
    moves = in_chunks(run) if kind in ("v", "loop") else in_chains(run)
    ours = replace(run, moves=moves, dynmo={**run.dynmo, "schedule": {"kind": kind}})
    still = replace(run, checkpoint_interval=0)
    expected, found = run_each(run.ranks, case_runs.train, (still,), (ours, *resumed))
    assert found[0]["losses"] == expected[0]["losses"] and found[0]["evaluated"] == expected[0]["evaluated"]
    assert whole(found) == whole(expected) and case_runs.signals(found) == case_runs.signals(expected)
    assert found[0]["partition"] != expected[0]["partition"]
    return found


def test_moves_of_slices_under_zero_bubble_change_nothing() -> None:
    check_as_still(case("mixtral tied in slices", precision="bf16 zero1", steps=4), "zero_bubble")


def test_moves_and_a_checkpoint_change_nothing_of_a_pruned_model(tmp_path: Path) -> None:
    found = check_as_still(case("gpt2 pruned", precision="bf16 zero1"), "zero_bubble", str(tmp_path), 4)
    assert min(case_runs.signals(found).values()) < 0.2


def check_frozen(run: CaseRun, found: list[dict[str, Any]]) -> None:
    """Check that layers at the front froze after some steps, and that norm and head did not."""
    state = whole(found).items()
    steps = {int(key.split(".")[0]): np.frombuffer(raw, "f4").item() for key, raw in state if key.endswith("/step")}
    slices = run.model.get("vocabulary_slices", 1)
    front = {steps[layer] for layer in range(slices + 1)}  # gpt2: embedding and positions; else embedding and a block
    assert len(front) == 1 and 0 < front.pop() < 6
    assert {steps[layer] for layer in sorted(steps)[-slices - 1 :]} == {6}


def test_moves_change_nothing_while_layers_freeze() -> None:
    run = case("qwen3, egeria")
    check_frozen(run, check_as_still(run, "1f1b"))


WAYS: dict[str, dict[str, Any]] = {  # to train
    "fp32": {},
    "bf16 zero1": {"precision": "bf16 zero1"},
    "bf16 on three stages": {"precision": "bf16", "stages": 3},
    "fp32 zero1, recomputed, two replicas": {"precision": "fp32 zero1", "checkpoint_interval": 1, "replicas": 2},
    "zero bubble": {"kind": "zero_bubble", "precision": "bf16 zero1"},
    "v": {"kind": "v"},
    "v, two replicas": {"kind": "v", "precision": "bf16 zero1", "replicas": 2},
    "loop, recomputed": {"kind": "loop", "checkpoint_interval": 1},
}
COMPILED = [
    (name, way, True)
    for name in ("llama, LoRA", "llama, DoRA", "gpt2, LoRA and biases", "mixtral, LoRA")
    for way in ("fp32", "bf16 zero1")
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "way", "compiled"), [*((name, way, False) for name in MODELS for way in WAYS), *COMPILED]
)
def test_moves_change_nothing_in_any_way(name: str, way: str, compiled: bool, tmp_path: Path) -> None:
    settings = dict(WAYS[way])
    kind = settings.pop("kind", "1f1b")
    run = case(name, **settings, dynmo={"interval": 0, **({"compile": True} if compiled else {})})
    found = check_as_still(run, kind, *((str(tmp_path), 3) if kind == "v" else ()))
    if "freezing" in name and way == "fp32":
        check_frozen(run, found)


# -- halves -----------------------------------------------------------------------------------------------------------


def go_on(run: CaseRun, folder: str, step: int) -> dict[str, Any]:
    """Resume after ``step`` steps on any stages; return why not, and whether the engine is as it was."""
    engine, model = case_runs.build(run)
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    before = state(engine)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        return {"refused": str(error), "unchanged": state(engine) == before and engine.global_steps == 0}
    data = islice(case_runs.batches(engine, model), step * engine.micro_batches, None)
    losses = []
    for number in range(step, run.steps):
        for one in cases:
            one.before_batch(number)
        drop_decision(engine)
        losses.append(engine.train_batch(data).item())
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


@pytest.mark.parametrize(
    ("name", "precision", "settings", "stages"),
    [
        ("mixtral tied", "bf16 zero1", FREEZING, 1),
        nightly("mixtral tied in slices", "fp32", {}, 3),
        nightly("gpt2", "fp32", {}, 3),
        nightly("granite in slices", "bf16", {}, 1),
    ],
)
def test_moves_of_halves_change_nothing(
    name: str, precision: str, settings: dict[str, Any], stages: int, tmp_path: Path
) -> None:
    """In a V, from a checkpoint at another partition. They train as whole layers do that do not move.

    The checkpoint resumes at other stages too, but not in other pieces.
    """
    of_whole = case(name, more=settings, precision=precision, clip=0.0, steps=5)
    halves = replace(of_whole, model={**of_whole.model, "split_blocks": True})
    ours = replace(halves, moves=in_chunks(halves), dynmo={"interval": 0, "schedule": {"kind": "v"}})
    still = halves if name == "gpt2" else of_whole  # dropout draws other numbers in halves
    folder = str(tmp_path)
    expected, in_v = run_each(2, case_runs.train, (still,), (ours, folder, 3))
    assert in_v[0]["losses"] == expected[0]["losses"] and in_v[0]["evaluated"] == expected[0]["evaluated"]
    assert in_v[0]["partition"] == ours.moves[4]
    as_many = halves.model.get("vocabulary_slices", 1) + 2  # layers, in four whole decoder layers
    pieces: list[dict[str, Any]] = [
        {},
        {"split_blocks": False},
        {"vocabulary_slices": 5},
        {"split_blocks": False, "vocabulary_slices": as_many},
    ]
    elsewhere = [replace(halves, stages=stages, model={**halves.model, **one}) for one in pieces]
    resumed, *refused = run_each(stages, go_on, *((one, folder, 3) for one in elsewhere))
    assert resumed[0]["losses"] == expected[0]["losses"][3:] and whole(resumed) == whole(in_v)
    for ranks in refused:
        assert all(one["unchanged"] for one in ranks)
        assert "; with other vocabulary_slices or split_blocks a model begins from its" in ranks[0]["refused"]


# -- beside transformers' model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("mixtral tied", ("attention_mask",)), nightly("mixtral", ()), nightly("qwen3", ("position_ids",))],
)
def test_training_equals_that_of_the_librarys_model(name: str, inputs: tuple[str, ...], tmp_path: Path) -> None:
    """It is read from a folder, trained on two stages with moves, to the bit as without, saved, and exported.

    What is beside the tokens crosses the stages unchanged.
    """
    folder, checkpoint, out = (tmp_path / part for part in ("folder", "checkpoint", "out"))
    model = library_model(MODELS[name]["huggingface"], folder)
    calls = ((str(folder), "", PARTITIONS[:1] * 3, inputs), (str(folder), str(checkpoint), PARTITIONS, inputs))
    still, found = run_each(2, fine_tune, *calls)
    assert found[0]["losses"] == still[0]["losses"] and whole(found) == whole(still)
    assert train_library(model, inputs) == pytest.approx(found[0]["losses"], rel=1e-5)
    huggingface.export(folder, checkpoint, out)
    check_exported(model, out)


def count_runs(partitions: list[list[int]], interval: int) -> dict[str, Any]:
    """Count the runs of transformers' ``forward`` in a step at each partition; and do layers share what runs it?"""
    specs = huggingface.layers(QWEN3, inputs=("position_ids",), verified=False)
    engine = engine_of(module_of(specs, activation_checkpoint_interval=interval))
    stubbed = engine.module._layer_specs[0].module_args[0].stubbed
    runs, run, data, counts, losses = [0], stubbed._run, micro_batches(("position_ids",)), [], []

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return run(*args, **kwargs)

    stubbed._run = counted
    for partition in partitions:
        runs[0] = 0
        losses += train_at(engine, data, [partition])
        decoder_layers = [layer for _, layer in local_layers(engine.module) if isinstance(layer, DecoderLayer)]
        counts.append((runs[0], all(layer.stubbed is stubbed for layer in decoder_layers)))
    return {"counts": counts, "losses": losses}


@pytest.mark.parametrize("interval", [1, nightly(0)])
def test_arguments_are_made_once_per_stage_and_micro_batch(interval: int) -> None:
    """Also for layers that came from another stage. Neither moves nor recomputation change a loss.

    Where layers run again in the backward pass, the first stage has had another micro-batch in the meantime.
    """
    (first, last), still = run_each(2, count_runs, (PARTITIONS, interval), (PARTITIONS[:1] * 3, 0))
    assert first["counts"] == [(MICRO_BATCHES * (1 + interval), True)] * 3
    assert last["counts"] == [(MICRO_BATCHES, True), (MICRO_BATCHES, True), (0, True)]  # at last, it has the head alone
    assert [one["counts"] for one in still] == [[(MICRO_BATCHES, True)] * 3] * 2
    assert first["losses"] == still[0]["losses"]


def refusals() -> tuple[int, list[str]]:
    """Count this rank's comparisons for three models, and say how each of them is refused."""
    compared, compare, said = [0], verification._compare, []

    def counted(*args: Any) -> Any:
        compared[0] += 1
        return compare(*args)

    verification._compare = counted
    minimax = tiny_values("minimax")
    for values, inputs in ((minimax, ()), (minimax, ("position_ids",)), (QWEN3, ())):
        try:
            huggingface.layers(values, inputs=inputs)
            said.append("")
        except ConfigError as error:
            said.append(f"{type(error).__name__}: {error}")
    return compared[0], said


def test_one_rank_verifies_a_model_and_all_hear_of_it() -> None:
    """Also of packed documents that see each other."""
    found = run(2, refusals)
    assert sum(count for count, _ in found) == 3
    accepted, refused, other = found[0][1]
    assert accepted == other == "" and found[1][1] == found[0][1]
    said = "packed documents see each other, as in transformers: logits of"
    assert refused.startswith("PackingError: ") and said in refused and " differ by " in refused
