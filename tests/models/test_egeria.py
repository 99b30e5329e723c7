import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynmo.config import parse_section
from ds_dynmo.models import ModelConfig, RunSizes, model_layers
from ds_dynmo.models.freezing import egeria as egeria_module
from ds_dynmo.models.freezing.config import EgeriaConfig
from ds_dynmo.models.freezing.egeria import Egeria, EgeriaController, moving_averages, slope
from ds_dynmo.models.freezing.plasticity import CAPTURED, REFERENCE, WatchedBlock, capture_first, similarity_loss, watch
from ds_dynmo.models.gpt import language_model_loss
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from ds_dynmo.models.seeding import generator_for

SIZES = {"layers": 3, "hidden_size": 16, "heads": 2, "sequence_length": 8, "tied_embedding": False}

RUN = RunSizes(total_steps=10, num_layers=6, blocks=range(1, 4))


def config(**block: Any) -> EgeriaConfig:
    return parse_section(EgeriaConfig, block, "egeria")


def controller(**block: Any) -> EgeriaController:
    return EgeriaController(config(**block), num_blocks=3)


# -- decisions ---------------------------------------------------------------------------------------------


def test_the_slope_of_a_line() -> None:
    assert slope([5.0, 3.0, 1.0]) == -2.0
    assert slope([2.0, 2.0]) == 0.0
    assert moving_averages([4.0, 0.0, 2.0], 3) == [4.0, 2.0, 2.0]


def test_the_front_block_is_frozen_when_its_plasticity_is_flat() -> None:
    decides = controller(window=2, threshold=0.1)
    front = [8.0, 6.0, 5.0, 4.9]  # averages 8, 7, 5.5, 4.95: slopes -1, -1.5, -0.55; 0.8 is flat
    found = []
    for value in [*front, 1.0, 1.0, 1.0, 1.0]:
        decides.record(value, 0.1)
        found.append(decides.frozen_blocks)
    assert found == [0, 0, 0, 1, 1, 2, 2, 2]  # the second block has its own history; the last is never frozen


def test_flatness_is_relative_to_the_largest_average_and_a_rise_is_not_flat() -> None:
    """Nor is a constant block flat before there is a slope."""
    frozen = []
    for window, *values in (
        (2, 100.0, 1.0, 2.0, 3.0),  # averages 100, 50.5, 1.5, 2.5: the last slope is 1
        (2, 1.0, 2.0, 3.0),
        (2, *map(float, range(1, 9))),
        (3, 1.0, 1.0),
        (3, 1.0, 1.0, 1.0),
    ):
        decides = controller(window=window, threshold=0.1)
        for value in values:
            decides.record(value, 0.1)
        frozen.append(decides.frozen_blocks)
    assert frozen == [1, 0, 0, 0, 1]


def test_non_finite_plasticities_do_not_count() -> None:
    decides = controller(window=2, threshold=0.1)
    for value in (1.0, float("nan"), None, float("inf")):
        decides.record(value, 0.1)
    assert decides.frozen_blocks == 0
    decides.record(1.0, 0.1)
    assert decides.frozen_blocks == 1


def test_a_fallen_learning_rate_unfreezes_and_halves_the_window() -> None:
    decides = controller(window=4, threshold=0.1, learning_rate_factor=10.0)
    assert not decides.unfreezes(0.0)  # nothing is frozen
    for _ in range(8):
        decides.record(1.0, 0.5)
    assert decides.frozen_blocks == 2
    assert not decides.unfreezes(0.06)
    assert decides.unfreezes(0.05)
    assert decides.frozen_blocks == 0
    decides.record(1.0, 0.05)
    assert decides.frozen_blocks == 0  # the history is forgotten
    decides.record(1.0, 0.05)
    assert decides.frozen_blocks == 1  # the window is two instead of four
    assert decides.unfreezes(0.005)
    for _ in range(2):
        decides.record(1.0, 0.005)
    assert decides.frozen_blocks == 1  # the smallest window is two


def test_a_resumed_controller_decides_as_the_first_one() -> None:
    first, second = controller(window=2, threshold=0.1), controller(window=2, threshold=0.1)
    for _ in range(3):
        first.record(1.0, 0.5)
    second.load_state_dict(first.state_dict())
    for each in (first, second):
        each.record(1.0, 0.5)
        assert each.frozen_blocks == 2
        assert each.unfreezes(0.05)
    assert first.state_dict() == second.state_dict()


# -- plasticity --------------------------------------------------------------------------------------------


