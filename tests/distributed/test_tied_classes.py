"""Layers of different classes tied by one key: each use has parameters of its own, and the tied ones stay equal."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.constants import PIPELINE_REPLICATED_PARAMETER_PATTERNS, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.save.context import universal_info
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import LanguageModelPipeline, ModelConfig, model_layers
from tests.distributed.harness import RankError, run, run_each
from tests.distributed.support.checkpoints import pipeline, train_on
from tests.distributed.support.configs import Case, config
from tests.distributed.support.models import loss, module_of
from tests.distributed.support.tied_layers import ENDS, FIRST, WAYS
from tests.distributed.support.training import batches, build, outcome_of, raw, state, train_and_move, whole


def check_same(still: list[dict[str, Any]], moved: list[dict[str, Any]]) -> dict[str, Any]:
    assert moved[0]["moved"] > 0 and still[0]["moved"] == 0
    for what in ("losses", "norms", "evaluations"):
        assert [r[what] for r in moved] == [r[what] for r in still]
    assert whole(moved) == whole(still)
    return whole(moved)


def norms(case: Case, way: str) -> list[float]:
    """Return the gradient norm of the first batch, by the engine and by torch for the model on one rank."""
    engine = build(case, WAYS[way])
    engine.train_batch(batches(engine))
    layers = [spec.build() if isinstance(spec, LayerSpec) else spec for spec in WAYS[way](case)]
    layers[-1].lm_head.weight = layers[0].embed_tokens.weight
    data = batches(engine)
    for _ in range(case.micro_batches):
        hidden, labels = next(data)
        for layer in layers:
            hidden = layer(hidden)
        (loss(hidden, labels) / case.micro_batches).backward()
    found = {id(p): p.grad for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()}
    whole = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    return [float(engine.get_global_grad_norm()), float(whole)]


def train(case: Case, way: str, moves: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
    """Train ``steps`` batches, and go to the next of ``moves`` after each."""
    engine = build(case, WAYS[way])
    norms, evaluations = [], []

    def after(step: int) -> None:
        norms.append(engine.get_global_grad_norm())
        evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())

    losses = train_and_move(engine, batches(engine), moves, steps, after)
    known = [float(norm) for norm in norms if norm is not None]
    return {**outcome_of(engine, losses), "norms": known, "evaluations": evaluations}


def warnings_of_tied_weights() -> tuple[bool, list[str]]:
    """Return whether a language model's first weight is tied, and what torch warns of in a backward pass through it."""
    layers = model_layers(ModelConfig(layers=1, hidden_size=8, heads=2, sequence_length=4, tied_embedding=True))
    module = LanguageModelPipeline(layers, num_stages=2)
    weight = next(iter(module.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weight.sum().backward()
    return bool(module.tied_comms) and weight.grad is not None, [str(warning.message) for warning in caught]


def test_torch_does_not_warn_of_the_tied_weights_of_a_language_model() -> None:
    assert run(2, warnings_of_tied_weights) == [(True, [])] * 2


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("fp32", 2),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("fp32", 1), ("bf16", 1), ("bf16 zero1", 1))),
        *(pytest.param(one, 2, marks=pytest.mark.nightly) for one in ("fp32 zero1", "bf16 zero1 fp32sums")),
    ],
)
def test_uses_that_move_come_to_one_stage_and_part(precision: str, replicas: int) -> None:
    case = Case(stages=3, clip=0.5, groups="two", precision=precision, replicas=replicas)
    moves = [[0, 2, 3, 8], [0, 5, 7, 8], [0, 1, 2, 8], [0, 6, 7, 8], [0, 1, 7, 8], [0, 4, 5, 8]]
    calls = [(case, "in the middle", way, 7) for way in ([], moves)]
    found = check_same(*run_each(case.ranks, train, *calls))
    assert found["1.weight"] == found["4.inner.weight"]
    assert found["3.inner.weight"] == found["6.weight"] and found["3.inner.bias"] == found["6.bias"]


