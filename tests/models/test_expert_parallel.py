"""Experts that are split over the data-parallel replicas of a stage: the model is the same, and its layers move."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_dynmo.models import dynamic_cases
from ds_dynmo.models.moe.expert_parallel import Replicas, experts_of, through_replicas
from ds_dynmo.models.moe.grouped_linear import grouped_linear
from tests.support import case_runs
from tests.support.case_runs import (
    EVERY,
    SIZES,
    CaseRun,
    check_moves_change_nothing,
    check_two_chunks_change_nothing,
    experts,
    moved,
    train_and_decide,
)
from tests.support.expert_parallel import MODELS, load, save, unsharded
from tests.support.harness import run, run_each
from tests.support.training import whole
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks

WIDTH = 8
TABLES = [
    [[2, 1, 3, 0, 1, 4], [1, 1, 1, 1, 1, 1], [0, 5, 0, 2, 0, 0]],
    [[3, 2, 0, 0, 1, 0], [1, 4, 0, 0, 0, 0], [2, 2, 0, 0, 3, 5]],  # nothing for the second replica's experts
    [[0, 0, 0, 0, 0, 0], [1, 0, 2, 0, 3, 0], [0, 0, 0, 0, 0, 2]],  # nothing from the first replica
]
# Always tested; the other models are in the nightly form.
FIRST = "bias and freezing"
first = pytest.mark.parametrize(
    "name", [name if name == FIRST else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]
)


def through(table: Sequence[Sequence[int]]) -> bool:
    """Send every rank's rows through linear experts of all ranks. Tell whether results equal those of local experts."""
    replica, replicas, total = dist.get_rank(), len(table), len(table[0])
    generator = torch.Generator().manual_seed(0)
    device = get_accelerator().current_device_name()
    weight = torch.randn(total, WIDTH, WIDTH, generator=generator).to(device)
    every = [torch.randn(sum(row), WIDTH, generator=generator).to(device) for row in table]
    towards = [torch.randn(rows.shape, generator=generator).to(device) for rows in every]
    expected_rows, expected_weight = [rows.clone().requires_grad_() for rows in every], weight.clone().requires_grad_()
    expected = [grouped_linear(rows, expected_weight, row) for rows, row in zip(expected_rows, table)]
    torch.stack([(made * to).sum() for made, to in zip(expected, towards)]).sum().backward()

    mine = experts_of(replica, replicas, total)
    rows, share = every[replica].clone().requires_grad_(), weight[mine].clone().requires_grad_()
    peers = Replicas(dist.new_group())
    gathered = peers.gather(table[replica], rows.device)
    made = through_replicas(rows, gathered, peers, lambda arrived, counts: grouped_linear(arrived, share, counts))
    (made * towards[replica]).sum().backward()
    assert gathered == [list(row) for row in table]
    assert expected_weight.grad is not None and rows.grad is not None and share.grad is not None
    torch.testing.assert_close(made, expected[replica])
    torch.testing.assert_close(rows.grad, expected_rows[replica].grad)
    torch.testing.assert_close(share.grad, expected_weight.grad[mine])
    return True


@pytest.mark.parametrize("table", TABLES)
def test_rows_go_to_their_experts_and_back(table: list[list[int]]) -> None:
    assert all(run(3, through, table))


@cache
def plain_run(name: str) -> list[dict[str, Any]]:
    """Run a model without moves, stops or recomputation."""
    return run(4, case_runs.train, CaseRun(MODELS[name], replicas=2))


