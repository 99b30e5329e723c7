"""Runs for test_expert_parallel.py; every function here runs on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import ds_dynmo
from ds_dynmo.models import dynamic_cases
from ds_dynmo.models.moe.expert_parallel import Replicas, share_of, through_replicas
from ds_dynmo.models.moe.grouped_linear import grouped_linear
from tests.distributed.case_workloads import CaseRun, batches, build
from tests.distributed.moe_workloads import experts

WIDTH = 3


def through(table: Sequence[Sequence[int]]) -> bool:
    """Rows of every rank through linear experts of all ranks: results and gradients as with all experts here?"""
    replica, replicas, total = dist.get_rank(), len(table), len(table[0])
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(total, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    every = [torch.randn(sum(row), WIDTH, generator=generator, dtype=torch.float64) for row in table]
    towards = [torch.randn(rows.shape, generator=generator, dtype=torch.float64) for rows in every]
    expected_rows, expected_weight = [rows.clone().requires_grad_() for rows in every], weight.clone().requires_grad_()
    expected = [grouped_linear(rows, expected_weight, row) for rows, row in zip(expected_rows, table)]
    torch.stack([(made * to).sum() for made, to in zip(expected, towards)]).sum().backward()

    mine = share_of(replica, replicas, total)
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


def train(run: CaseRun) -> dict[str, Any]:
    """Losses, gradient norms, and this rank's weights: those of experts with the number of the first."""
    engine, model = build(run)
    data, losses, norms = batches(engine, model), [], []
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
            f"{index}.{name}": (first[index] if getattr(p, "replica_own", False) else 0, p.detach().numpy().copy())
            for index, module in engine._layers.counted_modules().items()
            for name, p in module.named_parameters()
        },
    }


def watch(run: CaseRun, favourites: bool) -> list[dict[str, Any]]:
    """One batch: per layer of experts what each micro-batch sent to each expert, and the layer's load signal.

    Args:
        favourites: all tokens go to the first two experts.
    """
    engine, model = build(run)
    seen: dict[int, list[list[int]]] = {}
    parts = experts(engine)
    for index, part in parts.items():
        if favourites:
            part.router.bias_steps[:2] += 10**6
        seen[index] = []
        part.register_forward_hook(lambda part, _, __, index=index: seen[index].append(list(part.tokens_per_expert)))
    loss = engine.train_batch(batches(engine, model)).item()
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


def refused(runs: Sequence[CaseRun]) -> list[str]:
    """What ``initialize`` says."""
    said = []
    for run in runs:
        try:
            build(run)
            said.append("")
        except ds_dynmo.ConfigError as error:
            said.append(str(error))
    return said


def save(run: CaseRun, folder: str) -> None:
    engine, model = build(run)
    engine.train_batch(batches(engine, model))
    engine.save_checkpoint(folder)


def load(run: CaseRun, folder: str) -> tuple[str, bool]:
    """What loading says, and whether the engine is as it was."""
    engine, model = build(run)
    before = [parameter.clone() for parameter in engine.module.parameters()]
    try:
        engine.load_checkpoint(folder)
        said = ""
    except ds_dynmo.CheckpointError as error:
        said = str(error)
    same = all(torch.equal(*pair) for pair in zip(before, engine.module.parameters()))
    engine.train_batch(batches(engine, model))
    return said, same


def unsharded(run: CaseRun) -> CaseRun:
    """The same model, every replica with all experts."""
    return replace(run, model={**run.model, "moe": {**run.model["moe"], "expert_parallel": False}})
