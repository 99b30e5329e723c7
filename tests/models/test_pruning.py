import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_dynmo.config import parse_section
from ds_dynmo.models.case import RunSizes
from ds_dynmo.models.gpt import Block, gpt_layers, language_model_loss
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.layer_numbers import local_layers
from ds_dynmo.models.pruning import gradual, magnitude
from ds_dynmo.models.pruning.config import PruningConfig
from ds_dynmo.models.pruning.gradual import (
    PrunableBlock,
    Pruning,
    pruning_steps,
    scheduled_sparsity,
)
from ds_dynmo.models.pruning.magnitude import Linears, select_largest
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear, dense_state_dict
from tests.support.allocations import Allocations

SIZES = GPTConfig(vocab_size=20, sequence_length=6, layers=3, hidden_size=8, heads=2, tied_embedding=False)


def run_of(total_steps: int) -> RunSizes:
    return RunSizes(total_steps=total_steps, num_layers=SIZES.layers + 3, blocks=range(1, SIZES.layers + 1))


Sum = Callable[[torch.Tensor], torch.Tensor]


def alone(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clone()


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def block(layer: int = 1, csr_from: float | None = None) -> PrunableBlock:
    return PrunableBlock(SIZES, layer, csr_from=csr_from)


def prune_block(block: PrunableBlock, share: float) -> None:
    for number, linear in enumerate(prunable_linears(block)):
        size = linear.weight.numel()
        order = torch.randperm(size, generator=torch.Generator().manual_seed(number))
        linear.prune((order >= round(share * size)).view_as(linear.weight))


# -- schedule ----------------------------------------------------------------------------------------------


def test_the_papers_schedule() -> None:
    """Every 1000 steps from 3000 to 7000 of 10000, inclusive, as the paper's 52, 79 and 90%."""
    steps = pruning_steps(PruningConfig(), total_steps=10_000)
    assert list(steps) == [3000, 4000, 5000, 6000, 7000]
    assert list(steps.values()) == pytest.approx([0.0, 0.5203125, 0.7875, 0.8859375, 0.9])


def test_the_formula() -> None:
    t0, dt = 20.0, 10.0
    for times in (1, 3, 7):
        config = PruningConfig(times=times, initial_sparsity=0.1, final_sparsity=0.7)
        for pruning in range(times + 1):
            t = t0 + pruning * dt
            wanted = 0.7 + (0.1 - 0.7) * (1 - (t - t0) / (times * dt)) ** 3
            assert scheduled_sparsity(config, pruning) == pytest.approx(wanted)
        assert scheduled_sparsity(config, times) == 0.7


def test_the_last_pruning_always_takes_place() -> None:
    for total_steps in (1, 2, 3, 10, 150):
        steps = pruning_steps(PruningConfig(start=0.0, end=0.99), total_steps)
        assert list(steps.values())[-1] == 0.9 and max(steps) < total_steps
        assert list(steps) == sorted(steps)


# -- selection against a sort of the whole model -----------------------------------------------------------


def model(values: str, layers: int = 5) -> dict[int, list[PrunableLinear]]:
    """Make layers 1 to ``layers`` of two linear layers each, all of different sizes. "ties": few magnitudes."""
    made: dict[int, list[PrunableLinear]] = {}
    for layer in range(1, layers + 1):
        weights = [seeded(3 + layer, 7, seed=layer), seeded(5, 4, seed=50 + layer)]
        if values == "ties":
            weights = [weight.mul(2).round().div(2) for weight in weights]
        if values == "one":
            weights = [torch.full_like(weight, -0.25) for weight in weights]
        if values == "extreme":
            weights = [
                weight * 10.0 ** (40 * (torch.arange(weight.numel()).view_as(weight) % 2 - 1)) for weight in weights
            ]
        if values == "bf16":
            weights = [weight.bfloat16() for weight in weights]
        made[layer] = [PrunableLinear(nn.Parameter(weight)) for weight in weights]
    return made


def by_sorting(linears: Linears, keep: int) -> list[list[bool]]:
    """Return the mask of every linear layer by a stable sort of all weights, so that the first of equal ones stay."""
    everything = [
        (-abs(value), layer, position)
        for layer, members in linears.items()
        for position, value in enumerate(v for m in members for v in m.weight.detach().float().flatten().tolist())
    ]
    kept = {(layer, position) for _, layer, position in sorted(everything)[:keep]}
    masks = []
    for layer, members in linears.items():
        start = 0
        for member in members:
            size = member.weight.numel()
            masks.append([(layer, start + position) in kept for position in range(size)])
            start += size
    return masks


def on_stages(linears: Linears, keep: int, partition: Sequence[int]) -> list[list[bool]]:
    """Run :func:`select_largest` with the layers on stages: threads that sum over each other."""
    stages = [{layer: linears[layer] for layer in linears if a <= layer < b} for a, b in zip(partition, partition[1:])]
    barrier = threading.Barrier(len(stages))
    shared: dict[int, torch.Tensor] = {}
    found: dict[int, list[list[bool]]] = {}

    def run(stage: int) -> None:
        def sum_over_stages(numbers: torch.Tensor) -> torch.Tensor:
            assert numbers.dtype == torch.float64 and numbers.numel() <= 256
            shared[stage] = numbers
            barrier.wait()
            total = torch.stack([shared[each] for each in range(len(stages))]).sum(0)
            barrier.wait()
            return total

        selection = select_largest(stages[stage], keep, num_layers=8, sum_over_stages=sum_over_stages)
        found[stage] = [
            mask.flatten().tolist()
            for layer, members in stages[stage].items()
            for mask in selection.masks(layer, members)
        ]

    threads = [threading.Thread(target=run, args=(stage,)) for stage in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [mask for stage in range(len(stages)) for mask in found[stage]]


@pytest.mark.parametrize("values", ["normal", "ties", "one", "extreme", "bf16"])
def test_selection_equals_sorting_the_whole_model(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magnitude, "WEIGHTS_AT_ONCE", 13)  # pieces end within layers
    linears = model(values)
    size = sum(member.weight.numel() for members in linears.values() for member in members)
    wanted = {keep: by_sorting(linears, keep) for keep in (0, 1, size // 10, size // 2, size - 1, size)}
    for partition in ([0, 8], [0, 2, 3, 5, 8], [0, 1, 8]):
        for keep, masks in wanted.items():
            assert on_stages(linears, keep, partition) == masks, (partition, keep)
            assert sum(map(sum, masks)) == keep


def test_pruned_weights_stay_pruned_even_among_zeros() -> None:
    linears = {1: [PrunableLinear(nn.Parameter(torch.zeros(2, 3)))]}
    linears[1][0].prune(torch.tensor([[False, True, False], [True, True, False]]))
    masks = select_largest(linears, 2, num_layers=4, sum_over_stages=alone).masks(1, linears[1])
    assert [mask.tolist() for mask in masks] == [[[False, True, False], [True, False, False]]]


def test_memory_of_the_selection_does_not_grow_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magnitude, "WEIGHTS_AT_ONCE", 1 << 10)
    largest = []
    for rows in (64, 256):
        linears = {1: [PrunableLinear(nn.Parameter(seeded(rows, 64)))]}
        with Allocations() as allocations:
            select_largest(linears, rows * 16, num_layers=4, sum_over_stages=alone)
        largest.append(allocations.largest)
    assert largest[0] == largest[1] == 4 << 10  # one chunk in fp32


# -- the block ---------------------------------------------------------------------------------------------


def test_an_unpruned_block_equals_the_plain_one() -> None:
    hidden = seeded(2, 6, 8)
    plain, prunable = Block(SIZES, 1), block()
    assert torch.equal(prunable(hidden), plain(hidden))
    assert [(n, p.shape) for n, p in prunable.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    assert len(prunable_linears(prunable)) == 4 and prunable.load_signal() == 1.0


@pytest.mark.parametrize("csr_from", [None, 0.0])
def test_a_pruned_block_equals_the_plain_one_with_zeros(csr_from: float | None) -> None:
    for share in (0.5, 0.9, 1.0):
        pruned, plain = block(csr_from=csr_from), Block(SIZES, 1)
        prune_block(pruned, share)
        plain.load_state_dict(
            {name: value for name, value in pruned.state_dict().items() if name.endswith(("weight", "bias"))}
        )
        masks = {f"{name}.weight": part.mask for name, part in pruned.named_modules() if hasattr(part, "mask")}
        inputs = [seeded(2, 6, 8).requires_grad_() for _ in range(2)]
        outputs = [layer(given) for layer, given in zip((pruned, plain), inputs)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        for output in outputs:
            (output * seeded(2, 6, 8, seed=1)).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-6)
        for (name, mine), theirs in zip(pruned.named_parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None and mine.grad.isfinite().all()
            mask = masks.get(name)
            left, wanted = (grad if mask is None else grad * mask for grad in (mine.grad, theirs.grad))
            torch.testing.assert_close(left, wanted, rtol=1e-5, atol=1e-6)


def test_the_load_signal_is_the_retained_fraction() -> None:
    pruned = block()
    linears = prunable_linears(pruned)
    linears[0].prune(torch.zeros_like(linears[0].weight, dtype=torch.bool))  # query, key, value: 3 of 12 shares of h^2
    assert pruned.load_signal() == pytest.approx(9 / 12)
    linears[3].prune(torch.arange(256).view(8, 32) < 64)  # a quarter of contract's 4 of 12
    assert pruned.load_signal() == pytest.approx(6 / 12)
    pruned.requires_grad_(False)
    assert pruned.load_signal() == 0.0


@pytest.mark.parametrize("csr_from", [None, 0.0])
def test_activation_checkpointing_gives_the_same_numbers(csr_from: float | None) -> None:
    results = []
    for reentrant in (None, True, False):
        pruned = block(csr_from=csr_from)
        prune_block(pruned, 0.8)
        hidden = seeded(2, 6, 8).requires_grad_()
        output = pruned(hidden) if reentrant is None else checkpoint(pruned, hidden, use_reentrant=reentrant)
        output.square().sum().backward()
        results.append([output, hidden.grad, *[parameter.grad for parameter in pruned.parameters()]])
    for recomputed in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], recomputed, strict=True))


# -- the case ----------------------------------------------------------------------------------------------


class Engine:
    """The part of the engine that the case uses, on one stage with a plain optimizer."""

    def __init__(self, csr_from: float | None = None, dtype: torch.dtype = torch.float32) -> None:
        blocks = [block(layer, csr_from) for layer in range(1, 4)]
        ends = [spec.build() for spec in gpt_layers(SIZES)]
        self.module: Any = nn.Sequential(ends[0], *blocks, *ends[-2:]).to(dtype)
        self.module._layer_specs = gpt_layers(SIZES)
        self.module._local_start, self.module._local_stop = 0, 6
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01, weight_decay=0.1)
        self.changes: list[str] = []
        self.model_changed = self.changes.append
        self.sum_over_stages = self.sum_over_world = alone
        self.refusal: str | None = None
        self.callbacks: list[Any] = []
        self.before_step = self.callbacks.append

    def zero_gradients(self, elements: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        for parameter, where in elements:
            assert parameter.grad is not None
            parameter.grad.masked_fill_(where, 0)

    def keep_elements_refusal(self) -> str | None:
        return self.refusal

    def keep_elements(self, kept: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
        for module, name, index in kept:
            old = getattr(module, name)
            new = nn.Parameter(old.detach().view(-1)[index])
            setattr(module, name, new)
            for group in self.optimizer.param_groups:
                group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
            state = self.optimizer.state.pop(old, {})
            if state:
                self.optimizer.state[new] = {
                    name: held.view(-1)[index] if held.shape == old.shape else held for name, held in state.items()
                }

    def zero_elements(self, parameter: nn.Parameter, where: torch.Tensor) -> None:
        for held in (parameter.detach(), *self.optimizer.state[parameter].values()):
            if held.shape == parameter.shape:
                held.masked_fill_(where, 0)

    def train(self, seed: int) -> float:
        tokens = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(seed % 2))
        loss = language_model_loss(self.module(tokens[:, :-1]), tokens[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        for callback in self.callbacks:
            callback()
        self.optimizer.step()
        return loss.item()


SCHEDULE = {"start": 0.25, "end": 0.75, "times": 2, "final_sparsity": 0.95}


def linears_of(engine: Engine) -> list[PrunableLinear]:
    return [linear for _, layer in local_layers(engine.module) for linear in prunable_linears(layer)]


def scheduled_run(
    refusal: str | None, csr_from: float | None, dtype: torch.dtype
) -> tuple[list[float], list[torch.Tensor]]:
    """Train by SCHEDULE, and check that zeros stay. Return losses, and weights of each step and the last moments."""
    engine = Engine(csr_from, dtype)
    engine.refusal = refusal
    case = Pruning(parse_section(PruningConfig, SCHEDULE, "pruning"), engine, run_of(16))
    linears = linears_of(engine)
    total = sum(linear.weight.numel() for linear in linears)
    losses, kept, found = [], [], list[torch.Tensor]()
    gone = [torch.zeros_like(linear.weight, dtype=torch.bool) for linear in linears]
    for step in range(16):
        case.before_batch(step)
        kept.append(sum(linear.kept for linear in linears))
        losses.append(engine.train(step))
        for linear, before in zip(linears, gone):
            found.append(linear.dense_weight().clone())
            pruned = found[-1] == 0
            assert int(pruned.sum()) == linear.size - linear.kept
            moments = engine.optimizer.state[linear.weight]["exp_avg"]
            assert moments.shape == linear.weight.shape
            assert linear.mask is None or not moments[~linear.mask].any()
            assert pruned[before].all()
            before |= pruned
    assert kept == [total] * 8 + [round(total * (1 - 0.83125))] * 4 + [round(total * 0.05)] * 4
    assert engine.changes == ["pruning: 83.1% sparse", "pruning: 95.0% sparse"]
    assert {linear.is_compressed for linear in linears} == {refusal is None}
    assert {linear.computes_sparse for linear in linears} == {csr_from is not None}
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]
    signals = [layer.load_signal() for _, layer in list(local_layers(engine.module))[1:4]]
    assert sum(signals) / 3 == pytest.approx(0.05, abs=1e-3)
    for linear in linears:
        held = linear.weight.detach(), *(engine.optimizer.state[linear.weight][n] for n in ("exp_avg", "exp_avg_sq"))
        found += [each.view(-1)[linear.kept_places()] for each in held]
    others = [value for name, value in engine.module.named_parameters() if value.dim() > 1 or "norm" in name]
    return losses, [*found, *others[:1], *others[-1:]]


@pytest.mark.parametrize(
    ("csr_from", "dtype"), [(None, torch.float32), (None, torch.bfloat16), (0.5, torch.float32)], ids=str
)
def test_vectors_train_as_dense_weights_with_masks_to_the_bit(csr_from: float | None, dtype: torch.dtype) -> None:
    """A run prunes on schedule, dense weights and then vectors; losses, weights and moments are the same."""
    (dense, of_dense), (vectors, of_vectors) = (
        scheduled_run(refusal, csr_from, dtype) for refusal in ("stays dense", None)
    )
    assert dense == vectors and len(set(dense)) == 16
    assert all(torch.equal(one, other) for one, other in zip(of_dense, of_vectors, strict=True))


def test_vectors_whose_optimizer_cannot_shrink_them_any_more_get_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after loading weights alone into another optimizer, which is named once."""
    said: list[str] = []
    monkeypatch.setattr(gradual.logger, "warning", said.append)
    engine = Engine()
    case = Pruning(PruningConfig(), engine, run_of(40))
    case.prune(0.7)
    sizes = [linear.weight.numel() for linear in linears_of(engine)]
    engine.refusal = "Lamb scales by the norm of a whole weight"
    for sparsity in (0.8, 0.9):
        case.prune(sparsity)
    assert len(said) == 1 and "Lamb scales" in said[0]
    for step in range(2):
        engine.train(step)
    assert sizes == [linear.weight.numel() for linear in linears_of(engine)]
    kept = sum(linear.kept for linear in linears_of(engine))
    assert kept == round(0.1 * sum(linear.size for linear in linears_of(engine)))
    assert all(not linear.weight[~linear.mask].any() for linear in linears_of(engine) if linear.mask is not None)
    engine.refusal = None
    case.prune(0.9)
    assert kept == sum(linear.weight.numel() for linear in linears_of(engine))


def test_dense_weights_that_were_loaded_with_masks_shrink_before_the_next_batch() -> None:
    engine = Engine()
    case = Pruning(PruningConfig(start=0.9, end=0.95), engine, run_of(100))
    for linear in linears_of(engine):
        linear.prune(linear.weight.detach().abs() > linear.weight.detach().abs().quantile(0.9))
    before = [linear.weight.detach().clone() for linear in linears_of(engine)]
    case.load_state_dict({})
    case.before_batch(0)
    assert all(linear.is_compressed for linear in linears_of(engine))
    assert all(torch.equal(linear.dense_weight(), weight) for linear, weight in zip(linears_of(engine), before))


def test_a_plain_layer_loads_what_is_left() -> None:
    pruned, plain = block(), Block(SIZES, 1)
    prune_block(pruned, 0.8)
    weights = [linear.weight.detach().clone() for linear in prunable_linears(pruned)]
    for linear in prunable_linears(pruned):
        linear.compress()
    plain.load_state_dict(dense_state_dict(pruned))
    found = [part.weight for part in plain.modules() if isinstance(part, nn.Linear)]
    assert all(torch.equal(one, other) for one, other in zip(weights, found, strict=True))
    plain.load_state_dict(dense_state_dict(block()))


def test_a_second_pruning_to_no_more_changes_nothing() -> None:
    """A run that resumes at a pruning step prunes again. A lower sparsity restores no weight."""
    engine = Engine()
    case = Pruning(PruningConfig(), engine, run_of(40))
    engine.train(0)
    case.prune(0.7)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for sparsity in (0.7, 0.3):
        case.prune(sparsity)
        after = engine.module.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_fully_pruned_block_gives_finite_numbers() -> None:
    for csr_from in (None, 0.0):
        engine = Engine(csr_from)
        case = Pruning(PruningConfig(), engine, run_of(40))
        case.prune(1 - 1e-9)
        assert all(layer.load_signal() == 0.0 for _, layer in list(local_layers(engine.module))[1:4])
        assert all(math.isfinite(engine.train(step)) for step in range(3))
        assert all(parameter.isfinite().all() for parameter in engine.module.parameters())