def train(run: CaseRun) -> dict[str, Any]:
    """Return losses, gradient norms and this rank's weights; those of experts with the number of the first expert."""
    engine, model = case_runs.build(run)
    data, losses, norms = case_runs.batches(engine, model), [], []
    cases = dynamic_cases(model, engine, total_steps=run.steps)
    replica = engine.grid.get_data_parallel_id()
    for step in range(run.steps):
        for case in cases:
            case.before_batch(step)
        losses.append(engine.train_batch(data).item())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        for case in cases:
            case.after_batch(step + 1)
    first = {index: replica * len(part.expand) for index, part in experts(engine).items()}
    return {
        "losses": losses,
        "norms": norms,
        "weights": {
            f"{index}.{name}": (
                first[index] if getattr(p, "replica_own", False) else 0,
                p.detach().cpu().numpy().copy(),
            )
            for index, module in engine.stage.layers.counted_modules().items()
            for name, p in module.named_parameters()
        },
    }


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("auxiliary loss", 0.0),
        *(pytest.param(name, 0.05, marks=() if name == FIRST else pytest.mark.nightly) for name in MODELS),
    ],
)
def test_split_experts_train_as_all_experts_on_every_replica(name: str, clip: float) -> None:
    shared = CaseRun(MODELS[name], replicas=2, optimizer="SGD", clip=clip)
    ours, theirs = run(4, train, shared), run(4, train, unsharded(shared))
    np.testing.assert_allclose(ours[0]["losses"], theirs[0]["losses"], rtol=1e-6)
    if clip:
        np.testing.assert_allclose(ours[0]["norms"], theirs[0]["norms"], rtol=1e-5)
        assert min(theirs[0]["norms"]) > clip
    assert all(rank["losses"] == ours[0]["losses"] and rank["norms"] == ours[0]["norms"] for rank in ours)
    expected = {key: weight for rank in theirs for key, (_, weight) in rank["weights"].items()}
    shares = 0
    for rank in ours:
        for key, (first, weight) in rank["weights"].items():
            whole_weight = expected[key]
            np.testing.assert_allclose(weight, whole_weight[first : first + len(weight)], rtol=1e-5, atol=1e-6)
            shares += 2 * len(weight) == len(whole_weight)
    blocks = {"auxiliary loss": 4, "sbase with capacity": 2, "bias and freezing": 3, "mod": 4}[name]
    assert shares == blocks * 2 * 2  # two replicas, two weights each


@first
def test_moves_change_nothing(name: str) -> None:
    check_moves_change_nothing(CaseRun(MODELS[name], replicas=2), plain_run(name))


@pytest.mark.nightly
def test_moves_over_three_stages_change_nothing() -> None:
    check_moves_change_nothing(CaseRun(MODELS["bias and freezing"], stages=3, replicas=2, clip=0.05))


@first
def test_recomputation_changes_nothing(name: str) -> None:
    """Recomputation changes nothing, also with moves."""
    again, expected = CaseRun(MODELS[name], replicas=2, checkpoint_interval=1), plain_run(name)
    for found in run_each(4, case_runs.train, (again,), (moved(again),)):
        assert expected[0]["losses"] == found[0]["losses"] and whole(expected) == whole(found)


@pytest.mark.nightly
def test_switched_off_it_trains_the_same() -> None:
    """It equals a run with moves."""
    case = CaseRun(MODELS["auxiliary loss"], replicas=2)
    check_moves_change_nothing(case, run(4, case_runs.train, replace(case, enabled=False)))


@pytest.mark.nightly
def test_they_train_under_our_schedules() -> None:
    check_as_under_1f1b(4, case_runs.train_moved, CaseRun(MODELS["auxiliary loss"], replicas=2))


@first
@pytest.mark.parametrize("kind", ["v", pytest.param("loop", marks=pytest.mark.nightly)])
def test_two_chunks_per_stage_change_nothing(name: str, kind: str) -> None:
    check_two_chunks_change_nothing(CaseRun(MODELS[name], replicas=2), kind, plain_run(name))


def test_decisions_with_moves_during_batches_change_nothing() -> None:
    often, never = (
        run(4, train_and_decide, CaseRun(MODELS["auxiliary loss"], replicas=2, dynmo=dynmo))
        for dynmo in ({**EVERY, "migration": "background"}, {"interval": 0})
    )
    assert often[0]["moved"] > 0 == never[0]["moved"]
    assert often[0]["losses"] == never[0]["losses"]
    assert all(rank["signals"] == often[0]["signals"] for rank in often)


