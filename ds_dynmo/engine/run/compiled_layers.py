"""Run the layers of a stage compiled: each as one graph, where it is, and again where it arrives.

While a batch runs, what is called in place of a layer, as ``nn.Module.compile`` sets it, leads here. Between batches
layers are as ever, so nothing of it travels or is saved. Marks of the profiler, random streams, activation
checkpointing of a stage and the split of backward passes are all around a layer, outside the compiled graph.

Numbers must not depend on where a layer was before. So the same layer with the same inputs is compiled to the same
code, or runs as it is, on every rank (:mod:`ds_dynmo.engine.run.compiler`).
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
_MANY = 32  # compilations for layers of one class, on one rank, that are worth a warning


class CompiledLayers:
    """Compiles the layers of one stage.

    Attributes:
        stopwatch: is paused while torch compiles; None: nobody measures.
        seconds: that torch has compiled on this rank.

    Args:
        log: log what was compiled in a batch, and in how many seconds.
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
        """Try once more to compile layers that could not be: they may be others now."""
        self._as_is.clear()

    def keep(self, present: Container[int]) -> None:
        """Forget what is known of layers that have left."""
        self._as_is = {variant for variant in self._as_is if variant[0] in present}

    @contextmanager
    def batch(self, layers: Mapping[int, nn.Module]) -> Iterator[None]:
        """Compile ``layers``, by their numbers, while a batch runs; not what the user or TorchScript compiled.

        Of a layer whose class has ``compiled_parts``, names of submodules, these are compiled.
        """
        if not self:
            yield
            return
        ours = []
        for index, path, module in list(_parts(layers)):  # a module without weights may be there twice
            if compiled_call_of(module) is None and not isinstance(module, torch.jit.ScriptModule):
                set_compiled_call(module, _Call(self, index, path, module))
                ours.append(module)
        before, self._in_this_batch = self.seconds, {}
        try:
            with compiler.compiling_through(self._begin, self._end):
                yield
        finally:
            for module in ours:
                set_compiled_call(module, None)
        if self._log and self._in_this_batch:
            what = ", ".join(f"{index} ({kind.__name__})" for index, kind in sorted(self._in_this_batch.items()))
            _logger.info(f"compile: layer {what} in {self.seconds - before:.1f} s")

    def call(self, index: int, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer, or the part of it at ``path``, compiled if it can be."""
        kind = type(module)
        if not self._as_is or _variant(index, path, module, args, kwargs) not in self._as_is:
            if kind not in self._runners:
                self._runners[kind] = compiler.runner(kind, self._backend)
            before = self.seconds
            try:
                laid_out = {name: _laid_out(value) for name, value in kwargs.items()}
                result = self._runners[kind](module, *map(_laid_out, args), **laid_out)
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
        """Say whether a layer, or a part of it, could not be compiled where it trains."""
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
    """Is called in place of a layer.

    Attributes:
        runs_as_is: the layer could not be compiled where it trains.
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
    """Return the key of a compilation: the layer, what it runs for, and the form of its inputs."""
    named = tuple((name, _look(value)) for name, value in kwargs.items())
    return index, path, torch.is_grad_enabled(), module.training, _look(args), named


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    return tuple(map(_look, value)) if isinstance(value, tuple | list) else type(value)


def _laid_out(value: Any) -> Any:
    """Return contiguous tensors, as a message would bring them, whatever the previous layer on this rank returned."""
    if isinstance(value, torch.Tensor):
        return value.contiguous() if value.layout is torch.strided else value
    return type(value)(map(_laid_out, value)) if type(value) in (tuple, list) else value
