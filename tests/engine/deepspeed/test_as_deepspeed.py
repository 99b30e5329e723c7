"""Where the engine equals DeepSpeed's, and where it differs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.deepspeed import passes
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import default_store
from tests.support.configs import Case, config, parameter_groups
from tests.support.harness import RankError, run, run_each
from tests.support.models import (
    SEQUENCE,
    WIDTH,
    Block,
    Embedding,
    Head,
    layers,
    layers_of_many_widths,
    module_of,
    scale,
    seeded,
)
from tests.support.training import batches, build, raw, train_and_move

pytestmark = pytest.mark.ranks

nightly = partial(pytest.param, marks=pytest.mark.nightly)


def train_stock(case: Case, which: str, make_layers: Callable[[Case], list[Any]] = layers) -> tuple[Any, ...]:
    """Return losses and weights under DeepSpeed's engine or ours; the clipping key is left out if it is NaN."""
    module = module_of(case, make_layers)
    initialize, settings = ds_dynmo.initialize, config(case)
    if which == "deepspeed":
        initialize, settings = deepspeed.initialize, config(replace(case, dynmo=None))
    if math.isnan(case.clip):
        del settings["gradient_clipping"]
    engine = initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    data = batches(engine)
    losses = [engine.train_batch(data).item() for _ in range(3)]
    return losses, {name: raw(parameter) for name, parameter in module.named_parameters()}


def stock_and_ours(case: Case, make_layers: Callable[[Case], list[Any]] = layers) -> list[Any]:
    return run_each(case.ranks, train_stock, *((case, which, make_layers) for which in ("deepspeed", "ds_dynmo")))


def test_without_a_block_the_engine_is_deepspeeds_class() -> None:
    stock, ours = stock_and_ours(Case(dynmo=None))
    assert stock == ours


DRAWS_AS_DEEPSPEED = {"interval": 0, "randomness": {"per_layer": False}}


@pytest.mark.parametrize(
    "case",
    [
        Case(clip=0.0, tied=True, precision="bf16 zero1", replicas=2, dropout=True, dynmo=DRAWS_AS_DEEPSPEED),
        nightly(Case(clip=0.0, tied=True)),
        nightly(Case(clip=0.0, tied=True, replicas=2, dropout=True, dynmo=DRAWS_AS_DEEPSPEED)),
        nightly(Case(clip=0.0, tied=True, precision="bf16")),
    ],
)
def test_an_unclipped_run_equals_deepspeed_bitwise(case: Case) -> None:
    stock, ours = stock_and_ours(case)
    assert stock == ours


@pytest.mark.parametrize(
    ("case", "make_layers"),
    [
        (Case(clip=0.0, dropout=True), layers),
        (Case(clip=0.0, tied=True, stages=1), layers),
        (Case(clip=0.0, stages=3), layers_of_many_widths),
    ],
    ids=["draws", "tied on one stage", "several tensors"],
)
def test_an_unclipped_run_differs_where_the_documentation_says(case: Case, make_layers: Any) -> None:
    stock, ours = stock_and_ours(case, make_layers)
    assert stock != ours


def test_deepspeed_clips_by_its_first_stage_by_default() -> None:
    """So runs without the key clip at 1.0, and differ from ours."""
    told_nothing = replace(Case(), clip=math.nan)
    calls = ((told_nothing, "deepspeed"), (told_nothing, "ds_dynmo"), (Case(clip=1.0), "ds_dynmo"))
    (stock, _), (ours, _), (at_one, _) = (results[0] for results in run_each(2, train_stock, *calls))
    assert stock[0] == ours[0] and stock[1] != ours[1]
    assert ours == at_one


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(seeded((SEQUENCE, WIDTH), 7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.places[None]


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))  # DeepSpeed makes no optimizer for a stage without parameters

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view(len(hidden), -1)


class Unflat(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.view(len(hidden), SEQUENCE, WIDTH))


