"""Layers that torch compiles: when they are, and when not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_dynmo
from ds_dynmo.engine.run import split_modules
from ds_dynmo.engine.run.compiled_layers import CompiledLayers, backend_of_call, check_compiler
from ds_dynmo.models.gpt import Block
from ds_dynmo.models.gpt_config import GPTConfig
from ds_dynmo.models.pruning.gradual import PrunableBlock
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from ds_dynmo.models.sparse_attention.attention import HashSparseAttention
from ds_dynmo.models.sparse_attention.config import SparseAttentionConfig

WIDTH = 4


class Backend:
    """Compiles nothing; counts what it is asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.calls += 1
        return graph.forward


@pytest.fixture
def backend() -> Iterator[Backend]:
    yield Backend()
    torch._dynamo.reset()


def compiled(backend: Any) -> CompiledLayers:
    layers = CompiledLayers()
    layers.switch_on(backend)
    return layers


class Layer(nn.Module):
    def __init__(self, factor: int = 1) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.factor * torch.tanh(self.linear(hidden))


class Branching(Layer):
    """Which path it takes depends on the data: not one graph."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) if hidden.sum() > 0 else hidden


class Checkpointing(Layer):
    """Recomputes a part of itself, and draws random numbers in it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed = super().forward
        return checkpoint(lambda given: F.dropout(changed(given)), hidden, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_layer_is_as_ever_between_batches(backend: Backend) -> None:
    layer, layers = Layer(), compiled(backend)
    names, attributes = list(layer.state_dict()), dict(vars(layer))
    inputs = torch.ones(2, WIDTH)
    expected = layer(inputs)
    with layers.batch({3: layer}):
        assert torch.equal(layer(inputs), expected)
    assert backend.calls == 1
    assert list(layer.state_dict()) == names and vars(layer) == attributes
    layer(inputs + 1)  # another value: outside a batch nothing would be compiled for another shape either
    assert torch.equal(layer(torch.ones(5, WIDTH)), expected[:1].expand(5, WIDTH)) and backend.calls == 1


class Doubling(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


def test_a_module_may_be_several_layers(backend: Backend) -> None:
    layer, layers = Doubling(), compiled(backend)
    with layers.batch({0: layer, 2: layer}):
        layer(torch.ones(2, WIDTH))
    assert backend.calls == 1 and layer._compiled_call_impl is None


class Around(nn.Module):
    """Does what torch cannot trace, around a part."""

    compiled_parts = ("part",)

    def __init__(self) -> None:
        super().__init__()
        self.part = Layer()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.part(hidden) if hidden.sum() > 0 else hidden  # type: ignore[no-any-return]


def test_a_class_may_name_the_parts_that_are_compiled(backend: Backend) -> None:
    layer, layers = Around(), compiled(backend)
    with layers.batch({0: layer}):
        layer(torch.ones(2, WIDTH))
        assert layer._compiled_call_impl is None
    assert backend.calls == 1 and layer.part._compiled_call_impl is None


class Misnamed(nn.Module):
    compiled_parts = ("part", "parts")

    def __init__(self) -> None:
        super().__init__()
        self.part = Layer()


def test_a_part_that_there_is_not_is_named_before_anything_changes(backend: Backend) -> None:
    layer, layers = Misnamed(), compiled(backend)
    with pytest.raises(AttributeError, match=r"layer 5 \(Misnamed\): compiled_parts: .*`parts`"):
        layers.batch({5: layer}).__enter__()
    assert layer.part._compiled_call_impl is None


def test_layers_that_look_alike_share_code_and_others_are_compiled_however_many_there_are(backend: Backend) -> None:
    layers = compiled(backend)
    alike = {index: Layer() for index in range(4)}
    with layers.batch(alike):
        for layer in alike.values():
            layer(torch.ones(2, WIDTH))
    assert backend.calls == 1
    different = {index: Layer(factor=index + 2) for index in range(9)}  # torch's own limit is 8
    with layers.batch(different):
        for layer in different.values():
            layer(torch.ones(2, WIDTH))
    assert backend.calls == 10


def test_no_backward_pass_of_a_compiled_layer_is_split(backend: Backend) -> None:
    layer, around, layers = Layer(), Around(), compiled(backend)
    around.outside = nn.Linear(WIDTH, WIDTH)
    with layers.batch({0: layer, 1: around}):
        split = [module for module, _ in split_modules.forwards([*layer.modules(), *around.modules()])]
    assert split == [around.outside]


def test_each_size_is_compiled_for_itself(backend: Backend) -> None:
    """Torch makes a size that changes dynamic: then the code would depend on what came before."""
    layer, layers = Layer(), compiled(backend)
    with layers.batch({0: layer}):
        for rows in (1, 2, 3, 2, 3):
            layer(torch.ones(rows, WIDTH))
    assert backend.calls == 3


def test_what_torch_cannot_trace_runs_as_it_is() -> None:
    for kind in (Branching, Checkpointing):
        layer, layers = kind(), compiled("aot_eager")
        inputs = torch.randn(8, WIDTH, requires_grad=True)
        outcomes = []
        for around in (nullcontext(), layers.batch({0: layer})):
            layer.zero_grad()
            inputs.grad = None
            torch.manual_seed(3)
            with around:
                outputs = layer(inputs)
                outputs.square().sum().backward()
            outcomes.append([outputs, inputs.grad, *(parameter.grad for parameter in layer.parameters())])
        for plain, compiled_too in zip(*outcomes):
            torch.testing.assert_close(compiled_too, plain, msg=partial("{}: {}".format, kind))
        torch._dynamo.reset()


def test_an_error_of_the_machine_ends_the_run() -> None:
    """One rank alone would otherwise go on uncompiled."""

    def full(graph: Any, inputs: Any) -> Any:
        raise OSError("No space left on device")

    layers = compiled(full)
    layer = Layer()
    with layers.batch({0: layer}), pytest.raises(Exception, match="No space left on device"):
        layer(torch.ones(2, WIDTH))
    assert layer._compiled_call_impl is None


def test_what_a_user_compiled_stays_so(backend: Backend) -> None:
    layer, layers, own = Layer(), compiled(backend), Backend()
    layer.compile(backend=own)
    theirs = layer._compiled_call_impl
    with layers.batch({0: layer}):
        layer(torch.ones(2, WIDTH))
    assert (own.calls, backend.calls) == (1, 0) and layer._compiled_call_impl is theirs


def test_layers_that_left_are_not_kept(backend: Backend) -> None:
    layers, layer, other = compiled(backend), Layer(), Layer()
    gone = weakref.ref(layer)
    for present in (layer, other):
        with layers.batch({0: present}):
            present(torch.ones(2, WIDTH))
    del layer, present
    gc.collect()
    assert gone() is None


def test_layers_whose_sizes_depend_on_their_data_are_left_out() -> None:
    config = GPTConfig(layers=1, hidden_size=8, heads=2, sequence_length=4)
    sparse = SparseAttentionConfig(pattern="hash", buckets=2)
    of_data = Block(config, 1, attention=partial(HashSparseAttention, sparse=sparse))
    pruned = PrunableBlock(config, 1, csr_from=0.5)
    assert Block(config, 1).compiled_parts == pruned.compiled_parts == ("",) and of_data.compiled_parts == ()
    linear = prunable_linears(pruned)[0]
    linear.prune(torch.zeros(linear.shape, dtype=torch.bool))
    assert pruned.compiled_parts == ()


# -- what the machine lacks -------------------------------------------------------------------------------


def test_a_device_that_the_compiler_fails_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_triton(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation\nand more")

    check_compiler("eager", "engine.compile")
    monkeypatch.setattr(torch, "compile", lacks_triton)
    with pytest.raises(
        ds_dynmo.ConfigError, match=r"^engine.compile: torch's compiler.* fails on .*: Cannot find"
    ) as refused:
        check_compiler("inductor", "engine.compile")
    assert "and more" not in str(refused.value)


def test_what_a_call_of_deepspeeds_cannot_have_is_refused() -> None:
    for arguments, named in (
        (
            {"compile_kwargs": {"mode": "max-autotune"}},
            "compile_kwargs = {'mode': 'max-autotune'}: layers are compiled",
        ),
        ({"backend": "inducter"}, "backend = 'inducter' is not one of torch's, which are "),
        ({"schedule": [(0, [])]}, "schedule = "),
        ({"compiled_autograd_enabled": True}, "compiled_autograd_enabled = True"),
    ):
        with pytest.raises(ds_dynmo.ConfigError) as refused:
            backend_of_call(**arguments)
            pytest.fail(f"{arguments} are not refused")
        assert named in str(refused.value)


def test_a_call_of_deepspeeds_chooses_the_backend() -> None:
    assert backend_of_call("aot_eager", {}) == "aot_eager"