def watch(run: CaseRun, favourites: bool) -> list[dict[str, Any]]:
    """Run a batch. Return, per layer, what each micro-batch sent to each expert, and the load signal.

    Args:
        favourites: whether all tokens go to the first two experts.
    """
    engine, model = case_runs.build(run)
    seen: dict[int, list[list[int]]] = {}
    parts = experts(engine)
    for index, part in parts.items():
        if favourites:
            part.router.bias_steps[:2] += 10**6
        seen[index] = []
        part.register_forward_hook(lambda part, _, __, index=index: seen[index].append(list(part.tokens_per_expert)))
    loss = engine.train_batch(case_runs.batches(engine, model)).item()
    return [
        {
            "layer": index,
            "replica": engine.grid.get_data_parallel_id(),
            "sums": seen[index],  # up to each micro-batch
            "signal": part.load_signal(),
            "loss": loss,
            "finite": all(bool(p.isfinite().all()) for p in part.parameters()),
            "shapes": [list(part.expand.shape), list(part.contract.shape)],
        }
        for index, part in parts.items()
    ]


@pytest.mark.parametrize("favourites", [False, True])
def test_the_load_signal_is_that_of_the_busiest_replica(favourites: bool) -> None:
    """It is a share of the work of every token going to every expert. All micro-batches and replicas count."""
    model = {"case": {"kind": "moe", "experts": 4, "expert_parallel": True, "routing": "bias"}}
    case = CaseRun(model, replicas=2)
    layers: dict[int, list[dict[str, Any]]] = {}
    for found in run(4, watch, case, favourites):
        for layer in found:
            layers.setdefault(layer["layer"], []).append(layer)
    assert len(layers) == 4
    tokens = 2 * SIZES["sequence_length"]  # of a micro-batch
    for one, other in layers.values():
        counts = [np.diff(np.array(replica["sums"]), axis=0, prepend=0) for replica in (one, other)]
        table = counts[0] + counts[1]  # [micro-batches, experts]
        busiest = np.maximum(table[:, :2].sum(axis=1), table[:, 2:].sum(axis=1)).sum()
        assert one["signal"] == other["signal"] == pytest.approx(busiest / (4 * 3 * tokens))
        assert one["signal"] == 1.0 if favourites else 0.5 <= one["signal"] < 1.0  # 2 of 4 experts, if shared evenly
        assert one["finite"] and other["finite"]
        assert one["shapes"] == other["shapes"] == [[2, 32, 16], [2, 16, 32]]
    if favourites:
        everywhere = run(4, watch, unsharded(case), True)
        assert layers[1][0]["loss"] == pytest.approx(everywhere[0][0]["loss"], rel=1e-6)


@first
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    resumed = run(4, case_runs.train, CaseRun(MODELS[name], replicas=2), str(tmp_path), 3)
    through = plain_run(name)
    assert through[0]["losses"] == resumed[0]["losses"] and through[0]["evaluated"] == resumed[0]["evaluated"]
    assert whole(through) == whole(resumed)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.nightly)])
def test_another_number_of_replicas_is_refused(saved: int, loaded: int, tmp_path: Path) -> None:
    case = CaseRun(MODELS["auxiliary loss"])
    run(2 * saved, save, replace(case, replicas=saved), str(tmp_path))
    for said, same in run(2 * loaded, load, replace(case, replicas=loaded), str(tmp_path)):
        assert f"written with {saved} data-parallel replicas, expected {loaded}" in said and same


def test_a_checkpoint_without_what_each_replica_has_is_refused(tmp_path: Path) -> None:
    """DeepSpeed's files have one replica's experts."""
    case = CaseRun(MODELS["auxiliary loss"], replicas=2)
    run(4, save, case, str(tmp_path))
    for folder in tmp_path.glob("*/dynmo"):
        shutil.rmtree(folder)
    for said, same in run(4, load, case, str(tmp_path)):
        assert "has no folder dynmo/" in said and "parameters that each replica has of its own" in said and same


def test_experts_that_cannot_be_shared_out_are_refused_on_every_rank() -> None:
    """Also on the first of three stages, which has no such layer."""
    odd = {"case": {"kind": "moe", "experts": 3, "expert_parallel": True, "dense_blocks": 2}}
    ranks = run(6, case_runs.refusals, [CaseRun(odd, stages=3, replicas=2)])
    assert all(said == ranks[0] for said in ranks)
    assert "3 experts (model.case.experts) cannot be shared out evenly over 2 data-parallel replicas" in ranks[0][0]
