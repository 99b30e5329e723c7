"""Where the engine equals DeepSpeed's, and where it differs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.deepspeed import passes
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import default_store
from tests.support.configs import Case, config, parameter_groups
from tests.support.harness import RankError, run
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


def train_stock(case: Case, which: str, make_layers: Callable[[Case], list[Any]] = layers) -> tuple[Any, ...]:
    """Return losses and weights under DeepSpeed's engine or ours; the clipping key is left out if it is NaN."""
    import deepspeed

    module = module_of(case, make_layers)
    initialize, settings = ds_dynmo.initialize, config(case)
    if which == "deepspeed":
        initialize, settings = deepspeed.initialize, config(replace(case, dynmo=None))
    if math.isnan(case.clip):
        del settings["gradient_clipping"]
    engine = initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    data = batches(engine)
    losses = [engine.train_batch(data).item() for _ in range(5)]
    return losses, {name: raw(parameter) for name, parameter in module.named_parameters()}


def test_without_a_block_the_engine_is_deepspeeds_class() -> None:
    stock, ours = (run(2, train_stock, Case(dynmo=None), which) for which in ("deepspeed", "ds_dynmo"))
    assert stock == ours


DRAWS_AS_DEEPSPEED = {"interval": 0, "randomness": {"per_layer": False}}


@pytest.mark.parametrize(
    "case",
    [
        Case(clip=0.0, tied=True),
        Case(clip=0.0, tied=True, replicas=2, dropout=True, dynmo=DRAWS_AS_DEEPSPEED),
        Case(clip=0.0, tied=True, precision="bf16"),
        Case(clip=0.0, tied=True, precision="bf16 zero1", replicas=2),
    ],
)
def test_an_unclipped_run_equals_deepspeed_bitwise(case: Case) -> None:
    stock, ours = (run(case.ranks, train_stock, case, which) for which in ("deepspeed", "ds_dynmo"))
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
    stock, ours = (run(case.ranks, train_stock, case, which, make_layers) for which in ("deepspeed", "ds_dynmo"))
    assert stock != ours


def test_deepspeed_clips_by_its_first_stage_by_default() -> None:
    """So runs without the key clip at 1.0, and differ from ours."""
    told_nothing = replace(Case(), clip=math.nan)
    (stock, _), (ours, _), (at_one, _) = (
        run(2, train_stock, case, which)[0]
        for case, which in ((told_nothing, "deepspeed"), (told_nothing, "ds_dynmo"), (Case(clip=1.0), "ds_dynmo"))
    )
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
    import deepspeed

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
    stock, ours = (run(3, train_samples, 3, which) for which in ("deepspeed", "ds_dynmo"))
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
        for _ in range(5):
            engine.train_batch(data)
    return {**found, "profiled": sorted({*found["profiled"]})}


def test_an_unprofiled_batch_runs_bare_layers_unless_they_draw_from_streams() -> None:
    case = Case(dynmo={"interval": 0, "randomness": {"per_layer": False}})
    assert run(2, layers_that_run, case) == [{"bare layers": True, "profiled": [2]}] * 2
    assert run(2, layers_that_run, Case()) == [{"bare layers": False, "profiled": [2]}] * 2