def train_samples(stages: int, which: str) -> tuple[list[float], dict[str, bytes]]:
    """Train on single samples; where there are three stages, the first ends with Places and the second is Flat."""
    case = Case(stages=stages, clip=0.0, micro_batches=4, **({"dynmo": None} if which == "deepspeed" else {}))
    specs = [LayerSpec(Embedding, 1), LayerSpec(Places), LayerSpec(Flat), LayerSpec(Unflat, 0), LayerSpec(Head, 2)]
    module = module_of(case, lambda _: specs, partition_method="type:Places|Flat|Unflat")
    assert stages == 1 or list(module.parts) == [0, 2, 3, 5]
    initialize = deepspeed.initialize if which == "deepspeed" else ds_dynmo.initialize
    settings = {**config(case), "train_micro_batch_size_per_gpu": 1}
    engine = initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    data = ((tokens[:1], labels[:1]) for tokens, labels in batches(engine))
    return [engine.train_batch(data).item() for _ in range(3)], {n: raw(p) for n, p in module.named_parameters()}


def test_gradients_that_a_backward_pass_keeps_are_not_overwritten() -> None:
    """DeepSpeed receives the next message into their memory: the gradient of Places, and what Flat sends back."""
    alone = run(1, train_samples, 1, "ds_dynmo")[0]
    stock, ours = run_each(3, train_samples, (3, "deepspeed"), (3, "ds_dynmo"))
    assert all(losses == alone[0] for losses, _ in ours)
    assert {name: value for _, weights in ours for name, value in weights.items()} == alone[1]
    assert stock[0][0] != alone[0]


def layers_that_run(case: Case) -> dict[str, Any]:
    engine = build(case)
    found: dict[str, Any] = {"bare layers": True, "profiled": []}
    bare = passes.forward

    def watch(engine: Any, *inputs: Any) -> Any:
        if engine.profiler.measures:
            found["profiled"].append(engine.global_steps + 1)
        else:
            here = [*engine.module._modules.values(), scale]
            found["bare layers"] &= all(function in here for function in engine.module.forward_funcs)
        return bare(engine, *inputs)

    with mock.patch("ds_dynmo.engine.deepspeed.passes.forward", watch):
        data = batches(engine)
        for _ in range(3):
            engine.train_batch(data)
    return {**found, "profiled": sorted({*found["profiled"]})}


def test_an_unprofiled_batch_runs_bare_layers_unless_they_draw_from_streams() -> None:
    bare, streams = run_each(2, layers_that_run, (Case(dynmo=DRAWS_AS_DEEPSPEED),), (Case(),))
    assert bare == [{"bare layers": True, "profiled": [2]}] * 2
    assert streams == [{"bare layers": False, "profiled": [2]}] * 2