def test_the_similarity_loss_follows_its_formula() -> None:
    one, other = (torch.randn(2, 3, 5, generator=generator_for(name)) for name in ("one", "other"))
    total = 0.0
    for i in range(6):
        rows = []
        for states in (one.view(6, 5).tolist(), other.view(6, 5).tolist()):
            products = [sum(x * y for x, y in zip(states[i], states[j], strict=True)) for j in range(6)]
            length = sum(product**2 for product in products) ** 0.5
            rows.append([product / length for product in products])
        total += sum((a - b) ** 2 for a, b in zip(*rows, strict=True))
    assert similarity_loss(one, other) == pytest.approx(total / 36, rel=1e-5)
    assert similarity_loss(one, one) == 0.0
    assert similarity_loss(one, 3 * one) == pytest.approx(0.0, abs=1e-12)  # only similarities count
    assert similarity_loss(one, torch.zeros_like(one)) < float("inf")


def test_long_sequences_are_sampled() -> None:
    states = torch.randn(1500, 4, generator=generator_for("long"))
    others = states.clone()
    others[torch.arange(1500) % 3 != 0] = 9.0
    assert similarity_loss(states, others) == 0.0


def blocks(**case: Any) -> list[nn.Module]:
    model = parse_section(ModelConfig, {**SIZES, **case}, "model")
    return [spec.build() for spec in model_layers(model)]


@pytest.mark.parametrize("case", [{}, {"case": {"kind": "mod", "every": 1, "capacity": 0.5}}])
def test_a_block_is_compared_with_its_earlier_self(case: dict[str, Any]) -> None:
    embedding, block, *_ = blocks(**case)
    block.register_forward_hook(capture_first)
    tokens = [torch.randint(256, (2, 8), generator=generator_for(n)) for n in range(3)]

    def batch(number: int) -> WatchedBlock:
        watch(block, True)
        block(embedding(tokens[number]))
        block(embedding(tokens[0]))  # a second micro-batch
        return WatchedBlock(block)

    assert not batch(1).comparable
    old = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    assert batch(1).plasticity() < 1e-4  # bf16 weights
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator_for(name)))
    new = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    watched = batch(2)
    with torch.no_grad():
        given = embedding(tokens[2])
        outputs = []
        for weights in (new, {name: weight.bfloat16().float() for name, weight in old.items()}):
            block.load_state_dict(weights)
            made = block(given)
            outputs.append(made[0] if isinstance(made, tuple) else made)
        block.load_state_dict(new)
    assert watched.plasticity() == similarity_loss(*outputs) > 1e-4
    assert all(torch.equal(parameter, new[name]) for name, parameter in block.named_parameters())
    assert all(t.dtype == torch.bfloat16 for t in vars(block)[REFERENCE].values())


@pytest.mark.parametrize("csr_from", [0.0, 1.0])
def test_a_pruned_block_is_compared_once_its_reference_is_pruned(csr_from: float) -> None:
    embedding, block, *_ = blocks(case={"kind": "pruning", "csr_from": csr_from})
    block.register_forward_hook(capture_first)

    def batch() -> WatchedBlock:
        watch(block, True)
        block(embedding(torch.arange(8).view(1, 8)))
        return WatchedBlock(block)

    found = [batch().comparable]
    for least in (None, 0.01, 0.02):
        for linear in prunable_linears(block) if least is not None else ():
            linear.prune(linear.weight.detach().abs() > least)
        for _ in range(2):
            watched = batch()
            found.append(watched.comparable)
            assert not watched.comparable or watched.plasticity() < float("inf")
    in_csr = csr_from == 0.0  # in CSR the structure gets smaller, too
    assert found == [False, True, True, False, True, not in_csr, True]


def test_an_unwatched_block_keeps_nothing() -> None:
    embedding, block, *_ = blocks()
    block.register_forward_hook(capture_first)
    block(embedding(torch.zeros(1, 8, dtype=torch.int64)))
    assert not WatchedBlock(block).comparable
    watch(block, True)
    block.eval()(embedding(torch.zeros(1, 8, dtype=torch.int64)))
    assert not WatchedBlock(block).comparable
    watch(block, False)
    assert vars(block)[REFERENCE] is None


# -- the case ----------------------------------------------------------------------------------------------