@pytest.mark.parametrize(
    ("way", "precision", "replicas"),
    [
        *((way, "fp32", 1) for way in ENDS),
        *(pytest.param(way, "bf16 zero1", 2, marks=() if way in FIRST else pytest.mark.nightly) for way in ENDS),
    ],
)
def test_tied_ends_of_a_model_stay_equal(way: str, precision: str, replicas: int) -> None:
    """A model whose embedding and head are tied trains the same with a move at every step."""
    case = Case(stages=2, clip=0.5, precision=precision, replicas=replicas)
    moves = [[0, 1, 8], [0, 6, 8], [0, 7, 8], [0, 4, 8]]
    check_same(*run_each(case.ranks, train, *((case, way, moved, 5) for moved in ([], moves))))


def losses_of(which: str, case: Case, way: str) -> list[float]:
    return train_on(pipeline(which, case, WAYS[way]), 0)


def test_stock_trains_the_same() -> None:
    """Without clipping, because DeepSpeed's norm is that of the first stage."""
    for way in ("sparkjiao", "gdgpt"):
        case = Case(stages=2, clip=0.0)
        stock, ours = (run(2, losses_of, which, case, way) for which in ("stock", "ours"))
        assert stock == ours


@pytest.mark.parametrize("precision", ["fp32", "fp32 zero1"])
def test_every_weight_counts_once_in_clipping(precision: str) -> None:
    for engine, whole_model in run(2, norms, Case(stages=2, clip=0.01, precision=precision), "gdgpt, other name"):
        assert engine == pytest.approx(whole_model, rel=1e-5)


def marks(case: Case, way: str, move: Sequence[int] | None = None) -> list[tuple[str, bool, bool]]:
    """Return, per parameter of this stage, whether it is marked as a copy, and whether the conversion skips it."""
    engine = build(case, WAYS[way])
    if move is not None:
        engine.rebalance(move)
    info = universal_info(engine, engine.stage, {})[UNIVERSAL_CHECKPOINT_INFO]
    patterns = info[PIPELINE_REPLICATED_PARAMETER_PATTERNS]
    return [
        (name, parameter.ds_pipe_replicated, any(re.match(pattern, name) for pattern in patterns))
        for name, parameter in engine.module.named_parameters()
    ]


@pytest.mark.parametrize(
    ("way", "copy", "converted_once"),
    [("gdgpt", "embed_tokens.weight", True), ("gdgpt, other name", "lm_head.weight", False)],
)
def test_only_copies_are_marked_as_such(way: str, copy: str, converted_once: bool) -> None:
    """DeepSpeed's norm needs the marks, and so does its universal conversion, which skips copies after the first."""
    case = Case(stages=2, precision="bf16 zero1")
    for first, last in run_each(2, marks, (case, way), (case, way, [0, 6, 8])):
        assert not any(replicated for _, replicated, _ in first)
        assert [name for name, replicated, _ in last if replicated] == [f"tied_modules.embed.{copy}"]
        assert [name for name, _, left_out in last if left_out] == [f"tied_modules.embed.{copy}"] * converted_once


def freeze(engine: Any, uses: set[int]) -> None:
    for index in uses & {*engine.stage.layers.indices}:
        for weight in engine.stage.layers.tied_weights(index):
            weight.requires_grad_(False)


def freeze_one_use(case: Case, way: str) -> tuple[str, bool]:
    """Freeze the tied weight in the head only, then in all uses. Return the error, and whether it then stays."""
    engine = build(case, WAYS[way])
    data, message = batches(engine), ""
    engine.train_batch(data)
    for frozen in ({7}, {0, 7}):
        freeze(engine, frozen)
        try:
            engine.model_changed("frozen")
        except ConfigError as error:
            message = str(error)
    weights = engine.stage.layers.tied_weights(7 * engine.is_last_stage())
    before = [raw(weight) for weight in weights]
    for _ in range(2):
        engine.train_batch(data)
    return message, len(before) == 1 and before == [raw(weight) for weight in weights]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tied_weight_frozen_in_one_use_is_refused(precision: str) -> None:
    for message, stays in run(2, freeze_one_use, Case(stages=2, precision=precision), "gdgpt, other name"):
        assert "trains as embed_tokens.weight of layer 0 and is frozen as lm_head.weight of layer 7" in message
        assert stays


