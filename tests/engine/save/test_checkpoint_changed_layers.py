"""Checkpoints of layers that changed after they were built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.models import local_layers
from tests.support.checkpoints import (
    STEPS,
    check_same,
    kept,
    load_and_continue,
    load_frozen,
    outcome,
    save_and_continue,
    save_then_thaw,
    skewed,
    train_on,
)
from tests.support.configs import Case, config
from tests.support.harness import run
from tests.support.models import (
    WIDTH,
    Block,
    Changing,
    Embedding,
    FrozenBlock,
    Head,
    changing_layers,
    module_of,
    seeded,
)
from tests.support.training import build, drop_decision, freeze, layers_of, raw, state, whole

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("precision", ["bf16", "bf16 zero1"])
@pytest.mark.parametrize("stages", [1, 2])
def test_frozen_layers_get_their_state_back(tmp_path: Path, precision: str, stages: int) -> None:
    case = Case(stages=2, precision=precision, groups="two", clip=0.05)
    saved = run(2, save_then_thaw, case, str(tmp_path), 3, [0, 2, 8])
    loaded = run(stages, load_frozen, replace(case, stages=stages), str(tmp_path))
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)


def load_weights_only(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case)
    train_on(engine, 50, 1)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    masters = {key: value for key, value in state(engine)["shards"].items() if key.endswith("/master")}
    weights = {key: value for key, value in state(engine).items() if isinstance(value, bytes) and "/" not in key}
    return {"masters": masters, "weights": weights, "losses": train_on(engine, STEPS, 2)}


@pytest.mark.parametrize("precision", ["bf16", "fp32 zero1"])
def test_weights_load_without_state_under_a_wrapper(tmp_path: Path, precision: str) -> None:
    case = Case(stages=2, precision=precision)
    run(2, save_and_continue, case, str(tmp_path), skewed(2))
    for result in run(2, load_weights_only, case, str(tmp_path)):
        assert result["masters"]
        for key, (_, master) in result["masters"].items():
            weights = torch.frombuffer(bytearray(result["weights"][key.removesuffix("/master")]), dtype=torch.uint8)
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            assert weights.view(dtype).float().numpy().tobytes() == master
        assert result["losses"][1] < result["losses"][0] + 1


def narrow(layer: Any, optimizer: Any) -> None:
    """Halve the inner width: two smaller parameters in the same group, without state."""
    for name, part in (("weight", layer.weight[:, :3]), ("back", layer.back[:3])):
        old, new = getattr(layer, name), nn.Parameter(part.detach().clone())
        setattr(layer, name, new)
        optimizer.state.pop(old, None)
        for group in optimizer.param_groups:
            group["params"] = [new if member is old else member for member in group["params"]]


class Tapered(nn.Module):
    """A layer that can be narrowed and weakened, and counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH, 6), 1))
        self.back = nn.Parameter(seeded((6, WIDTH), 2))
        self.factor = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.factor * torch.tanh(hidden @ self.weight) @ self.back


def tied_tapered(case: Case) -> list[Any]:
    tied = [TiedLayerSpec("t", Tapered, tied_weight_attr=["weight", "back"]) for _ in range(2)]
    return [LayerSpec(Embedding, 1), tied[0], LayerSpec(Block, 2), tied[1], LayerSpec(Head, 2)]


def save_narrowed_tie(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, tied_tapered)
    train_on(engine, 0)
    for layer in layers_of(engine).values():
        if isinstance(layer, Tapered):
            narrow(layer, engine.basic_optimizer)
            layer.factor = 0.5
    engine.model_changed("narrower")
    drop_decision(engine)
    engine.save_checkpoint(folder)
    return outcome(engine, train_on(engine, STEPS))


def weights_onto_moments(case: Case, folder: str) -> dict[str, Any]:
    """Load only the weights of :func:`save_narrowed_tie` into an engine that has trained."""
    engine = build(case, tied_tapered)
    train_on(engine, 50)
    before = state(engine)
    engine.load_checkpoint(folder, load_module_only=True)
    found = {"before": before, "after": state(engine), "replica": engine.grid.get_data_parallel_id()}
    return {
        **found,
        "dtypes": {parameter.dtype for parameter in engine.module.parameters()},
        "losses": train_on(engine, 0),
    }


