"""Checkpoints of tensor-parallel pipelines; every function here runs on a rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from tests.distributed import checkpoint_workloads as work
from tests.distributed.topology_workloads import SLICES, SlicedBlock, sliced_layers
from tests.distributed.workloads import WIDTH, Case, build

STEPS = work.STEPS


def save_and_resume(case: Case, folder: str, move: Sequence[int]) -> list[dict[str, Any]]:
    """What a run does after a checkpoint, and what runs do that start from it: where it was, and where they are."""
    saved = work.save_and_go_on(case, folder, move, sliced_layers)
    return [saved, load(case, folder), load(case, folder, {"enabled": False})]


def load(case: Case, folder: str, dynmo: dict[str, Any] | None = None) -> dict[str, Any]:
    """Into an engine that has trained a batch of its own."""
    made = case if dynmo is None else Case(**{**vars(case), "dynmo": dynmo})
    return work.load_and_go_on(made, folder, 1, sliced_layers)


def between_stock_and_ours(case: Case, folder: str) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Per writer and reader what the writer went on to, and what the reader did."""
    saved = {}
    for writer in ("stock", "ours", "moved and back"):
        saved[writer] = work.save_as(writer, case, os.path.join(folder, writer), sliced_layers)
    pairs = (("stock", "ours"), ("ours", "stock"), ("moved and back", "stock"))
    return {
        (writer, reader): (
            saved[writer],
            work.load_as(reader, case, os.path.join(folder, writer), sliced_layers)[:2],
        )
        for writer, reader in pairs
    }


def refuse_another_degree(case: Case, folders: Sequence[str]) -> list[tuple[str, bool]]:
    engine = build(case, sliced_layers)
    return [work.attempt(engine, folder) for folder in folders]


# -- layers that change, on each slice in a way of its own ---------------------------------------------


class SlicedChanging(SlicedBlock):
    """Can be narrowed, and given one parameter more that is split as well; keeps a word of its slice."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.word = ""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        return hidden * self.gain.mean() if "gain" in self._parameters else hidden


def changing_layers(case: Case) -> list[Any]:
    first, *blocks, last = sliced_layers(case)
    return [first, *(LayerSpec(SlicedChanging, index) for index in range(len(blocks))), last]


def change(engine: Any) -> None:
    """Slices lose different numbers of columns; slice 1 alone is given one more parameter that is split."""
    groups, mine = engine.basic_optimizer.param_groups, SLICES["index"]
    for index, layer in engine._layers.modules().items():
        if not isinstance(layer, SlicedChanging) or index % 2 == 0:
            continue
        layer.word = f"slice {mine}"
        kept = 2 + mine
        for name, values in (("up", layer.up[:kept]), ("down", layer.down[:, :kept])):
            old, new = getattr(layer, name), nn.Parameter(values.detach().clone())
            new.model_parallel = True  # type: ignore[attr-defined]
            setattr(layer, name, new)
            engine.basic_optimizer.state.pop(old, None)
            for group in groups:
                group["params"] = [new if member is old else member for member in group["params"]]
        layer.gain = nn.Parameter(torch.full((WIDTH,), 0.9))
        layer.gain.model_parallel = True  # type: ignore[attr-defined]
        groups[0]["params"].append(layer.gain)
    engine.model_changed("pruned")
    engine._controller.decided(moved=False)


def words(engine: Any) -> dict[tuple[int, int], str]:
    """Per slice and layer."""
    modules = engine._layers.modules().items()
    return {(SLICES["index"], i): layer.word for i, layer in modules if isinstance(layer, SlicedChanging)}


def save_changed(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, changing_layers)
    work.train_on(engine, 0)
    change(engine)
    work.train_on(engine, STEPS, 1)
    engine.save_checkpoint(folder)
    return {**work.outcome(engine, work.train_on(engine, STEPS + 1)), "words": words(engine)}


def load_changed(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, changing_layers)
    engine.load_checkpoint(folder)
    return {**work.outcome(engine, work.train_on(engine, STEPS + 1)), "words": words(engine)}