def freeze_untold(case: Case, way: str) -> str:
    """Freeze the tied weight everywhere, and train on without ``model_changed``."""
    engine = build(case, WAYS[way])
    freeze(engine, {0, 7})
    try:
        engine.train_batch(batches(engine))
    except ConfigError as error:
        return str(error)
    return "trained"


def test_freezing_a_tied_weight_without_model_changed_is_refused() -> None:
    for message, layer in zip(run(2, freeze_untold, Case(stages=2), "gdgpt"), (0, 7), strict=True):
        assert f"a tied weight of layer {layer} was frozen" in message


def repack(case: Case, way: str, sizes: dict[int, int], steps: int) -> dict[str, Any]:
    """Train ``steps`` batches, and re-pack after those in ``sizes``."""
    engine = build(case, WAYS[way])
    data, losses = batches(engine), {}
    while engine.global_steps < steps:
        loss = engine.train_batch(data).item()
        losses[engine.global_steps] = loss
        wanted = sizes.get(engine.global_steps)
        if wanted is not None:
            engine.repack(wanted)
        if engine.released:
            return {"losses": losses, "state": {"shards": {}}, "replica": 0}
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


@pytest.mark.parametrize(
    ("way", "precision"), [pytest.param("sparkjiao", "fp32", marks=pytest.mark.nightly), ("gdgpt", "bf16 zero1")]
)
def test_re_packing_to_one_stage_changes_nothing(way: str, precision: str) -> None:
    case = Case(stages=2, precision=precision, dynmo={"interval": 0})
    still, packed = run_each(2, repack, (case, way, {}, 4), (case, way, {2: 1}, 4))
    assert still[0]["losses"] == packed[0]["losses"]
    assert whole(packed) == whole(still)


@pytest.mark.parametrize(
    ("way", "precision", "clip"),
    [
        *(("sparkjiao", "fp32", 0.5), ("gdgpt, other name", "bf16", 0.5), ("sparkjiao", "bf16 zero1", 0.0)),
        pytest.param("gdgpt, other name", "fp32", 0.5, marks=pytest.mark.nightly),
        pytest.param("sparkjiao", "bf16", 0.5, marks=pytest.mark.nightly),
        pytest.param("gdgpt, other name", "bf16 zero1", 0.0, marks=pytest.mark.nightly),
    ],
)
def test_uses_that_deepspeed_did_not_build_are_trained(way: str, precision: str, clip: float) -> None:
    """DeepSpeed builds only the first use on a stage. A model on one stage trains as on two."""
    case = Case(stages=1, precision=precision, clip=clip)
    one = run(1, train, case, way, [], 4)
    two = run(2, train, replace(case, stages=2), way, [], 4)
    for what in ("losses", "norms", "evaluations"):
        assert one[0][what] == two[0][what]
    assert whole(one) == whole(two)


def test_uses_that_deepspeed_did_not_build_move() -> None:
    case = Case(stages=2, groups="one", replicas=2, precision="bf16 zero1")
    moves = [[0, 4, 8], [0, 2, 8], [0, 7, 8]]
    check_same(*run_each(case.ranks, train, *((case, "in the middle", moved, 5) for moved in ([], moves))))


def test_a_parameter_of_no_group_is_refused() -> None:
    run(1, train, Case(stages=1, groups="two"), "sparkjiao", [], 1)
    with pytest.raises(RankError, match=r"ConfigError: layer 7: norm.weight is in none of the 2 parameter groups"):
        run(1, train, Case(stages=1, groups="two"), "gdgpt", [], 1)


def groups_apart(case: Case, way: str) -> str:
    """Let a tied weight decay on the first stage and not on the last, and return the error of initialize."""
    module = module_of(case, WAYS[way])
    decay = 0.1 if module.stage_id == 0 else 0.0
    groups = [{"params": list(module.parameters()), "weight_decay": decay}]
    try:
        ds_dynmo.initialize(model=module, model_parameters=groups, config=config(case))
    except ConfigError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("way", ["sparkjiao", "function around"])
def test_a_tied_weight_in_two_parameter_groups_is_refused(way: str) -> None:
    for message in run(2, groups_apart, Case(stages=2), way):
        assert "is in different parameter groups where they are: ['0', '1']" in message