class Engine:
    """The part of the engine that Egeria uses, around a model on one stage."""

    def __init__(self) -> None:
        layers = blocks()
        self.module = nn.Module()
        for number, layer in enumerate(layers):
            self.module.add_module(str(number), layer)
        stage: Any = self.module
        stage._layer_specs = [SimpleNamespace() for _ in layers]
        stage._local_start, stage._local_stop = 0, len(layers)
        self.changes: list[str] = []
        self.callbacks: list[Any] = []
        self.learning_rate = 1.0
        self.before_step = self.callbacks.append
        self.before_release = lambda callback: None
        self.model_changed = self.changes.append

    def get_lr(self) -> list[float]:
        return [self.learning_rate]

    def sum_over_stages(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clone()

    def sum_over_world(self, numbers: torch.Tensor) -> torch.Tensor:
        return 2 * numbers  # as if two replicas had the same numbers

    def train_batch(self, step: int) -> None:
        states: Any = torch.randint(256, (1, 9), generator=generator_for("step", step))
        labels, states = states[:, 1:], states[:, :-1]
        for layer in self.module.children():
            states = layer(states)
        language_model_loss(states, labels).backward()
        for callback in self.callbacks:
            callback()
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


SOON = {"interval": 0.2, "delay": 0.1, "start": 0.0, "window": 2, "threshold": 100.0}  # of 10 steps: 2, 1


def run(engine: Engine, steps: range, case: Egeria) -> list[int]:
    frozen = []
    for step in steps:
        case.before_batch(step)
        trains = [any(p.requires_grad for p in layer.parameters()) for layer in engine.module.children()]
        frozen.append(trains.index(True))
        engine.train_batch(step)
        case.after_batch(step + 1)
    return frozen


def test_verdicts_take_effect_at_their_step() -> None:
    engine = Engine()
    case = Egeria(config(**SOON), engine, RUN)
    # The reference is made in step 0. Plasticities come from step 2 on, a slope of two averages in step 4, and the
    # verdict in step 5. The reference of the next block is made in step 6, and so on.
    assert run(engine, range(12), case) == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 3]
    assert engine.changes == ["freezing: first 2 layers", "freezing: first 3 layers"]
    assert vars(engine.module.get_submodule("1"))[REFERENCE] is None  # a frozen block needs none
    run(engine, range(12, 13), case)
    assert vars(engine.module.get_submodule("3"))[REFERENCE] is not None


def test_only_the_front_block_is_watched_on_inputs_of_the_reference() -> None:
    engine = Engine()
    case = Egeria(config(**SOON), engine, RUN)
    assert run(engine, range(7), case)[-1] == 2
    assert [vars(layer).get(REFERENCE) is not None for layer in engine.module.children()] == [0, 0, 1, 0, 0, 0]
    assert all(vars(layer).get(CAPTURED) is None for layer in engine.module.children())
    embedding, first, second, *_ = copy.deepcopy(engine.module).children()  # the weights that the reference copies
    inputs: list[torch.Tensor] = []
    engine.module.get_submodule("2").register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    run(engine, range(7, 9), case)
    tokens = torch.randint(256, (1, 9), generator=generator_for("step", 8))[:, :-1]
    assert torch.equal(inputs[-1], first(embedding(tokens)))
    assert not torch.equal(second(inputs[-1]), engine.module.get_submodule("2")(inputs[-1]))


def test_training_waits_for_a_verdict_only_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, compute = threading.Event(), egeria_module._plasticity

    def slowly(watched: Any) -> Any:
        assert may_go.wait(20)
        return compute(watched)

    monkeypatch.setattr(egeria_module, "_plasticity", slowly)
    engine = Engine()
    case = Egeria(config(**{**SOON, "delay": 0.2}), engine, RUN)
    run(engine, range(2), case)  # does not wait
    thread = threading.Timer(0.2, may_go.set)
    thread.start()
    case.before_batch(2)
    assert may_go.is_set()


def test_a_fallen_learning_rate_thaws_all_blocks() -> None:
    engine = Engine()
    case = Egeria(config(**SOON), engine, RUN)
    assert run(engine, range(6), case)[-1] == 2
    engine.learning_rate = 0.1
    assert run(engine, range(6, 8), case) == [0, 0]
    assert engine.changes[-1] == "freezing: first 0 layers"


def test_a_run_resumes_between_an_evaluation_and_its_verdict() -> None:
    one, other = Engine(), Engine()
    first = Egeria(config(**SOON), one, RUN)
    whole = run(one, range(5), first)
    state = first.state_dict()  # between an evaluation and its verdict
    assert state["under_way"]["due"] == 5
    second = Egeria(config(**SOON), other, RUN)
    other.module.load_state_dict(one.module.state_dict())
    for mine, theirs in zip(other.module.children(), one.module.children(), strict=True):
        vars(mine)[REFERENCE] = vars(theirs).get(REFERENCE)
    second.load_state_dict(state)
    assert whole[-1] == 0 and run(one, range(5, 12), first) == run(other, range(5, 12), second) == [2] * 6 + [3]
    assert first.state_dict() == second.state_dict()


def test_a_resumed_run_thaws_layers_that_were_built_frozen() -> None:
    engine = Engine()
    for number, layer in enumerate(engine.module.children()):
        layer.requires_grad_(number > 1)
    case = Egeria(config(**SOON), engine, RUN)
    assert run(engine, range(1), case) == [0] and engine.changes == ["freezing: first 0 layers"]


@pytest.mark.parametrize("where", ["_plasticity", "WatchedBlock"])
def test_a_failure_on_the_thread_or_before_it_is_raised(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(watched: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(egeria_module, where, fails)
    engine = Engine()
    case = Egeria(config(**SOON), engine, RUN)
    with pytest.raises(RuntimeError, match="plasticity of a block could not be computed") as caught:
        run(engine, range(3), case)
    assert isinstance(caught.value.__cause__, MemoryError)