def train_with_client_scheduler(moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Train with two groups on every rank, some of them empty, and a scheduler with one lambda per group."""
    case = Case(stages=4)
    module = module_of(case)
    groups = [{"params": [], "name": "nobody's"}, *parameter_groups(module, "two")]
    optimizer = torch.optim.AdamW([{"name": "", **group} for group in groups], lr=0.03)
    factors = [lambda step: 0.1**step, lambda step: 0.9**step, lambda step: 0.5**step]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    engine = ds_dynmo.initialize(
        model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config(Case(optimizer="client"))
    )[0]
    losses = train_and_move(engine, batches(engine), moves, 6)
    return {"losses": losses, "lr": [group["lr"] for group in optimizer.param_groups]}


def test_moves_keep_a_scheduler_of_lambdas_and_an_empty_group() -> None:
    still = run(4, train_with_client_scheduler, [])
    moved = run(4, train_with_client_scheduler, [[0, 1, 2, 3, 8], [0, 5, 6, 7, 8], [0, 3, 5, 7, 8]])
    assert still == moved
    for result in still:
        assert result["lr"] == pytest.approx([0.03 * 0.1**6, 0.03 * 0.9**6, 0.02 * 0.5**6])


def gradient_norms(case: Case) -> list[float]:
    engine = build(case)
    data, found = batches(engine), []
    for _ in range(3):
        engine.train_batch(data)
        found.append(float(engine.get_global_grad_norm()))
    return found


def test_clipping_uses_the_norm_of_the_whole_model() -> None:
    norms = {tuple(result) for result in run(2, gradient_norms, Case(clip=1.0, stages=2))}
    alone = {tuple(result) for result in run(1, gradient_norms, Case(clip=1.0, stages=1))}
    assert norms == alone and len(norms) == 1


def train_without_data(case: Case) -> list[str]:
    """Return what is said without data, and where they end in a batch and in an evaluation of four micro-batches."""
    with pytest.raises(ConfigError) as missing:
        build(case).train_batch()
    engine = build(case)
    first = itertools.islice(batches(engine), 6)
    engine.train_batch(first)
    with pytest.raises(StopIteration) as in_batch:
        engine.train_batch(first)
    assert engine.global_steps == 1
    engine = build(case)
    for _ in range(2):  # on one stage an evaluation leaves nothing
        with pytest.raises(StopIteration) as in_evaluation:
            engine.eval_batch(itertools.islice(batches(engine), 1))
    return [str(raised.value) for raised in (missing, in_batch, in_evaluation)]


def test_data_that_are_missing_or_end_in_a_batch_are_named() -> None:
    ((missing, in_batch, in_evaluation),) = run(1, train_without_data, Case(stages=1, micro_batches=4), complete=False)
    assert missing.startswith("rank 0, the first stage, has no data: train_batch needs an iterator")
    assert in_batch.startswith("batch 2: the data ended after 2 of its 4 micro-batches, so no step was taken: ")
    assert "RepeatingLoader" in in_batch
    assert in_evaluation.startswith("an evaluation: the data ended, micro-batch 2 is missing: ")


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
        (Case(stages=3, micro_batches=4), 2, [0, 2]),
        (under("v"), 2, [0]),
        (under("loop"), 0, [0, 1]),
        pytest.param(under("v"), 0, [0, 1], marks=pytest.mark.nightly),
        pytest.param(under("loop"), 3, [0], marks=pytest.mark.nightly),
        pytest.param(under("v", stages=3), 0, [0, 2], marks=pytest.mark.nightly),
    ],
)
def test_after_data_that_end_no_batch_is_trained(case: Case, read: int, ends_on: list[int]) -> None:
    """A stage that waits for messages is told by its neighbour's end."""
    found = run(case.ranks, train_over_an_end, case, read, complete=False, backend="gloo")
    ends = f"StopIteration: batch 2: the data ended after {read} of its 4"
    for rank, (ended, after) in enumerate(found):
        assert ended.startswith(ends if rank in ends_on else (ends, "RuntimeError")), (rank, ended)
        assert after.startswith("ConfigError: a batch ended in an error on this rank") and "Resume" in after


def one_micro_batch(engine: Any) -> Iterator[Any]:
    """Yield one; the first stage's data end once the last stage has trained it, and looks for another."""
    yield next(batches(engine))
    if engine.is_first_stage():
        default_store().wait(["the data ended"])
    else:
        default_store().set("the data ended", "")


def evaluate_over_ends() -> tuple[list[str], float, float]:
    """Return how evaluations of four micro-batches end that find none and one, and the losses before and after."""
    engine = build(Case(micro_batches=4))
    before = engine.eval_batch(batches(engine)).item()
    said = []
    for data in (iter(()), one_micro_batch(engine)):
        with pytest.raises(StopIteration) as ended:
            engine.eval_batch(data)
        said.append(str(ended.value))
        if len(said) == 1:
            after = engine.eval_batch(batches(engine)).item()
    for another in (engine.eval_batch, engine.train_batch):
        with pytest.raises(ConfigError) as refused:
            another(batches(engine))
        said.append(str(refused.value))
    return said, before, after


def test_an_evaluation_whose_data_end_after_a_pass_is_the_last() -> None:
    """Stages have posted receives for the next passes, which would take messages of another batch."""
    for (none, one, *refused), before, after in run(2, evaluate_over_ends, complete=False):
        assert "micro-batch 1 is missing" in none and "micro-batch 2 is missing" in one and after == before
        assert all(said.startswith("a batch ended in an error on this rank") for said in refused)


def train_with_data_on_the_first_stage(case: Case) -> None:
    engine = build(case)
    engine.train_batch(batches(engine) if engine.is_first_stage() else None)


def test_a_last_stage_without_data_is_named() -> None:
    with pytest.raises(RankError, match="ConfigError: rank 1, the last stage, has no data: train_batch"):
        run(2, train_with_data_on_the_first_stage, Case(stages=2), complete=False)
