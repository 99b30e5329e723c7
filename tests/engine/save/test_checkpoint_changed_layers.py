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
    check_same,
    kept,
    load_and_continue,
    load_frozen,
    outcome,
    save_then_thaw,
    train_on,
)
from tests.support.configs import Case, config
from tests.support.harness import run, run_each
from tests.support.models import (
    WIDTH,
    Block,
    Changing,
    Embedding,
    FrozenBlock,
    Head,
    changing_layers,
    layers,
    module_of,
    seeded,
)
from tests.support.training import build, drop_decision, freeze, layers_of, raw, state, whole

pytestmark = pytest.mark.ranks


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("precision", "stages"),
    [
        ("bf16 zero1", 1),
        *(pytest.param(*variant, marks=NIGHTLY) for variant in (("bf16 zero1", 2), ("bf16", 1), ("bf16", 2))),
    ],
)
def test_frozen_layers_get_their_state_back(tmp_path: Path, precision: str, stages: int) -> None:
    case = Case(precision=precision, groups="two", clip=0.05, micro_batches=1)
    saved = run(2, save_then_thaw, case, str(tmp_path), 3, [0, 2, 8])
    (tmp_path / ".replaced.dynmo-removed").mkdir()  # by a save that was killed
    loaded = run(stages, load_frozen, replace(case, stages=stages), str(tmp_path))
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)
    assert not list(tmp_path.glob(".*")), "what it left is removed by a load"


def load_weights_only(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case)
    train_on(engine, 0, 2)
    engine.rebalance([0, 1, 8])
    engine.save_checkpoint(folder)
    engine.rebalance([0, 4, 8])
    train_on(engine, 50, 2)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    masters = {key: value for key, value in state(engine)["shards"].items() if key.endswith("/master")}
    weights = {key: value for key, value in state(engine).items() if isinstance(value, bytes) and "/" not in key}
    found = {"masters": masters, "weights": weights, "losses": train_on(engine, 2, 2)}
    trained = state(engine)
    engine.save_checkpoint(folder, tag="later")
    return {**found, "stays": state(engine) == trained}


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32 zero1", marks=NIGHTLY)])
def test_weights_load_without_state_under_a_wrapper(tmp_path: Path, precision: str) -> None:
    for result in run(2, load_weights_only, Case(precision=precision), str(tmp_path)):
        assert result["masters"]
        for key, (_, master) in result["masters"].items():
            weights = torch.frombuffer(bytearray(result["weights"][key.removesuffix("/master")]), dtype=torch.uint8)
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            assert weights.view(dtype).float().numpy().tobytes() == master
        assert result["losses"][1] < result["losses"][0] + 1
        assert result["stays"], "what was trained since is kept in full precision"


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
    train_on(engine, 0, 2)
    for layer in layers_of(engine).values():
        if isinstance(layer, Tapered):
            narrow(layer, engine.basic_optimizer)
            layer.factor = 0.5
    engine.model_changed("narrower")
    drop_decision(engine)
    engine.save_checkpoint(folder)
    return outcome(engine, train_on(engine, 2, 2))


