"""Layers that torch compiles: when they are, when not, and what that says and costs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_dynmo
from ds_dynmo.engine.deepspeed.module import layers_through
from ds_dynmo.engine.measure.profiler import Profiler
from ds_dynmo.engine.run import compiler
from ds_dynmo.engine.run.compiled_layers import CompiledLayers
from ds_dynmo.engine.split import split_modules
from ds_dynmo.schedules import Kind

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
    layers = CompiledLayers(log=False)
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


class Choosing(Layer):
    """How much it computes depends on the data."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = hidden[hidden.sum(dim=-1) > 0]
        return super().forward(chosen if len(chosen) else hidden)


class Counting(Layer):
    """A factor depends on the data. Torch could compile that, and sizes that do."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (hidden > 0).sum().item()


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


def test_a_module_may_be_several_layers(backend: Backend) -> None:
    layer, layers = nn.Tanh(), compiled(backend)
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
    different = {index: Layer(factor=index + 2) for index in range(12)}  # torch's own limit is 8
    with layers.batch(different):
        for layer in different.values():
            layer(torch.ones(2, WIDTH))
    assert backend.calls == 13


def test_a_class_that_is_compiled_over_and_over_is_named(
    backend: Backend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_dynmo.engine.run.compiled_layers._MANY", 3)
    layer, layers = Layer(), compiled(backend)
    with caplog.at_level(logging.WARNING, "DynMo"), layers.batch({6: layer}):
        for layer.factor in range(5):
            layer(torch.ones(2, WIDTH))
    (message,) = caplog.messages
    assert message.startswith("compile: layers of class Layer were compiled 3 times on this rank, last layer 6: ")


def test_the_backward_pass_of_a_layer_is_split_only_where_it_runs_as_it_is(backend: Backend) -> None:
    layer, fussy, layers = Layer(), Branching(), compiled(backend)
    for _ in range(2):
        with layers.batch({0: layer, 1: fussy}):
            split = [module for module, _ in split_modules.forwards([*layer.modules(), *fussy.modules()])]
            layer(fussy(torch.ones(2, WIDTH)))
    assert split == [fussy.linear]  # in the second batch it is known


def test_each_size_is_compiled_for_itself(backend: Backend) -> None:
    """Torch makes a size that changes dynamic: then the code would depend on what came before."""
    layer, layers = Layer(), compiled(backend)
    with layers.batch({0: layer}):
        for rows in (1, 2, 3, 2, 3):
            layer(torch.ones(rows, WIDTH))
    assert backend.calls == 3


def test_the_layout_that_a_layer_before_gives_its_output_does_not_matter(backend: Backend) -> None:
    layer, layers = Layer(), compiled(backend)
    with layers.batch({0: layer}):
        layer(torch.ones(WIDTH, WIDTH))
        layer(torch.ones(WIDTH, WIDTH).t())
        layer(torch.ones(1, WIDTH).expand(WIDTH, WIDTH))
    assert backend.calls == 1


@pytest.mark.parametrize("kind", [Branching, Choosing, Counting])
def test_what_cannot_be_compiled_runs_as_it_is_and_is_named_once(
    kind: type[Layer], backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    layer, other, layers = kind(), kind(), compiled(backend)
    with caplog.at_level(logging.WARNING, "DynMo"):
        for _ in range(2):
            with layers.batch({7: layer, 8: other}):
                for each in (layer, other, layer):
                    each(torch.ones(2, WIDTH)).sum().backward()
                call: Any = layer._compiled_call_impl
                assert call.runs_as_is
    assert backend.calls == 0
    (message,) = [record.getMessage() for record in caplog.records if record.name == "DynMo"]
    assert message.startswith(f"compile: layer 7 ({kind.__name__}) cannot be compiled to one graph, and runs as it is")
    assert layer.linear.weight.grad is not None


def test_a_layer_may_recompute_inside() -> None:
    layer, layers = Checkpointing(), compiled("aot_eager")
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
    assert not layers.runs_as_is(0) and layers.seconds > 0
    for plain, compiled_too in zip(*outcomes):
        torch.testing.assert_close(compiled_too, plain)
    torch._dynamo.reset()


def test_an_error_of_the_layer_is_its_own(backend: Backend) -> None:
    layer, layers = Layer(), compiled(backend)
    with layers.batch({0: layer}), pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        layer(torch.ones(2, WIDTH + 1))


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


def test_what_is_known_of_layers_is_forgotten_when_they_leave_or_change(backend: Backend) -> None:
    layers = compiled(backend)

    def try_both() -> None:
        with layers.batch({0: Branching(), 1: Branching()}):
            for index in (0, 1):
                layers.call(index, "", Branching(), (torch.ones(2, WIDTH),), {})

    try_both()
    assert layers.runs_as_is(0) and layers.runs_as_is(1)
    layers.keep(range(1, 2))
    assert not layers.runs_as_is(0) and layers.runs_as_is(1)
    layers.model_changed()
    assert not layers.runs_as_is(1)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def seconds_between(self, times: list[float]) -> list[float]:
        return [after - before for before, after in zip(times, times[1:])]


def test_profiles_leave_out_what_compiling_takes() -> None:
    clock = Clock()

    def slow(graph: Any, inputs: Any) -> Any:
        clock.time += 1000.0

        def run(*args: Any) -> Any:
            clock.time += 1.0
            return graph.forward(*args)

        return run

    layer, layers, profiler = Layer(), compiled(slow), Profiler(clock)
    layers.stopwatch = profiler
    module = type("Module", (), {"forward_funcs": [layer]})()
    measured = profiler.batch(module, [5], has_loss=False), layers_through(module, [profiler.wrap])
    with measured[0], measured[1], layers.batch({5: layer}), profiler.measure_pass(Kind.FORWARD):
        module.forward_funcs[0](torch.ones(2, WIDTH))
    assert profiler.samples.forward[5] == [1.0]
    torch._dynamo.reset()


# -- what the machine lacks -------------------------------------------------------------------------------


def test_compiled_code_is_kept_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiler.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.prepare("inductor", "dynmo.compile = true")
    assert os.environ[compiler.CACHE] == str(tmp_path / "ds_dynmo_inductor")
    assert (tmp_path / "ds_dynmo_inductor").is_dir()
    monkeypatch.setenv(compiler.CACHE, str(tmp_path / "mine"))
    compiler.prepare("inductor", "dynmo.compile = true")
    assert os.environ[compiler.CACHE] == str(tmp_path / "mine")


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(compiler.CACHE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ds_dynmo.ConfigError, match=rf"^dynmo.compile = true: {compiler.CACHE} = .*file/cache"):
        compiler.prepare("inductor", "dynmo.compile = true")


def test_a_missing_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, cpp_builder

    monkeypatch.setenv(compiler.CACHE, str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (None, "/nowhere/g++")}), pytest.raises(ds_dynmo.ConfigError) as refused:
        compiler.prepare("inductor", "dynmo.compile = true")
    assert "dynmo.compile = true needs a C++ compiler" in str(refused.value) and "'/nowhere/g++'" in str(refused.value)
    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(ds_dynmo.ConfigError, match=r"Python\.h is missing"):
        compiler.prepare("inductor", "dynmo.compile = true")


def test_a_device_that_the_compiler_fails_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "meta" plays an accelerator: it needs no compiler of its own."""
    accelerator = SimpleNamespace(device_name=lambda: "meta", current_device_name=lambda: "meta:0")
    monkeypatch.setenv(compiler.CACHE, str(tmp_path))
    monkeypatch.setattr(compiler, "get_accelerator", lambda: accelerator)
    compiler.prepare("inductor", "dynmo.compile = true")

    def lacks_triton(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation\nand more")

    monkeypatch.setattr(torch, "compile", lacks_triton)
    with pytest.raises(ds_dynmo.ConfigError) as refused:
        compiler.prepare("inductor", "engine.compile")
    assert str(refused.value).startswith(
        "engine.compile: torch's compiler, \"inductor\", fails on 'meta:0': Cannot find"
    )
    assert "and more" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"compile_kwargs": {"mode": "max-autotune"}}, "compile_kwargs['mode'] = 'max-autotune'"),
        ({"compile_kwargs": {"dynamic": True}}, "compile_kwargs['dynamic'] = True"),
        ({"backend": "inducter"}, "backend = 'inducter' is not one of torch's, which are "),
        ({"schedule": [(0, [])]}, "schedule = "),
        ({"compiled_autograd_enabled": True}, "compiled_autograd_enabled = True"),
    ],
)
def test_what_a_call_of_deepspeeds_cannot_have_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ds_dynmo.ConfigError) as refused:
        compiler.backend_of_call(**arguments)
    assert named in str(refused.value)


def test_a_call_of_deepspeeds_chooses_the_backend() -> None:
    assert compiler.backend_of_call("aot_eager", {"fullgraph": True, "dynamic": False}) == "aot_eager"
