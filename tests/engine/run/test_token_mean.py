"""The mean over the tokens of a batch: gradients are those of one micro-batch with all of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import nn

import ds_dynmo
from ds_dynmo.engine.deepspeed.module import layer_specs
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig, language_model_loss, model_layers
from ds_dynmo.models.vocabulary import takes_labels, with_labels
from tests.support.configs import Case, config
from tests.support.harness import run_each

LENGTH = 40
MODEL = {"layers": 4, "hidden_size": 16, "heads": 2, "sequence_length": LENGTH, "mlp_ratio": 2, "seed": 3}
COUNTS = [1, 60, 7, 0, 33, 2, 60, 18, 1, 1, 44, 5]  # labels of the micro-batches of a batch, on all replicas

Batch = tuple[torch.Tensor, torch.Tensor]


def micro_batch(number: int) -> Batch:
    """Make the micro-batch of a number, in the whole run: two rows, of whose labels few or many count."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 256, (2, LENGTH + 1), generator=generator)
    count = COUNTS[number % len(COUNTS)]
    dropped = torch.randperm(2 * LENGTH, generator=generator)[count:]
    return tokens[:, :-1], tokens[:, 1:].flatten().index_fill(0, dropped, -100).view(2, LENGTH)


def layers(slices: int | None) -> list[Any]:
    return model_layers(ModelConfig(**MODEL, tied_embedding=False, vocabulary_slices=slices))


class Run(NamedTuple):
    """A training run.

    Attributes:
        kind: of the schedule; None: there is no "dynmo" section.
        slices: of the vocabulary.
        moves: partitions of the first batches.
        steps: batches to train.
    """

    stages: int
    replicas: int
    kind: str | None = "1f1b"
    slices: int | None = None
    moves: Sequence[list[int]] = ()
    steps: int = 2


def train(run: Run) -> dict[str, Any]:
    """Train, and return the loss of an evaluation, those of all batches, and the gradients of each by parameter."""
    torch.manual_seed(0)
    module = PipelineModule(
        layers(run.slices), num_stages=run.stages, loss_fn=language_model_loss, partition_method="uniform"
    )
    section = None if run.kind is None else {"interval": 0, "schedule": {"kind": run.kind}}
    settings = config(Case(clip=0.0, micro_batches=len(COUNTS) // run.replicas, optimizer="SGD", dynmo=section))
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    if takes_labels(layer_specs(module)):
        engine.set_batch_fn(with_labels)
    gradients: list[dict[str, torch.Tensor]] = []
    if run.kind is not None:
        engine.before_step(lambda: gradients.append(gradients_of(engine.layers())))

    def data() -> Iterator[Any] | None:
        replica = engine.grid.get_data_parallel_id()
        mine = (micro_batch(number * run.replicas + replica) for number in itertools.count())
        reads = engine.stage_id in (0, run.stages - 1)
        return ds_dynmo.weigh_by_tokens(mine if reads else None, engine)

    evaluated, batches, losses = engine.eval_batch(data()).item(), data(), []
    for step in range(run.steps):
        if step < len(run.moves):
            engine.rebalance(run.moves[step])
        losses.append(engine.train_batch(batches).item())
    return {"evaluated": evaluated, "losses": losses, "gradients": gradients}


def gradients_of(modules: dict[int, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{number} {name}": parameter.grad.clone()
        for number, layer in modules.items()
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def expected(slices: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Train one micro-batch with all rows of the first batch, by torch alone: in fp64, as its fp32 is no more exact."""
    inputs, labels = (torch.cat(parts) for parts in zip(*map(micro_batch, range(len(COUNTS)))))
    built = {number: spec.build().double() for number, spec in enumerate(layers(slices))}
    found: Any = inputs if slices is None else (inputs, labels)
    for layer in built.values():
        found = layer(found)
    if slices is None:
        loss = F.cross_entropy(found.flatten(0, 1), labels.flatten())
    else:
        loss = found[labels != -100].mean()
    loss.backward()
    return loss.item(), gradients_of(built)


def merged(results: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Merge the gradients of all ranks, batch by batch. Replicas have the same."""
    steps = []
    for of_ranks in zip(*(result["gradients"] for result in results)):
        whole: dict[str, torch.Tensor] = {}
        for gradients in of_ranks:
            for name, gradient in gradients.items():
                assert torch.equal(whole.setdefault(name, gradient), gradient)
        steps.append(whole)
    return steps


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a parameter's gradient, relative to its norm."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - one).norm() / one.norm()) for name, one in wanted.items())


def check(ranks: int, *runs: Run) -> None:
    """Check runs against torch, and to the bit against those with as many replicas and slices."""
    before: dict[tuple[Any, ...], tuple[list[float], list[dict[str, torch.Tensor]]]] = {}
    for one, results in zip(runs, run_each(ranks, train, *((one,) for one in runs)), strict=True):
        loss, gradients = expected(one.slices)
        assert results[0]["evaluated"] == pytest.approx(loss, rel=1e-6)
        assert results[0]["losses"][0] == pytest.approx(loss, rel=1e-6)
        found = results[0]["losses"], merged(results)
        assert not one.moves or (one.replicas, one.slices) in before, "layers move that did not stay in a run before"
        losses, every = before.setdefault((one.replicas, one.slices), found)
        assert losses[: one.steps] == found[0]
        if one.kind is None:
            continue
        assert difference(found[1][0], gradients) < 1e-6
        for these, those in zip(every, found[1], strict=True):
            assert these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in these)


@pytest.mark.ranks
def test_gradients_are_those_of_one_micro_batch_with_all_rows_and_moves_change_nothing() -> None:
    check(
        4,
        Run(2, 2),
        Run(2, 2, "v", moves=([0, 3, 7], [0, 3, 4, 6, 7])),
        Run(2, 2, "loop", 3),
        Run(2, 2, "zero_bubble", 3, moves=([0, 2, 11], [0, 9, 11])),
        Run(2, 2, None, steps=1),
    )


@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.parametrize("slices", [None, 3])
def test_gradients_of_three_stages_are_those_of_one_micro_batch_with_all_rows(slices: int | None) -> None:
    kinds = ("1f1b", "zero_bubble", "v", *(("loop",) if slices else ()))
    check(6, *(Run(3, 2, kind, slices) for kind in kinds), Run(1, 6, slices=slices), Run(2, 3, slices=slices))
    check(4, Run(2, 2, "loop"), Run(2, 2, moves=([0, 1, 7], [0, 6, 7])), Run(4, 1, slices=slices))


def test_labels_that_are_no_tensor_are_refused_with_a_remedy() -> None:
    engine: Any = type("Engine", (), {"micro_batches": 2})()
    for labels in ((torch.ones(2), torch.ones(2)), [1, -100], "text"):
        data = ds_dynmo.weigh_by_tokens(iter([(torch.ones(2), labels)] * 2), engine)
        assert data is not None
        with pytest.raises(ConfigError, match=r"labels of a micro-batch are a \w+: should be a tensor with -100 .*map"):
            next(data)
    assert ds_dynmo.weigh_by_tokens(None, engine) is None
