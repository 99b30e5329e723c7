"""Compiled layers: each layer of a stage as one graph, which is compiled again on each stage where it arrives.

While a batch runs, a call of a layer is replaced in the way of ``nn.Module.compile``. Between batches layers are
unchanged, so nothing of this travels or is saved. The profiler's marks, random streams, activation checkpointing of a
stage and the split of backward passes are around a layer, outside the compiled graph.

Numbers must not depend on where a layer was before. So on every rank the same layer with the same inputs is either
compiled to the same code, or runs uncompiled (:mod:`ds_dynmo.engine.run.compiler`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.run import compiler
from ds_dynmo.stage_work import Stopwatch
from ds_dynmo.torch_private import call_uncompiled, compiled_call_of, set_compiled_call

_logger = logging.getLogger("DynMo")
_MANY = 32  # compilations of one class on one rank after which a warning is logged


class CompiledLayers:
    """Compiles the layers of one stage.

    Attributes:
        stopwatch: paused while torch compiles; None: no measurement.
        seconds: that torch has spent compiling on this rank.

    Args:
        log: whether to log the layers compiled in a batch, and the seconds.
    """

    def __init__(self, *, log: bool = True) -> None:
        self.stopwatch: Stopwatch | None = None
        self.seconds = 0.0
        self._log = log
        self._backend: Any = None
        self._runners: dict[type, Callable[..., Any]] = {}
        self._as_is: set[tuple[Any, ...]] = set()  # layers and inputs that cannot be compiled
        self._named: set[type] = set()  # classes that a warning has named
        self._compilations: Counter[type] = Counter()
        self._in_this_batch: dict[int, type] = {}
        self._began = 0.0

    def __bool__(self) -> bool:
        return self._backend is not None

    def switch_on(self, backend: Any = None) -> None:
        """Compile from the next batch on.

        Args:
            backend: of ``torch.compile``; None: the accelerator's.
        """
        self._backend = backend or compiler.default_backend()
        self._runners, self._as_is = {}, set()

    def model_changed(self) -> None:
        """Try again to compile layers that could not be compiled: they may have changed."""
        self._as_is.clear()

    def keep(self, present: Container[int]) -> None:
        """Forget layers that have left."""
        self._as_is = {variant for variant in self._as_is if variant[0] in present}

    @contextmanager
    def batch(self, layers: Mapping[int, nn.Module]) -> Iterator[None]:
        """Compile ``layers`` while a batch runs, except those compiled by the user or TorchScript.

        If a layer's class has ``compiled_parts``, names of submodules, only these are compiled.
        """
        if not self:
            yield
            return
        replaced = []
        for index, path, module in list(_parts(layers)):  # a module without weights may occur twice
            if compiled_call_of(module) is None and not isinstance(module, torch.jit.ScriptModule):
                set_compiled_call(module, _Call(self, index, path, module))
                replaced.append(module)
        before, self._in_this_batch = self.seconds, {}
        try:
            with compiler.compiling_through(self._begin, self._end):
                yield
        finally:
            for module in replaced:
                set_compiled_call(module, None)
        if self._log and self._in_this_batch:
            what = ", ".join(f"{index} ({kind.__name__})" for index, kind in sorted(self._in_this_batch.items()))
            _logger.info(f"compile: layer {what} in {self.seconds - before:.1f} s")

    def call(self, index: int, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer, or its part at ``path``, compiled if possible."""
        kind = type(module)
        if not self._as_is or _variant(index, path, module, args, kwargs) not in self._as_is:
            if kind not in self._runners:
                self._runners[kind] = compiler.runner(kind, self._backend)
            before = self.seconds
            try:
                contiguous = {name: _contiguous(value) for name, value in kwargs.items()}
                result = self._runners[kind](module, *map(_contiguous, args), **contiguous)
            except Exception as error:
                if (reason := compiler.why_not(error)) is None:
                    raise
                self._as_is.add(_variant(index, path, module, args, kwargs))
                self._warn_as_is(index, kind, reason)
            else:
                if self.seconds > before:
                    self._compiled(index, kind)
                return result
        return call_uncompiled(module, *args, **kwargs)

    def runs_as_is(self, index: int, path: str = "") -> bool:
        """Return whether a layer, or a part of it, could not be compiled for training."""
        return any(variant[:3] == (index, path, True) for variant in self._as_is)

    def _warn_as_is(self, index: int, kind: type, reason: str) -> None:
        if kind not in self._named:
            self._named.add(kind)
            _logger.warning(
                f"compile: layer {index} ({kind.__name__}) cannot be compiled to one graph, and runs as it is: "
                f"{reason}. Others of its class are not named. TORCH_LOGS=graph_breaks shows where"
            )

    def _compiled(self, index: int, kind: type) -> None:
        self._in_this_batch[index] = kind
        self._compilations[kind] += 1
        if self._compilations[kind] == _MANY:
            _logger.warning(
                f"compile: layers of class {kind.__name__} were compiled {_MANY} times on this rank, last layer "
                f"{index}: each size of inputs, and each value of a number in an attribute, takes a time of its own. "
                "TORCH_LOGS=recompiles says what differs"
            )

    # -- time -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self.stopwatch is not None:
            self.stopwatch.pause()
        self._began = time.perf_counter()

    def _end(self) -> None:
        self.seconds += time.perf_counter() - self._began
        if self.stopwatch is not None:
            self.stopwatch.resume()


class _Call:
    """The replacement of a layer's call.

    Attributes:
        runs_as_is: whether the layer could not be compiled for training.
    """

    def __init__(self, layers: CompiledLayers, index: int, path: str, module: nn.Module) -> None:
        self._layers, self._index, self._path, self._module = layers, index, path, module

    @property
    def runs_as_is(self) -> bool:
        return self._layers.runs_as_is(self._index, self._path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._layers.call(self._index, self._path, self._module, args, kwargs)


def _parts(layers: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield the compiled parts of each layer: a module and its path in the layer, "" for the layer itself."""
    for index, layer in layers.items():
        for path in getattr(type(layer), "compiled_parts", ("",)):
            try:
                yield index, path, layer.get_submodule(path)
            except AttributeError as error:
                raise AttributeError(f"layer {index} ({type(layer).__name__}): compiled_parts: {error}") from error


def _variant(index: int, path: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the key of a compilation: the layer, its mode, and the types of its inputs."""
    named = tuple((name, _type_of(value)) for name, value in kwargs.items())
    return index, path, torch.is_grad_enabled(), module.training, _type_of(args), named


def _type_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    return tuple(map(_type_of, value)) if isinstance(value, tuple | list) else type(value)


def _contiguous(value: Any) -> Any:
    """Return contiguous tensors, as a message would bring them, whatever the previous layer on this rank returned."""
    if isinstance(value, torch.Tensor):
        return value.contiguous() if value.layout is torch.strided else value
    return type(value)(map(_contiguous, value)) if type(value) in (tuple, list) else value