def test_weights_of_another_shape_keep_the_state_of_other_parameters(tmp_path: Path) -> None:
    run(2, save_narrowed_tie, Case(stages=2), str(tmp_path))
    case = Case(stages=2, replicas=2, precision="bf16 zero1", groups="two")
    results = run(case.ranks, weights_onto_moments, case, str(tmp_path))
    before, after = (whole([{**found, "state": found[when]} for found in results]) for when in ("before", "after"))
    assert before.keys() == after.keys()
    assert {key.partition("/")[2] for key in before} == {"", "group", "master", "exp_avg", "exp_avg_sq", "step"}
    assert {"1.weight/exp_avg", "1.back/exp_avg"} <= before.keys()
    for key, value in before.items():
        layer, _, kind = key.partition("/")
        if layer in ("1.weight", "1.back") and kind.startswith("exp_avg"):
            assert len(after[key]) == len(value) // 2 and not any(after[key])
        elif kind.startswith("exp_avg"):
            assert after[key] == value and any(value), key
        elif kind == "step":
            assert after[key] == value
        elif kind == "master":
            weights = torch.frombuffer(bytearray(after[layer]), dtype=torch.bfloat16)
            assert raw(weights.float()) == after[key]
    assert {str(dtype) for found in results for dtype in found["dtypes"]} == {"torch.bfloat16"}
    assert all(0 < loss < 5 for found in results for loss in found["losses"])


def other_precisions(folder: str, ways: Sequence[tuple[str, str]]) -> list[tuple[set[Any], Any, list[float]]]:
    """Load weights into an engine of another precision. Return dtypes, that of a converted buffer, and losses."""

    def make_layers(case: Case) -> list[Any]:
        made = changing_layers(case)
        return [made[0], LayerSpec(FrozenBlock, 1), *made[2:]]

    found = []
    for number, (saved, loaded) in enumerate(ways):
        engine = build(Case(stages=2, precision=saved), make_layers)
        layer = layers_of(engine).get(2)
        if layer is not None:
            layer.register_buffer("exact", torch.ones(2, dtype=torch.float64))
        train_on(engine, 0, 1)
        engine.save_checkpoint(folder, tag=str(number))
        engine = build(Case(stages=2, precision=loaded), make_layers)
        engine.load_checkpoint(folder, tag=str(number), load_module_only=True)
        tensors = dict([*engine.module.named_parameters(), *engine.module.named_buffers()])
        exact = next((tensors.pop(name).dtype for name in list(tensors) if "exact" in name), None)
        found.append(({tensor.dtype for tensor in tensors.values()}, exact, train_on(engine, 1)))
    return found


def test_weights_of_another_precision_are_converted(tmp_path: Path) -> None:
    ways = [("bf16 buffers", "fp32"), ("fp32", "bf16 buffers")]
    results = run(2, other_precisions, str(tmp_path), ways)
    assert [[exact for _, exact, _ in result] for result in results] == [[torch.float64] * 2, [None] * 2]
    for result in results:
        dtypes, _, losses = zip(*result)
        assert dtypes == ({torch.float32}, {torch.bfloat16})
        assert all(0 < loss < 5 for found in losses for loss in found)


def change(engine: Any) -> None:
    layers = layers_of(engine)
    if 1 in layers:
        layers[1].gain = nn.Parameter(torch.full((6,), 0.9, device=engine.device))
        engine.basic_optimizer.param_groups[1]["params"].append(layers[1].gain)
    if 2 in layers:
        narrow(layers[2], engine.basic_optimizer)
        layers[2].mask = torch.tensor([1.0, 0.0, 1.0], device=engine.device)
    if 3 in layers:
        layers[3].weight.requires_grad_(False)
        layers[3].weight.grad = None
    if 4 in layers:
        layers[4].register_buffer("late", torch.arange(3.0))
    engine.model_changed("pruned")
    drop_decision(engine)


def save_changed(case: Case, folder: str, all_write: bool = False) -> dict[str, Any]:
    engine = build(case, changing_layers)
    train_on(engine, 0)
    change(engine)
    train_on(engine, STEPS, 1)
    engine.module.checkpoint_parallel_write_pipeline = all_write
    engine.save_checkpoint(folder)
    before = kept(engine)
    return {**outcome(engine, train_on(engine, STEPS + 1)), "kept": before}


class Faster(Changing):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rate = 0.25


def load_changed(case: Case, folder: str, rate: float, trained: int) -> dict[str, Any]:
    def layers(case: Case) -> list[Any]:
        made = changing_layers(case)
        return made if rate == 0.5 else [Faster(i - 1) if 0 < i < 6 else layer for i, layer in enumerate(made)]

    engine = build(case, layers)
    train_on(engine, 50, trained)
    engine.load_checkpoint(folder)
    before = kept(engine)
    return {**outcome(engine, train_on(engine, STEPS + 1)), "kept": before}