def train_with_client_scheduler(moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Train with two groups on every rank, some of them empty, and a scheduler with one lambda per group."""
    module = module_of(Case())
    groups = [{"params": [], "name": "nobody's"}, *parameter_groups(module, "two")]
    optimizer = torch.optim.AdamW([{"name": "", **group} for group in groups], lr=0.03)
    factors = [lambda step: 0.1**step, lambda step: 0.9**step, lambda step: 0.5**step]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    engine = ds_dynmo.initialize(
        model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config(Case(optimizer="client"))
    )[0]
    losses = train_and_move(engine, batches(engine), moves, 3)
    return {"losses": losses, "lr": [group["lr"] for group in optimizer.param_groups]}


def test_moves_keep_a_scheduler_of_lambdas_and_an_empty_group() -> None:
    """Where the first stage has the embedding alone, it has no vectors either."""
    still, moved = run_each(2, train_with_client_scheduler, ([],), ([[0, 1, 8], [0, 6, 8]],))
    assert still == moved
    for result in still:
        assert result["lr"] == pytest.approx([0.03 * 0.1**3, 0.03 * 0.9**3, 0.02 * 0.5**3])


def train_without_data() -> None:
    """Train and evaluate on one stage without data, and with too few for four micro-batches."""
    case = Case(stages=1, micro_batches=4)
    with pytest.raises(ConfigError, match=r"^rank 0, the first stage, has no data: train_batch needs an iterator"):
        build(case).train_batch()
    engine = build(case)
    for _ in range(2):  # on one stage an evaluation leaves nothing
        with pytest.raises(StopIteration, match=r"^an evaluation: the data ended, micro-batch 2 is missing: "):
            engine.eval_batch(itertools.islice(batches(engine), 1))
    data = itertools.islice(batches(engine), 6)
    engine.train_batch(data)
    ended = r"^batch 2: the data ended after 2 of its 4 micro-batches, so no step was taken: .*RepeatingLoader"
    with pytest.raises(StopIteration, match=ended):
        engine.train_batch(data)
    assert engine.global_steps == 1


def test_data_that_are_missing_or_end_in_a_batch_are_named() -> None:
    run(1, train_without_data, complete=False)


def train_over_an_end(case: Case, read: int) -> list[str]:
    """Train a batch, one for which there are ``read`` micro-batches, and another; return what the last two raised."""
    engine = build(case)
    said = []
    engine.train_batch(batches(engine))
    for data in (itertools.islice(batches(engine), read), batches(engine)):
        try:
            engine.train_batch(data)
            said.append("nothing")
        except (StopIteration, RuntimeError, ConfigError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def under(kind: str, **case: Any) -> Case:
    return Case(micro_batches=4, dynmo={"interval": 0, "schedule": {"kind": kind}}, **case)


@pytest.mark.parametrize(
    ("case", "read", "ends_on"),
    [
        (Case(stages=1, micro_batches=4), 2, [0]),
        (under("loop"), 0, [0, 1]),
        nightly(Case(stages=3, micro_batches=4), 2, [0, 2]),
        nightly(under("v"), 2, [0]),
        nightly(under("v"), 0, [0, 1]),
        nightly(under("loop"), 3, [0]),
        nightly(under("v", stages=3), 0, [0, 2]),
    ],
)
def test_after_data_that_end_no_batch_is_trained(case: Case, read: int, ends_on: list[int]) -> None:
    """A stage that waits for messages is told by its neighbour's end."""
    found = run(case.ranks, train_over_an_end, case, read, complete=False, backend="gloo")
    ends = f"StopIteration: batch 2: the data ended after {read} of its 4"
    told = "RankLostError: rank "  # where it is noticed first that another one has ended
    for rank, (ended, after) in enumerate(found):
        assert ended.startswith(ends if rank in ends_on else (ends, "RuntimeError", told)), (rank, ended)
        refused = after.startswith("ConfigError: a batch ended in an error on this rank") and "Resume" in after
        assert refused or (after.startswith(told) and case.stages > 1), (rank, after)
    assert not all(after.startswith(told) for _, after in found)  # none had ended before the first


def one_micro_batch(engine: Any) -> Iterator[Any]:
    """Yield one; the first stage's data end once the last stage has trained it, and looks for another."""
    yield next(batches(engine))
    if engine.is_first_stage():
        default_store().wait(["the data ended"])
    else:
        default_store().set("the data ended", "")


def evaluate_over_ends() -> None:
    """Evaluate four micro-batches of which there are none, then one."""
    engine = build(Case(micro_batches=4))
    before = engine.eval_batch(batches(engine)).item()
    with pytest.raises(StopIteration, match="micro-batch 1 is missing"):
        engine.eval_batch(iter(()))
    assert engine.eval_batch(batches(engine)).item() == before
    with pytest.raises(StopIteration, match="micro-batch 2 is missing"):
        engine.eval_batch(one_micro_batch(engine))
    for another in (engine.eval_batch, engine.train_batch):
        with pytest.raises(ConfigError, match=r"^a batch ended in an error on this rank"):
            another(batches(engine))


def test_an_evaluation_whose_data_end_after_a_pass_is_the_last() -> None:
    """Stages have posted receives for the next passes, which would take messages of another batch."""
    run(2, evaluate_over_ends, complete=False)


def train_with_data_on_the_first_stage(case: Case) -> None:
    engine = build(case)
    engine.train_batch(batches(engine) if engine.is_first_stage() else None)


def test_a_last_stage_without_data_is_named() -> None:
    with pytest.raises(RankError, match="ConfigError: rank 1, the last stage, has no data: train_batch"):
        run(2, train_with_data_on_the_first_stage, Case(stages=2), complete=False)
