"""Tensor parallelism and other features of DeepSpeed's pipeline engine, with moves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.utils import groups
from torch import nn

import ds_dynmo
from tests.emulated import not_on_it
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import SEQUENCE, VOCABULARY, WIDTH, layers, mask_layers, module_of, seeded
from tests.support.sliced_layers import sliced_layers
from tests.support.training import (
    PROFILED,
    batches,
    build,
    check_moves_changed_nothing,
    outcome_of,
    reports_of,
    train_and_move,
    train_feature,
    train_layers,
)
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks

nightly = partial(pytest.param, marks=pytest.mark.nightly)
MOVES = [[0, 2, 8], [0, 6, 8], [0, 1, 8]]


@pytest.mark.parametrize(
    ("precision", "tied", "clip", "replicas"),
    [
        ("bf16 zero1", True, 0.05, 1),
        nightly("fp32", False, 0.0, 1),
        nightly("fp32", True, 0.05, 2),
        nightly("bf16", True, 0.05, 1),
        nightly("bf16 zero1", False, 0.05, 2),
    ],
)
def test_moves_change_nothing_with_tensor_parallelism(precision: str, tied: bool, clip: float, replicas: int) -> None:
    """Each (data, model) coordinate moves its own slice."""
    case = Case(tied=tied, clip=clip, precision=precision, replicas=replicas, slices=2, groups="two", blocks=4)
    moves = [[0, 2, 6], [0, 5, 6], [0, 1, 6]]
    still, moved = run_each(case.ranks, train_layers, *((case, sliced_layers, to, 4) for to in ([], moves)))
    check_moves_changed_nothing(still, moved)
    assert [r["norm"] for r in moved] == [r["norm"] for r in still]


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
ZERO1 = {"zero_optimization": {"stage": 1}}
REENTRANT = {"pipeline": {"activation_checkpoint_interval": 2}}
NOT_REENTRANT = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
PRESCALED = {"prescale_gradients": True}
TIMED = {"wall_clock_breakdown": True, "steps_per_print": 1}


@pytest.mark.parametrize(
    ("settings", "module_options"),
    [
        pytest.param({**AUTOCAST, **ZERO1, **PRESCALED, **TIMED}, {}, id="one length"),
        pytest.param({**NOT_REENTRANT, **SUMS}, {"dynamic_shape": True}, id="dynamic_shape"),
        *(
            nightly(settings, {}, id=" ".join(settings))
            for settings in (REENTRANT, NOT_REENTRANT, TIMED, PRESCALED, AUTOCAST, {**AUTOCAST, **ZERO1}, SUMS)
        ),
        nightly({}, {"dynamic_shape": True}, id="dynamic_shape alone"),
    ],
)
def test_moves_change_nothing_with_features_of_deepspeed(
    settings: dict[str, Any], module_options: dict[str, Any], tmp_path: Path
) -> None:
    """Together, and in the nightly form one by one. DeepSpeed's CSV monitor writes its files."""
    settings = {**settings, "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    calls = [(settings, module_options, moves, bool(module_options)) for moves in ([], MOVES)]
    still, moved = run_each(2, train_feature, *calls)
    assert moved[0]["partition"] == MOVES[-1] and still[0]["partition"] == [0, 4, 8]
    check_moves_changed_nothing(still, moved)
    assert {"Train_Samples_train_loss.csv", "Train_Samples_lr.csv"} <= set(os.listdir(tmp_path / "job"))


class Places(nn.Embedding):
    """Adds a vector to every position, with sparse gradients, as a layer in the middle of a model."""

    def __init__(self) -> None:
        super().__init__(SEQUENCE, WIDTH, sparse=True)
        self.weight.data.copy_(seeded((SEQUENCE, WIDTH), 5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + super().forward(torch.arange(hidden.size(1), device=hidden.device))


def sparse_layers(case: Case) -> list[Any]:
    specs = layers(case)
    specs[2:4] = [LayerSpec(Places), LayerSpec(Places)]
    return specs


def train_sparse(moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Train layers with ``nn.Embedding(sparse=True)``. Count the sparse tensors of this rank's optimizer state."""
    engine = build(Case(replicas=2, optimizer="SGD", clip=0.05, dynmo=PROFILED), sparse_layers)
    found = outcome_of(engine, train_and_move(engine, batches(engine), moves, 3))
    held = [engine.stage.state.state_of(parameter) for parameter in engine.module.parameters()]
    sparse = sum(value.is_sparse for each in held for value in each.values() if torch.is_tensor(value))
    return {**found, "norm": float(engine.get_global_grad_norm()), "sparse": sparse}


@not_on_it("torch has no sparse tensors on devices of this kind")
def test_moves_change_nothing_with_sparse_gradients() -> None:
    """They move with sparse momentum and clipping."""
    still, moved = run_each(4, train_sparse, ([],), (MOVES[:2],))
    check_moves_changed_nothing(still, moved)
    assert [r["norm"] for r in moved] == [r["norm"] for r in still]
    for results in (still, moved):
        assert sum(r["sparse"] for r in results if r["replica"] == 0) == 2


def test_moves_change_nothing_with_masks_between_stages() -> None:
    """With engine.has_bool_tensors the last tensor that a stage sends is a mask."""
    still, moved = run_each(2, train_layers, *((Case(dynmo=PROFILED), mask_layers, to, 4, True) for to in ([], MOVES)))
    check_moves_changed_nothing(still, moved)
    assert [r["norm"] for r in moved] == [r["norm"] for r in still]


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.experts(hidden)[0]  # type: ignore[no-any-return]


def add_places(places: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + places.weight[: hidden.size(1)]


def refused_layers() -> tuple[list[str], list[str], float]:
    """Return errors of initialize for layers on the second stage, the expert groups then made, and a loss without."""
    experts, places = layers(Case()), layers(Case())
    experts[6], places[6] = LayerSpec(WithExperts), LayerSpec(Places)
    tied = layers(Case())
    tied[1] = TiedLayerSpec("places", Places, forward_fn=add_places, tied_weight_attr="weight")
    tied[6] = TiedLayerSpec("places", Places, tied_weight_attr="weight")
    said = []
    for specs, precision in ((experts, "fp32"), (places, "bf16"), (places, "fp32 zero1"), (tied, "fp32")):
        try:
            build(Case(optimizer="SGD", precision=precision), lambda _, specs=specs: specs)
        except ds_dynmo.ConfigError as error:
            said.append(str(error))
    engine = build(Case())
    return said, list(groups._get_expert_parallel_group_dict()), engine.train_batch(batches(engine)).item()


def test_layers_that_are_refused() -> None:
    """They are refused on every rank, before DeepSpeed makes groups for experts."""
    found = run(2, refused_layers)
    assert found[0] == found[1]
    (moe, bf16, zero1, tied), groups, _ = found[0]
    assert "deepspeed.moe" in moe and groups == []
    assert "sparse=True" in bf16 and bf16 == zero1
    assert "'places' whose forward_fn differ" in tied


def train_other_sizes(moves: Sequence[Sequence[int]]) -> tuple[list[Any], list[int]]:
    """Train batches of other numbers of micro-batches. Return losses, evaluations with logits, and the partition."""
    engine, found, waiting = build(Case()), [], list(moves)
    data = batches(engine)
    for micro_batches in (3, 5, 2, 4):
        engine.set_train_batch_size(2 * micro_batches)
        found.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
        value, logits = engine.eval_batch(batches(engine, seed=3), return_logits=True)
        outputs = engine.eval_batch(batches(engine, seed=3), compute_loss=False, reduce_output=None)
        shapes = None if outputs is None else [list(part.shape) for part in outputs]
        found.append((value.item(), None if logits is None else [part.tolist() for part in logits], shapes))
    return found, engine.partition


def test_moves_change_no_batch_of_another_size_and_no_logits() -> None:
    still, moved = run_each(2, train_other_sizes, ([],), (MOVES,))
    assert [found for found, _ in still] == [found for found, _ in moved]
    assert still[0][1] == [0, 4, 8] and moved[0][1] == MOVES[-1]
    for rank, (found, _) in enumerate(moved):
        assert all((logits is None) == (shapes is None) == (rank == 0) for _, logits, shapes in found[1::2])


def given_data(moves: Sequence[Sequence[int]]) -> tuple[list[float], list[float], list[int]]:
    """Train with data and a callable scheduler given to initialize, and batches without an iterator."""
    case = Case()
    module = module_of(case)
    tokens = torch.randint(0, VOCABULARY, (60, 5), generator=torch.Generator().manual_seed(1))
    engine, optimizer, _, _ = ds_dynmo.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        training_data=[(row[:-1], row[1:]) for row in tokens],
        config=config(case),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    losses, waiting = [], list(moves)
    for _ in range(4):
        losses.append(engine.train_batch().item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return losses, [group["lr"] for group in optimizer.param_groups], engine.partition


def test_moves_change_nothing_with_data_given_to_initialize() -> None:
    still, moved = run_each(2, given_data, ([],), (MOVES,))
    assert [result[:2] for result in still] == [result[:2] for result in moved]
    assert still[0][2] == [0, 4, 8] and moved[0][2] == MOVES[-1]


def one_stage() -> tuple[list[int], int]:
    engine = build(Case(stages=1, dynmo={"interval": 2}))
    data = batches(engine)
    for _ in range(5):
        engine.train_batch(data)
    return engine.partition, len(reports_of(engine))


def test_an_engine_of_one_stage_works() -> None:
    assert run(1, one_stage) == [([0, 8], 2)]


@pytest.mark.nightly
def test_features_work_under_our_schedules() -> None:
    check_as_under_1f1b(2, train_layers, Case(dynmo=PROFILED), mask_layers, MOVES, 5, True)
    check_as_under_1f1b(2, train_other_sizes, MOVES)
    for settings, options in (({}, {"dynamic_shape": True}), (TIMED, {}), (AUTOCAST, {})):
        check_as_under_1f1b(2, train_feature, settings, options, MOVES, bool(options))
    for precision in ("bf16", "bf16 zero1"):
        case = Case(slices=2, blocks=4, clip=0.05, tied=precision == "bf16", precision=precision)
        check_as_under_1f1b(4, train_layers, case, sliced_layers, [[0, 2, 6], [0, 5, 6]], 6)
