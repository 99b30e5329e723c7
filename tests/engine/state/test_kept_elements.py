"""Parameters that become some of their elements train as dense ones with a mask, and take less memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_dynmo.errors import ConfigError, MigrationError
from ds_dynmo.plan import HeldBytes, MigrationPlan
from tests.support.checkpoints import outcome, train_on
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.memory import BESIDE, TensorBytes, held_now
from tests.support.models import WIDTH, Embedding, layers, seeded
from tests.support.sliced_layers import SlicedBlock, sliced_layers
from tests.support.training import batches, build, drop_decision, layers_of, state, train_after, whole

pytestmark = pytest.mark.ranks

nightly = partial(pytest.param, marks=pytest.mark.nightly)
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
    kept = []
    for index, module in here.items():
        old, module.places = module.places, places_of(index, stage)
        if shrinks:
            found = module.places if old is None else torch.searchsorted(old, module.places)
            kept.append((module, "weight", found))
        else:
            engine.zero_elements(module.weight, pruned_of(module))
    if shrinks:
        engine.keep_elements(kept)
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


def train_pruned(case: Case, moves: dict[int, list[int]], shrinks: bool, steps: int = 5) -> dict[str, Any]:
    """Train, and prune twice, the first time while a weight is frozen. The second takes from layers that moved."""
    engine = build(case, pruned_layers)
    if not shrinks:
        engine.before_step(
            lambda: engine.zero_gradients(
                (module.weight, pruned_of(module))
                for module in layers_of(engine).values()
                if getattr(module, "places", None) is not None
            )
        )

    def before(step: int) -> None:
        if step in (1, 4):  # layer 2 is frozen meanwhile, and pruned
            if 2 in layers_of(engine):
                layers_of(engine)[2].weight.requires_grad_(step == 4).grad = None
            engine.model_changed("frozen or unfrozen")
            drop_decision(engine)
        if step in (2, 3):
            prune(engine, step - 2, range(1, 4) if step == 2 else range(2, 5), shrinks=shrinks)
        if step in moves:
            move(engine, moves[step], overlapped="bf16" in case.precision)

    found = train_after(engine, before, steps)
    places = {index: getattr(module, "places", None) for index, module in layers_of(engine).items()}
    return {**found, "places": {index: kept.tolist() for index, kept in places.items() if kept is not None}}


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


TWO_CHUNKS = {2: [0, 1, 3, 5, 8], 3: [0, 2, 4, 6, 8], 4: [0, 3, 4, 5, 8]}


def under(kind: str, **case: Any) -> Case:
    return Case(clip=0.0, dynmo={"interval": 0, "schedule": {"kind": kind}}, **case)


NIGHTLY = [
    under("zero_bubble", optimizer="client AdamW"),
    under("loop"),
    Case(clip=0.0, replicas=2),
    Case(clip=0.0, precision="bf16", groups="two"),
    Case(clip=0.0, precision="fp16 zero1", groups="two"),
    Case(clip=0.0, precision="bf16 zero1", groups="two", replicas=2),
    Case(clip=0.0, precision="fp32 zero1", replicas=2, checkpoint_interval=2),
]
QUICK = [under("v", replicas=2, precision="bf16 zero1", groups="two"), Case(clip=0.0, optimizer="SGD", groups="two")]


@pytest.mark.parametrize("case", [*QUICK, *map(nightly, NIGHTLY)])
def test_it_trains_as_a_dense_weight_with_a_mask(case: Case) -> None:
    two_chunks = (case.dynmo or {}).get("schedule", {}).get("kind") in ("v", "loop")
    moves = TWO_CHUNKS if two_chunks else {2: [0, 2, 8], 3: [0, 6, 8], 4: [0, 3, 8]}
    dense, short = run_each(case.ranks, train_pruned, (case, {}, False), (case, moves, True))
    assert short[0]["partition"] == moves[4] != dense[0]["partition"]
    assert [result["losses"] for result in short] == [result["losses"] for result in dense]
    kept = {index: found for result in short for index, found in result["places"].items()}
    assert sorted(kept) == [1, 2, 3, 4] and whole(short) == shortened(whole(dense), kept)


@pytest.mark.parametrize("precision", ["fp32 zero1", nightly("fp32")])
def test_clipping_counts_the_same_squares(precision: str) -> None:
    case = Case(clip=0.05, precision=precision)
    dense, short = run_each(2, train_pruned, (case, {}, False, 4), (case, {}, True, 4))
    assert short[0]["losses"] == pytest.approx(dense[0]["losses"], rel=1e-5)


# -- with what else moves and saves layers -------------------------------------------------------------


def continue_pruned(case: Case, folder: str, saves: bool) -> dict[str, Any]:
    """Prune, train, save and re-pack, or load into a model that is dense; then train on."""
    engine = build(case, pruned_layers)
    if saves:
        train_on(engine, 0, 1)
        prune(engine, 0, range(1, 5), shrinks=True)
        train_on(engine, 1, 1)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    saved, replica = state(engine), engine.grid.get_data_parallel_id()
    if saves:
        engine.repack(1)
    found = {"state": {"shards": {}}} if engine.released else outcome(engine, train_on(engine, 2, 2))
    return {**found, "saved": saved, "replica": replica}


@pytest.mark.parametrize(
    ("precision", "replicas", "sizes"),
    [
        ("bf16 zero1", 1, [(1, 2), (3, 1)]),
        nightly("fp32", 1, [(3, 1)]),
        nightly("bf16 zero1", 2, [(2, 2), (1, 2), (3, 1)]),
        nightly("bf16", 1, [(1, 1), (2, 1), (3, 1)]),
        nightly("fp32", 2, [(2, 2), (3, 1), (1, 2)]),
    ],
)
def test_a_dense_model_loads_shorter_parameters_and_goes_on_as_fewer_ranks_do(
    tmp_path: Path, precision: str, replicas: int, sizes: list[tuple[int, int]]
) -> None:
    case = Case(precision=precision, replicas=replicas, clip=0.0)
    saved = run(case.ranks, continue_pruned, case, str(tmp_path), True)
    for stages, others in sizes:
        other = replace(case, stages=stages, replicas=others)
        loaded = run(other.ranks, continue_pruned, other, str(tmp_path), False)
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


def train_slices(case: Case, shrinks: bool) -> dict[str, Any]:
    """Let each slice keep elements of its own after the first batch, and move after the second."""
    engine = build(case, sliced_pruned)
    engine.before_step(
        lambda: engine.zero_gradients(
            (layer.up, layer.pruned) for layer in layers_of(engine).values() if hasattr(layer, "pruned")
        )
    )
    rank = engine.grid.get_slice_parallel_rank()

    def before(step: int) -> None:
        sliced = [layer for layer in layers_of(engine).values() if isinstance(layer, SlicedPruned)]
        if step == 1:
            own = torch.arange(3) + rank
            with pytest.raises(ConfigError, match="hold copies of the same parameters keep the same elements"):
                engine.keep_elements([(layer, "bias", own) for layer in sliced])
            for layer in sliced:
                mask = seeded(layer.shape, rank).to(engine.device) > 0
                layer.places = (~mask).view(-1).nonzero().view(-1)
                if not shrinks:
                    layer.pruned = mask
                    engine.zero_elements(layer.up, mask)
            engine.keep_elements([(layer, "up", layer.places) for layer in sliced if shrinks])
        elif step == 2:
            engine.rebalance([0, 4, 6])

    found = train_after(engine, before, 4)
    split = [p for n, p in engine.module.named_parameters() if n.endswith(".up")]
    return {"losses": found["losses"], "marks": {(p.dim(), p.model_parallel) for p in split}}


@pytest.mark.nightly
def test_each_slice_keeps_elements_of_its_own() -> None:
    case = Case(slices=2, blocks=4, clip=0.0, precision="bf16 zero1")
    dense, short = run_each(4, train_slices, (case, False), (case, True))
    assert [result["losses"] for result in short] == [result["losses"] for result in dense]
    assert set.union(*(result["marks"] for result in short)) == {(1, True)}
    assert set.union(*(result["marks"] for result in dense)) == {(2, True)}


# -- memory -------------------------------------------------------------------------------------------


class Large(Pruned):
    """Large compared with all other tensors."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.large = nn.Parameter(torch.zeros(200, 300))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + self.large.sum()