@pytest.fixture(scope="module")
def narrowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The folder that :func:`save_narrowed_tie` saved in, and what the run had later."""
    folder = str(tmp_path_factory.mktemp("narrowed"))
    return folder, run(2, save_narrowed_tie, Case(), folder)


@pytest.mark.parametrize("stages", [3, *(pytest.param(number, marks=NIGHTLY) for number in (1, 2))])
def test_a_tied_layer_of_another_shape_is_saved_and_loaded(
    narrowed: tuple[str, list[dict[str, Any]]], stages: int
) -> None:
    folder, saved = narrowed
    check_same(saved, run(stages, load_and_continue, Case(stages=stages), folder, 1, tied_tapered, 2))


def weights_onto_moments(case: Case, folder: str) -> dict[str, Any]:
    """Load only the weights of :func:`save_narrowed_tie` into an engine that has trained."""
    engine = build(case, tied_tapered)
    train_on(engine, 50, 2)
    before = state(engine)
    engine.load_checkpoint(folder, load_module_only=True)
    found = {"before": before, "after": state(engine), "replica": engine.grid.get_data_parallel_id()}
    return {
        **found,
        "dtypes": {parameter.dtype for parameter in engine.module.parameters()},
        "losses": train_on(engine, 0, 2),
    }


def test_weights_of_another_shape_keep_the_state_of_other_parameters(
    narrowed: tuple[str, list[dict[str, Any]]],
) -> None:
    case = Case(stages=2, replicas=2, precision="bf16 zero1", groups="two")
    results = run(case.ranks, weights_onto_moments, case, narrowed[0])
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


def other_precisions(folder: str) -> list[tuple[set[Any], Any, list[float]]]:
    """Load weights in fp32, and those in bf16 again. Return dtypes, that of a converted buffer, and losses."""

    def make_layers(case: Case) -> list[Any]:
        made = changing_layers(case)
        return [made[0], LayerSpec(FrozenBlock, 1), *made[2:]]

    lower, full = (build(Case(precision=precision), make_layers) for precision in ("bf16 buffers", "fp32"))
    layer = layers_of(lower).get(2)
    if layer is not None:
        layer.register_buffer("exact", torch.ones(2, dtype=torch.float64))
    found = []
    for saved, loaded in ((lower, full), (full, lower)):
        train_on(saved, 0, 1)
        saved.save_checkpoint(folder)
        loaded.load_checkpoint(folder, load_module_only=True)
        tensors = dict([*loaded.module.named_parameters(), *loaded.module.named_buffers()])
        exact = next((tensors.pop(name).dtype for name in list(tensors) if "exact" in name), None)
        found.append(({tensor.dtype for tensor in tensors.values()}, exact, train_on(loaded, 1, 1)))
    return found


def test_weights_of_another_precision_are_converted(tmp_path: Path) -> None:
    results = run(2, other_precisions, str(tmp_path))
    assert [[exact for _, exact, _ in result] for result in results] == [[torch.float64] * 2, [None] * 2]
    for result in results:
        dtypes, _, losses = zip(*result)
        assert dtypes == ({torch.float32}, {torch.bfloat16})
        assert all(0 < loss < 5 for found in losses for loss in found)


# -- layers that changed ------------------------------------------------------------------------------


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


def save_changed(case: Case, folder: str, tags: Sequence[str] = ("by one",)) -> dict[str, Any]:
    engine = build(case, changing_layers)
    train_on(engine, 0, 2)
    change(engine)
    train_on(engine, 2, 1)
    for tag in tags:
        engine.module.checkpoint_parallel_write_pipeline = tag == "by all"  # replicas share the writing of layers
        engine.save_checkpoint(folder, tag=tag)
    before = kept(engine)
    return {**outcome(engine, train_on(engine, 3, 2)), "kept": before}


class Faster(Changing):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rate = 0.25


def load_changed(
    case: Case, folder: str, rate: float = 0.5, trained: int = 0, tags: Sequence[str] = ("by one",)
) -> list[dict[str, Any]]:
    def layers(case: Case) -> list[Any]:
        made = changing_layers(case)
        return made if rate == 0.5 else [Faster(i - 1) if 0 < i < 6 else layer for i, layer in enumerate(made)]

    engine, found = build(case, layers), []
    train_on(engine, 50, trained)
    for tag in tags:
        engine.load_checkpoint(folder, tag=tag)
        before = kept(engine)
        found.append({**outcome(engine, train_on(engine, 3, 2)), "kept": before})
    return found


def kept_of_all(results: list[dict[str, Any]]) -> dict[int, Any]:
    return {index: value for result in results for index, value in result["kept"].items()}


def test_changed_layers_load_as_they_were_saved(tmp_path: Path) -> None:
    case, folder = Case(groups="two", micro_batches=2), str(tmp_path)
    saved = run(2, save_changed, case, folder)
    there, faster = run_each(2, load_changed, (case, folder, 0.5, 2), (case, folder, 0.25))
    for ranks in (there, run(3, load_changed, replace(case, stages=3), folder)):
        for results in zip(*ranks, strict=True):
            loaded = list(results)
            assert kept_of_all(loaded) == kept_of_all(saved) and len(kept_of_all(loaded)) == 5
            check_same(saved, loaded)
    for results in zip(*faster, strict=True):
        values = kept_of_all(list(results)).values()
        assert {value[4] for value in values} == {0.25} and all(value[2] > 0 for value in values) and len(values) == 5


def test_replicas_keep_their_own_attributes_whoever_writes_layers(tmp_path: Path) -> None:
    case = Case(stages=1, replicas=2, groups="two", micro_batches=2)
    tags = ("by all", "by one")
    saved = run(2, save_changed, case, str(tmp_path), tags)
    first, other = (found["kept"] for found in saved)
    assert first != other and first.keys() == other.keys()
    for loaded in zip(*run(2, load_changed, case, str(tmp_path), 0.5, 1, tags), strict=True):
        for what in ("kept", "losses", "state"):
            assert [found[what] for found in loaded] == [found[what] for found in saved], what


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
    build(replace(case, start=(0, 1, 8))).save_checkpoint(folder)
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
    first, last = run(2, load_into_prepared_layers, Case(stages=2), str(tmp_path))
    assert {**first, **last} == {number: (number, 1, number % 3 != 0) for number in (0, 1, 2, 3, 4, 5, 7)}


def save_frozen(case: Case, folder: str) -> dict[str, Any]:
    """Save with leading layers frozen from the start and left out of the checkpoint."""
    engine = build(case)
    freeze(engine, 2)
    engine.model_changed("frozen")
    drop_decision(engine)
    train_on(engine, 0, 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    return outcome(engine, train_on(engine, 2, 2))


def test_frozen_layers_left_out_of_a_checkpoint_keep_their_weights(tmp_path: Path) -> None:
    saved = run(2, save_frozen, Case(), str(tmp_path))
    assert not torch.load(tmp_path / "global_step2" / "layer_00-model_states.pt")
    check_same(saved, run(3, load_and_continue, Case(stages=3), str(tmp_path), 0, layers, 2))