# -- layers that changed ------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "trained"), [(1, 0), (2, 0), (2, 2), (3, 0)])
def test_changed_layers_load_as_they_were_saved(tmp_path: Path, stages: int, trained: int) -> None:
    case = Case(stages=2, groups="two")
    saved = run(2, save_changed, case, str(tmp_path))
    loaded = run(stages, load_changed, replace(case, stages=stages), str(tmp_path), 0.5, trained)
    kept = [
        {index: value for result in results for index, value in result["kept"].items()} for results in (saved, loaded)
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 5
    check_same(saved, loaded)


@pytest.mark.parametrize("all_write", [False, True])
def test_replicas_keep_their_own_attributes(tmp_path: Path, all_write: bool) -> None:
    case = Case(stages=2, replicas=2, groups="two")
    saved = run(4, save_changed, case, str(tmp_path), all_write)
    loaded = run(4, load_changed, case, str(tmp_path), 0.5, 1)
    kept = [result["kept"] for result in saved]
    assert kept[0] != kept[1] and kept[0].keys() == kept[1].keys()
    assert [result["kept"] for result in loaded] == kept
    assert [result["losses"] for result in loaded] == [result["losses"] for result in saved]
    assert [result["state"] for result in loaded] == [result["state"] for result in saved]


def test_attributes_that_did_not_change_come_from_the_code(tmp_path: Path) -> None:
    case = Case(stages=2, groups="two")
    run(2, save_changed, case, str(tmp_path))
    loaded = run(2, load_changed, case, str(tmp_path), 0.25, 0)
    kept = {index: value for result in loaded for index, value in result["kept"].items()}
    assert {value[4] for value in kept.values()} == {0.25}
    assert all(value[2] > 0 for value in kept.values()) and len(kept) == 5


class Note:
    """An object of a class, which no checkpoint has."""

    def __init__(self, number: int) -> None:
        self.number = number


def passed_on(layer: nn.Module, args: Any, output: Any) -> Any:
    return output


def load_into_prepared_layers(case: Case, folder: str) -> dict[int, tuple[int, int, bool]]:
    """Change each layer of this stage, which its spec does not know of, initialize, and load where others were.

    Returns:
        Per layer, the number on its note, its hooks, and whether its weights train.
    """
    module = module_of(case)
    for number, layer in local_layers(module):
        layer.note = Note(number)
        layer.register_forward_hook(passed_on)
        layer.requires_grad_(number % 3 != 0)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = ds_dynmo.initialize(model=module, model_parameters=trained, config=config(case))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert engine.partition == [0, 1, 8]
    return {
        number: (layer.note.number, len(layer._forward_hooks), all(p.requires_grad for p in layer.parameters()))
        for number, layer in layers_of(engine).items()
    }


def test_what_the_code_did_to_a_layer_comes_with_it_to_the_saved_partition(tmp_path: Path) -> None:
    """A layer that is built afresh from its spec where it goes would lack it."""
    run(2, save_and_continue, Case(stages=2), str(tmp_path), skewed(2))
    first, last = run(2, load_into_prepared_layers, Case(stages=2), str(tmp_path))
    assert {**first, **last} == {number: (number, 1, number % 3 != 0) for number in (0, 1, 2, 3, 4, 5, 7)}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_tied_layer_of_another_shape_is_saved_and_loaded(tmp_path: Path, stages: int) -> None:
    saved = run(2, save_narrowed_tie, Case(stages=2), str(tmp_path))
    check_same(saved, run(stages, load_and_continue, Case(stages=stages), str(tmp_path), 1, tied_tapered))


def save_frozen(case: Case, folder: str) -> dict[str, Any]:
    """Save with leading layers frozen from the start and left out of the checkpoint."""
    engine = build(case)
    freeze(engine, 2)
    engine.model_changed("frozen")
    drop_decision(engine)
    train_on(engine, 0)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    return outcome(engine, train_on(engine, STEPS))


def test_frozen_layers_left_out_of_a_checkpoint_keep_their_weights(tmp_path: Path) -> None:
    case = Case(stages=2)
    saved = run(2, save_frozen, case, str(tmp_path))
    assert not torch.load(tmp_path / f"global_step{STEPS}" / "layer_00-model_states.pt")
    for stages in (2, 3):
        check_same(saved, run(stages, load_and_continue, replace(case, stages=stages), str(tmp_path)))
