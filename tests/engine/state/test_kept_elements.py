"""Parameters that become some of their elements train as dense ones with a mask, and take less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo.errors import ConfigError, MigrationError
from ds_dynmo.plan import HeldBytes, MigrationPlan
from tests.support.checkpoints import STEPS, outcome, train_on
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.memory import BESIDE, TensorBytes, held_now
from tests.support.models import WIDTH, Embedding, layers, seeded
from tests.support.sliced_layers import SlicedBlock, sliced_layers
from tests.support.training import batches, build, drop_decision, layers_of, outcome_of, state, whole

pytestmark = pytest.mark.ranks

INNER = 5


class Pruned(nn.Module):
    """A residual layer that multiplies by some elements of a weight: scattered into a dense one in every use, or its
    product with a mask."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((INNER, WIDTH), index))
        self.back = nn.Parameter(seeded((WIDTH, INNER), index + 50))
        self.register_buffer("places", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight.dim() == 1:
            weight = weight.new_zeros(INNER * WIDTH).index_put((self.places,), weight).view(INNER, WIDTH)
        return hidden + F.linear(torch.tanh(F.linear(hidden, weight)), self.back)

    def workspace_bytes(self) -> int:
        """A dense weight in every use."""
        return INNER * WIDTH * self.weight.element_size() if self.weight.dim() == 1 else 0


def pruned_layers(case: Case) -> list[Any]:
    return [LayerSpec(Embedding, 1), *[LayerSpec(Pruned, i) for i in range(case.blocks)], *layers(case)[-2:]]


def places_of(index: int, stage: int) -> torch.Tensor:
    """Return which elements of layer ``index`` stay in the first and in the second pruning."""
    order = torch.randperm(INNER * WIDTH, generator=torch.Generator().manual_seed(index))
    share = [(30, 8), (37, 21), (20, 0)][index % 3]
    return order[: share[stage]].sort().values


def prune(engine: Any, stage: int, layers: Sequence[int], *, shrinks: bool) -> None:
    """Prune by making parameters shorter, or by zeros that stay."""
    here = {index: module for index, module in layers_of(engine).items() if index in layers}
    if shrinks:
        kept = []
        for index, module in here.items():
            places = places_of(index, stage)
            old = module.places
            kept.append((module, "weight", places if old is None else torch.searchsorted(old, places)))
            module.places = places
        engine.keep_elements(kept)
    else:
        for index, module in here.items():
            module.places = places_of(index, stage)
            engine.zero_elements(module.weight, pruned_of(module))
    engine.model_changed("pruned")
    drop_decision(engine)


def pruned_of(module: Pruned) -> torch.Tensor:
    found = torch.ones(INNER * WIDTH, dtype=torch.bool, device=module.weight.device)
    found[module.places] = False
    return found.view(INNER, WIDTH)


def move(engine: Any, partition: list[int], *, overlapped: bool) -> None:
    if not overlapped:
        engine.rebalance(partition)
        return
    engine.migrator.prepare(MigrationPlan.between(engine.stage.placement, partition), overlapped=True)
    with pytest.raises(ConfigError, match="layers are on their way to other stages"):
        engine.keep_elements([])
    engine.migrator.start()
    engine.migrator.commit()
    engine.stage.publish_move()


def train_pruned(case: Case, *, shrinks: bool, moves: dict[int, list[int]], overlapped: bool = False) -> dict[str, Any]:
    """Train, and prune twice, once while a weight is frozen. A second pruning takes from layers that moved."""
    engine = build(case, pruned_layers)
    if not shrinks:
        engine.before_step(
            lambda: engine.zero_gradients(
                (module.weight, pruned_of(module))
                for module in layers_of(engine).values()
                if getattr(module, "places", None) is not None
            )
        )
    data, losses = batches(engine), []
    for step in range(7):
        if step in (1, 5):  # layer 2 is frozen meanwhile, and pruned
            if 2 in layers_of(engine):
                layers_of(engine)[2].weight.requires_grad_(step == 5).grad = None
            engine.model_changed("frozen or unfrozen")
            drop_decision(engine)
        if step in (2, 4):
            prune(engine, step // 2 - 1, range(1, 4) if step == 2 else range(2, 5), shrinks=shrinks)
        if step in moves:
            move(engine, moves[step], overlapped=overlapped)
        losses.append(engine.train_batch(data).item())
    return {**outcome_of(engine, losses), "places": places(engine)}


def places(engine: Any) -> dict[int, list[int]]:
    found = {index: getattr(module, "places", None) for index, module in layers_of(engine).items()}
    return {index: kept.tolist() for index, kept in found.items() if kept is not None}


def shortened(dense: dict[str, Any], places: dict[int, list[int]]) -> dict[str, Any]:
    """Take of every tensor of the pruned weights the elements that stay."""
    found = dict(dense)
    for index, kept in places.items():
        for key, value in dense.items():
            if key.partition("/")[0] == f"{index}.weight" and isinstance(value, bytes) and not key.endswith("/step"):
                size = len(value) // (INNER * WIDTH)
                assert size, key
                found[key] = b"".join(value[size * place :][:size] for place in kept)
    return found


CASES = [
    Case(clip=0.0, optimizer="client AdamW", dynmo={"interval": 0, "schedule": {"kind": "zero_bubble"}}),
    Case(clip=0.0, optimizer="SGD", groups="two"),
    Case(clip=0.0, precision="bf16", groups="two"),
    Case(clip=0.0, dynmo={"interval": 0, "schedule": {"kind": "loop"}}),
    Case(clip=0.0, precision="fp16 zero1", groups="two"),
    Case(clip=0.0, replicas=2, precision="bf16 zero1", groups="two"),
    Case(clip=0.0, replicas=2, precision="fp32 zero1", checkpoint_interval=2),
    Case(clip=0.0, replicas=2),
    Case(clip=0.0, replicas=2, precision="bf16 zero1", dynmo={"interval": 0, "schedule": {"kind": "v"}}),
]
MOVES = {2: [0, 2, 8], 3: [0, 4, 8], 4: [0, 6, 8], 5: [0, 3, 8]}
TWO_CHUNKS = {2: [0, 1, 3, 5, 8], 3: [0, 2, 3, 7, 8], 4: [0, 2, 4, 6, 8], 5: [0, 3, 4, 5, 8]}


def moves_of(case: Case) -> dict[int, list[int]]:
    kind = (case.dynmo or {}).get("schedule", {}).get("kind")
    return TWO_CHUNKS if kind in ("v", "loop") else MOVES


def both(case: Case) -> list[dict[str, Any]]:
    dense = train_pruned(case, shrinks=False, moves={})
    overlapped = "bf16" in case.precision
    return [dense, train_pruned(case, shrinks=True, moves=moves_of(case), overlapped=overlapped)]


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_it_trains_as_a_dense_weight_with_a_mask(replicas: int) -> None:
    cases = [case for case in CASES if case.replicas == replicas]
    for case, ranks in zip(cases, run_each(2 * replicas, both, *((case,) for case in cases))):
        dense, short = ([result[way] for result in ranks] for way in range(2))
        assert short[0]["partition"] == moves_of(case)[5] != dense[0]["partition"], case
        assert [result["losses"] for result in short] == [result["losses"] for result in dense], case
        kept = {index: found for result in short for index, found in result["places"].items()}
        assert sorted(kept) == [1, 2, 3, 4] and whole(short) == shortened(whole(dense), kept), case


def clipped(case: Case) -> tuple[list[float], list[float]]:
    dense, short = (train_pruned(case, shrinks=shrinks, moves={})["losses"] for shrinks in (False, True))
    return dense, short


def test_clipping_counts_the_same_squares() -> None:
    for case in (Case(clip=0.05), Case(clip=0.05, precision="fp32 zero1")):
        for dense, short in run(2, clipped, case):
            assert short == pytest.approx(dense, rel=1e-5)


# -- with what else moves and saves layers -------------------------------------------------------------


def train_repacked(case: Case, sizes: dict[int, int]) -> dict[str, Any]:
    """Prune after the first batch, and re-pack after those of ``sizes``."""
    engine = build(case, pruned_layers)
    data, losses = batches(engine), {}
    while engine.global_steps < 5:
        losses[engine.global_steps] = engine.train_batch(data).item()
        if engine.global_steps == 1:
            prune(engine, 0, range(1, 5), shrinks=True)
        if engine.global_steps in sizes:
            engine.repack(sizes[engine.global_steps])
        if engine.released:
            return {"losses": losses, "replica": 0, "state": {"shards": {}}}
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_re_packing_changes_nothing(precision: str) -> None:
    case = Case(precision=precision, clip=0.0)
    still, repacked = run_each(2, train_repacked, (case, {}), (case, {2: 1}))
    assert repacked[0]["losses"] == still[0]["losses"]
    assert whole(repacked) == whole(still)


def save_pruned(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, pruned_layers)
    train_on(engine, 0)
    prune(engine, 0, range(1, 5), shrinks=True)
    train_on(engine, STEPS, 1)
    engine.save_checkpoint(folder)
    return {"saved": state(engine), **outcome(engine, train_on(engine, STEPS + 1))}


def load_pruned(case: Case, folder: str) -> dict[str, Any]:
    """Load into a model that is dense."""
    engine = build(case, pruned_layers)
    engine.load_checkpoint(folder)
    return {"saved": state(engine), **outcome(engine, train_on(engine, STEPS + 1))}


@pytest.mark.parametrize(
    ("precision", "replicas", "sizes"),
    [
        ("fp32", 1, [(3, 1)]),
        ("bf16 zero1", 2, [(1, 2), (3, 1)]),
        pytest.param("bf16", 1, [(1, 1), (2, 1), (3, 1)], marks=pytest.mark.nightly),
        pytest.param("fp32", 2, [(2, 2), (3, 1), (1, 2)], marks=pytest.mark.nightly),
    ],
)
def test_a_dense_model_loads_shorter_parameters(
    tmp_path: Path, precision: str, replicas: int, sizes: list[tuple[int, int]]
) -> None:
    case = Case(precision=precision, replicas=replicas, clip=0.0)
    saved = run(case.ranks, save_pruned, case, str(tmp_path))
    for stages, others in sizes:
        loaded = run(stages * others, load_pruned, replace(case, stages=stages, replicas=others), str(tmp_path))
        before, after = (whole([{**result, "state": result["saved"]} for result in found]) for found in (saved, loaded))
        assert before == after
        if others == replicas:
            assert loaded[0]["losses"] == saved[0]["losses"] and whole(loaded) == whole(saved)


class SlicedPruned(SlicedBlock):
    """A tensor-parallel layer of which each slice keeps other elements."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("places", None)
        self.shape = tuple(self.up.shape)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up
        if up.dim() == 1:
            up = up.new_zeros(self.shape).view(-1).index_put((self.places,), up).view(self.shape)
        return self.multiply(hidden, up)


def sliced_pruned(case: Case) -> list[Any]:
    made = sliced_layers(case)
    return [made[0], *(LayerSpec(SlicedPruned, index) for index in range(case.blocks)), made[-1]]


def sliced(engine: Any) -> list[SlicedPruned]:
    return [layer for layer in layers_of(engine).values() if isinstance(layer, SlicedPruned)]


def train_slices(case: Case, *, shrinks: bool) -> dict[str, Any]:
    engine = build(case, sliced_pruned)
    engine.before_step(
        lambda: engine.zero_gradients(
            (layer.up, mask)
            for layer in layers_of(engine).values()
            if (mask := getattr(layer, "pruned", None)) is not None
        )
    )
    data, losses = batches(engine), []
    for step in range(4):
        if step == 1:
            own = torch.arange(3) + engine.grid.get_slice_parallel_rank()
            with pytest.raises(ConfigError, match="hold copies of the same parameters keep the same elements"):
                engine.keep_elements([(layer, "bias", own) for layer in sliced(engine)])
            kept = []
            for layer in sliced(engine):
                mask = seeded(layer.shape, engine.grid.get_slice_parallel_rank()).to(engine.device) > 0
                layer.places = (~mask).view(-1).nonzero().view(-1)
                kept.append((layer, "up", layer.places))
                if not shrinks:
                    layer.pruned = mask
                    engine.zero_elements(layer.up, mask)
            engine.keep_elements(kept if shrinks else [])
        if step == 2:
            engine.rebalance([0, 4, 6])
        losses.append(engine.train_batch(data).item())
    split = [p for n, p in engine.module.named_parameters() if n.endswith(".up")]
    return {"losses": losses, "marks": [(p.dim(), p.model_parallel) for p in split]}


@pytest.mark.nightly
def test_each_slice_keeps_elements_of_its_own() -> None:
    case = Case(slices=2, blocks=4, clip=0.0, precision="bf16 zero1")
    results = run(4, train_slices_both, case)
    for dense, short in results:
        assert short["losses"] == dense["losses"]
        assert set(short["marks"]) <= {(1, True)} and set(dense["marks"]) <= {(2, True)}
    assert any(short["marks"] for _, short in results)


def train_slices_both(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    return train_slices(case, shrinks=False), train_slices(case, shrinks=True)


# -- memory -------------------------------------------------------------------------------------------


class Large(Pruned):
    """Large compared with all other tensors."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.large = nn.Parameter(torch.zeros(200, 300))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + self.large.sum()


def bytes_held(case: Case) -> list[tuple[int, int, int]]:
    """Return, before and after, the bytes of all tensors, those counted, and the elements of a profiled layer."""

    def large_layers(case: Case) -> list[Any]:
        made = pruned_layers(case)
        return [made[0], *(LayerSpec(Large, index) for index in range(case.blocks)), *made[-2:]]

    engine = build(case, large_layers)
    data, found = batches(engine), []
    for prunes in (False, True):
        if prunes:
            here = [layer for layer in layers_of(engine).values() if isinstance(layer, Large)]
            for layer in here:
                layer.places = torch.arange(30, device=engine.device)
            engine.keep_elements([(layer, "large", torch.arange(0, 60_000, 10)) for layer in here])
            engine.keep_elements([(layer, "weight", layer.places) for layer in here])
            del here
            now = TensorBytes().began  # before another batch
            engine.model_changed("pruned")
            engine.train_batch(data)
            assert TensorBytes().began <= now + BESIDE
        else:
            engine.model_changed("profile")
            engine.train_batch(data)
        counted = sum((held_now(engine)[0][layer] for layer in engine.chunks[0]), start=HeldBytes()).total
        assert counted <= TensorBytes().began <= counted + BESIDE
        layer = engine.profile.layers[2]
        found.append((counted, layer.static_bytes, layer.trainable_parameters))
        assert layer.workspace_bytes == (prunes and INNER * WIDTH * (4 if case.precision == "fp32" else 2))
    return found


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [("fp32", 1), pytest.param("bf16", 1, marks=pytest.mark.nightly), ("bf16 zero1", 2)],
)
def test_memory_falls_with_the_elements(precision: str, replicas: int) -> None:
    case = Case(
        precision=precision,
        replicas=replicas,
        dynmo={"interval": 0, "migration": "blocking", "profile": {"batches": 1}, "min_improvement": 0.99},
    )
    for before, after in run(case.ranks, bytes_held, case):
        (held, static, elements), (held_after, static_after, elements_after) = before, after
        assert (elements - 80, elements_after - 70) == (60_000, 6_000)
        assert held_after < 0.15 * held and static_after < 0.15 * static


# -- what is refused ----------------------------------------------------------------------------------


def tied_at_the_ends(case: Case) -> list[Any]:
    made = pruned_layers(case)
    ends = layers(replace(case, tied=True))
    return [ends[0], *made[1:-1], ends[-1]]


def refused(case: Case) -> list[str]:
    """Pass what cannot be kept, on the rank that has it; return the messages. Nothing changes."""
    engine = build(case, tied_at_the_ends)
    data = batches(engine)
    engine.train_batch(data)
    here, replica = layers_of(engine), engine.grid.get_data_parallel_id()
    first = torch.arange(3)
    wrong: list[tuple[int, str, Any]] = [
        (1, "weight", torch.tensor([0, 40])),
        (1, "weight", torch.tensor([-1, 4])),
        (1, "weight", torch.tensor([4, 4])),
        (4, "weight", torch.tensor([5, 4])),
        (4, "weight", torch.ones(40, dtype=torch.bool)),
        (4, "weight", [0, 1]),
        (1, "weights", first),
        (0, "weight", first),
        (1, "weight", first + replica),
    ]
    given: list[list[Any]] = [[(here[i], name, index)] if i in here else [] for i, name, index in wrong]
    given.append([(nn.Linear(2, 2), "weight", first)] if engine.global_rank == 0 else [])
    given.append([(here[4], "back", first), (here[4], "back", first)] if 4 in here else [])
    before = state(engine)
    found = []
    for kept in given:
        with pytest.raises(ConfigError) as error:
            engine.keep_elements(kept)
        found.append(str(error.value))
    engine.before_step(lambda: engine.keep_elements([]))
    with pytest.raises(ConfigError) as error:
        engine.train_batch(data)
    found.append(str(error.value))
    with pytest.raises(ConfigError) as error:  # that batch has not ended
        engine.keep_elements([])
    found.append(str(error.value))
    assert state(engine) == before
    return found


def test_what_cannot_be_kept_is_refused_by_name_on_every_rank() -> None:
    case = Case(replicas=2, precision="bf16 zero1", micro_batches=1)
    results = run(4, refused, case)
    assert all(result == results[0] for result in results)
    expected = [
        "layer 1: weight: the index goes from 0 to 40; allowed are 0 to 39, places in the flattened parameter of",
        "layer 1: weight: the index goes from -1 to 4; allowed are 0 to 39",
        "layer 1: weight: the index is not in ascending order",
        "layer 4: weight: the index is not in ascending order",
        "layer 4: weight: the index is [40] of torch.bool; allowed is a 1-D tensor of int32 or int64",
        "layer 4: weight: the index is list",
        "layer 1: weights is no parameter; Pruned has ['weight', 'back']",
        "layer 0: weight is tied",
        "ranks that hold copies of the same parameters keep the same elements (by hash): ranks differ: ",
        "rank 0: 'weight' of a Linear, which is in no layer of this stage",
        "layer 4: back is given twice",
        "was called inside a batch",
        "rank 0: the optimizer's flat buffers hold gradients of a batch",
    ]
    for message, part in zip(results[0], expected, strict=True):
        assert part in message


def refusals() -> list[Any]:
    found = [build(Case(optimizer=name)).keep_elements_refusal() for name in ("AdamW", "SGD", "Adafactor")]
    engine = build(Case(optimizer="Adafactor"), pruned_layers)
    layer = layers_of(engine).get(1 + 3 * engine.stage_id)
    with pytest.raises(ConfigError) as error:
        engine.keep_elements([(layer, "weight", torch.arange(3))])
    return [*found, str(error.value)]


def belongings() -> dict[str, Any]:
    """Keep elements of a marked weight with a hook, then fail; also without an optimizer."""
    engine = build(Case(), pruned_layers)
    layer, shapes = layers_of(engine)[1 + 3 * engine.stage_id], []
    old = layer.weight
    old.mark = "mine"
    old.register_hook(lambda gradient: shapes.append(list(gradient.shape)))
    group = engine.basic_optimizer.param_groups[0]["params"]
    place = next(number for number, parameter in enumerate(group) if parameter is old)
    name = engine.param_names[old]
    layer.places = torch.arange(3, dtype=torch.int32)
    engine.keep_elements([(layer, "weight", layer.places)])
    layer.places = layer.places.long()
    new = layer.weight
    engine.train_batch(batches(engine))
    found = {
        "new": (new is not old, new.mark, list(new.shape), old.numel()),
        "named": engine.param_names[new] == name and old not in engine.param_names,
        "trained": engine.basic_optimizer.param_groups[0]["params"][place] is new,
        "shapes": shapes,
    }
    engine.stage.state.export = None
    with pytest.raises(MigrationError, match="Parameters had begun to change: resume the job") as error:
        engine.keep_elements([(layer, "weight", torch.arange(2))])
    assert not error.value.harmless
    engine = build(Case(optimizer="none"), pruned_layers)
    layer = layers_of(engine)[1 + 3 * engine.stage_id]
    layer.places = torch.arange(3)
    engine.keep_elements([(layer, "weight", layer.places)])
    return {**found, "evaluated": engine.eval_batch(batches(engine)).item() > 0, "left": layer.weight.numel()}


def test_what_belongs_to_a_parameter_is_that_of_its_successor() -> None:
    for found in run(2, belongings):
        assert found["new"] == (True, "mine", [3], 0) and found["shapes"] == [[3]] * 3
        assert found["named"] and found["trained"] and found["evaluated"] and found["left"] == 3


def test_optimizers_with_state_of_rows_are_refused() -> None:
    for alike, also, reason, message in run(2, refusals):
        assert alike is also is None
        assert reason.startswith("optimizer is Adafactor, which may treat elements by their rows") and reason in message