def large_layers(case: Case) -> list[Any]:
    made = pruned_layers(case)
    return [made[0], *(LayerSpec(Large, index) for index in range(case.blocks)), *made[-2:]]


def bytes_held(case: Case) -> list[tuple[int, int, int]]:
    """Return, before and after, the bytes of all tensors, those counted, and the elements of a profiled layer."""
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
        held = TensorBytes().began  # before another batch
        engine.model_changed("profile")
        engine.train_batch(data)
        assert not prunes or TensorBytes().began <= held + BESIDE
        counted = sum((held_now(engine)[0][layer] for layer in engine.chunks[0]), start=HeldBytes()).total
        assert counted <= TensorBytes().began <= counted + BESIDE
        layer = engine.profile.layers[2]
        found.append((counted, layer.static_bytes, layer.trainable_parameters))
        assert layer.workspace_bytes == (prunes and INNER * WIDTH * (4 if case.precision == "fp32" else 2))
    return found


@pytest.mark.parametrize(
    ("precision", "replicas"), [("bf16 zero1", 2), *(nightly(*one) for one in (("fp32", 1), ("bf16 zero1", 1)))]
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
    made, ends = pruned_layers(case), layers(replace(case, tied=True))
    return [ends[0], *made[1:-1], ends[-1]]


FIRST = torch.arange(3)
REFUSED: list[tuple[int, str, Any, str]] = [  # layer, name, index, what the message says after these two
    (1, "weight", torch.tensor([0, 40]), ": the index goes from 0 to 40; allowed are 0 to 39, places in the flattened"),
    (1, "weight", torch.tensor([-1, 4]), ": the index goes from -1 to 4; allowed are 0 to 39"),
    (1, "weight", torch.tensor([4, 4]), ": the index is not in ascending order"),
    (4, "weight", torch.tensor([5, 4]), ": the index is not in ascending order"),
    (4, "weight", torch.ones(40) > 0, ": the index is [40] of torch.bool; allowed is a 1-D tensor of int32 or int64"),
    (4, "weight", [0, 1], ": the index is list"),
    (1, "weights", FIRST, " is no parameter; Pruned has ['weight', 'back']"),
    (0, "weight", FIRST, " is tied"),
]


def refuse(engine: Any, kept: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine.keep_elements(kept)


def refused(case: Case) -> None:
    """Pass what cannot be kept, on the rank that has it. Nothing changes."""
    engine = build(case, tied_at_the_ends)
    data = batches(engine)
    engine.train_batch(data)
    here, before = layers_of(engine), state(engine)
    for number, name, index, message in REFUSED:
        refuse(engine, [(here[number], name, index)] if number in here else [], f"layer {number}: {name}{message}")
    own = FIRST + engine.grid.get_data_parallel_id()
    differ = "ranks that hold copies of the same parameters keep the same elements (by hash): ranks differ: "
    refuse(engine, [(here[1], "weight", own)] if 1 in here else [], differ)
    alien = [(nn.Linear(2, 2), "weight", FIRST)] if engine.global_rank == 0 else []
    refuse(engine, alien, "rank 0: 'weight' of a Linear, which is in no layer of this stage")
    refuse(engine, [(here[4], "back", FIRST)] * 2 if 4 in here else [], "layer 4: back is given twice")
    engine.before_step(lambda: engine.keep_elements([]))
    with pytest.raises(ConfigError, match="was called inside a batch"):
        engine.train_batch(data)
    refuse(engine, [], "rank 0: the optimizer's flat buffers hold gradients of a batch")  # it has not ended
    assert state(engine) == before


def test_what_cannot_be_kept_is_refused_by_name_on_every_rank() -> None:
    run(4, refused, Case(replicas=2, precision="bf16 zero1", micro_batches=1))


def belongings() -> None:
    """Keep elements of a marked weight with a hook, then fail; also without an optimizer, and with one of rows."""
    engine = build(Case(), pruned_layers)
    layer, shapes = layers_of(engine)[1 + 3 * engine.stage_id], []
    old, name = layer.weight, engine.param_names[layer.weight]
    old.mark = "mine"
    old.register_hook(lambda gradient: shapes.append(list(gradient.shape)))
    group = engine.basic_optimizer.param_groups[0]["params"]
    place = next(number for number, parameter in enumerate(group) if parameter is old)
    layer.places = torch.arange(3, dtype=torch.int32)
    engine.keep_elements([(layer, "weight", layer.places)])
    layer.places = layer.places.long()
    new = layer.weight
    engine.train_batch(batches(engine))
    assert new is not old and new.mark == "mine" and list(new.shape) == [3] and old.numel() == 0
    assert engine.param_names[new] == name and old not in engine.param_names
    assert engine.basic_optimizer.param_groups[0]["params"][place] is new
    assert shapes == [[3]] * 3 and engine.keep_elements_refusal() is None
    engine.stage.state.export = None
    with pytest.raises(MigrationError, match="Parameters had begun to change: resume the job") as error:
        engine.keep_elements([(layer, "weight", torch.arange(2))])
    assert not error.value.harmless
    engine = build(Case(optimizer="none"), pruned_layers)
    layer = layers_of(engine)[1 + 3 * engine.stage_id]
    layer.places = torch.arange(3)
    engine.keep_elements([(layer, "weight", layer.places)])
    assert engine.eval_batch(batches(engine)).item() > 0 and layer.weight.numel() == 3
    engine = build(Case(optimizer="Adafactor"), pruned_layers)
    message = "optimizer is Adafactor, which may treat elements by their rows"
    refuse(engine, [(layers_of(engine)[1 + 3 * engine.stage_id], "weight", FIRST)], message)
    assert engine.keep_elements_refusal().startswith(message)


def test_what_belongs_to_a_parameter_is_that_of_its_successor_and_state_of_rows_is_refused() -> None:
    run(2, belongings)
