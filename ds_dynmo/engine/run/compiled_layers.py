"""Compiled layers: ``nn.Module.compile`` of each layer of a stage, where it is and where it arrives.

What torch cannot trace, torch runs as it is. Between batches layers are unchanged, so nothing of this travels or is
saved. The profiler's marks, random streams, activation checkpointing of a stage and the split of backward passes are
around a layer, outside of what is compiled.

Numbers must not depend on where a layer was before. So each size is compiled for itself, and there is no limit to how
often torch compiles: by default sizes that change become dynamic, and past a limit layers run uncompiled, which would
depend on the layers that ran on this rank before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import compiled_call_of, dynamo_config, set_compiled_call

_NO_LIMIT = 2**31 - 1


class CompiledLayers:
    """Compiles the layers of one stage, once :meth:`switch_on` was called."""

    def __init__(self) -> None:
        self._backend: Any = None
        self._calls: dict[nn.Module, Any] = {}  # of the layers that ran in the latest batch

    def __bool__(self) -> bool:
        return self._backend is not None

    def switch_on(self, backend: Any = None) -> None:
        """Compile from the next batch on.

        Args:
            backend: of ``torch.compile``; None: the accelerator's.
        """
        self._backend, self._calls = backend or get_accelerator().get_compile_backend(), {}

    @contextmanager
    def batch(self, layers: Mapping[int, nn.Module]) -> Iterator[None]:
        """Compile ``layers`` while a batch runs, except those compiled by the user or TorchScript.

        Of a layer with ``compiled_parts``, paths of submodules, only these are compiled.
        """
        if not self:
            yield
            return
        modules = dict.fromkeys(_parts(layers))  # a module without weights may occur twice
        own = [m for m in modules if compiled_call_of(m) is None and not isinstance(m, torch.jit.ScriptModule)]
        self._calls = {module: self._calls.get(module) or self._compiled(module) for module in own}
        for module, call in self._calls.items():
            set_compiled_call(module, call)
        try:
            with dynamo_config().patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
                yield
        finally:
            for module in own:
                set_compiled_call(module, None)

    def _compiled(self, module: nn.Module) -> Any:
        module.compile(backend=self._backend, dynamic=False)
        return compiled_call_of(module)


def _parts(layers: Mapping[int, nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of each layer that are compiled."""
    for index, layer in layers.items():
        for path in getattr(layer, "compiled_parts", ("",)):
            try:
                yield layer.get_submodule(path)
            except AttributeError as error:
                raise AttributeError(f"layer {index} ({type(layer).__name__}): compiled_parts: {error}") from error


def check_not_compiled(layer: nn.Module | None) -> None:
    """Refuse a layer that the user compiled in place: it would arrive uncompiled, as torch records no arguments.

    So is one compiled by ``torch.jit``, which keeps its parameters and code where no pickle finds them.

    Raises:
        TypeError: naming the module.
    """
    for path, part in layer.named_modules() if layer is not None else ():
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{path or 'the layer itself'} was compiled by torch.jit ({type(part).__name__}), which cannot be sent "
                'to another rank: use the module that it was made of, with "compile": true in the "dynmo" section'
            )
        if compiled_call_of(part) is not None:
            raise TypeError(
                f"{path or 'the layer itself'} ({type(part).__name__}) was compiled by its method compile(), and would "
                'run uncompiled where it arrives: set "compile": true in the "dynmo" section in place of that call, or '
                "use torch.compile(module) as the module"
            )


def check_compiler(backend: Any, asked_by: str) -> None:
    """Compile one small function: what ``"inductor"`` needs differs between devices (a C++ compiler, Triton).

    Args:
        asked_by: the key or call that needs it, for messages.

    Raises:
        ConfigError: it cannot be compiled.
    """
    if backend != "inductor":
        return
    device = get_accelerator().current_device_name()
    try:
        torch.compile(torch.neg, backend=backend, dynamic=False)(torch.ones(2, device=device))
    except Exception as error:
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f'{asked_by}: torch\'s compiler, "inductor", fails on {device!r}: {first_line}; install what it lacks (on '
            "a CPU: apt install g++ python3-dev), or leave layers uncompiled"
        ) from error


def backend_of_call(
    backend: Any = None,
    compile_kwargs: Mapping[str, Any] | None = None,
    schedule: Any = None,
    compiled_autograd_enabled: bool = False,
) -> Any:
    """Read the arguments of DeepSpeed's ``engine.compile``, and check its backend.

    Raises:
        ConfigError: an argument is impossible layer by layer, or torch cannot compile by the backend.
    """
    call = "engine.compile"
    others = {
        "compile_kwargs": compile_kwargs,
        "schedule": schedule,
        "compiled_autograd_enabled": compiled_autograd_enabled,
    }
    for name, value in others.items():
        if value:
            raise ConfigError(f"{call}: {name} = {value!r}: layers are compiled one by one, all in one way; omit it")
    chosen = get_accelerator().get_compile_backend() if backend is None else backend
    known = torch.compiler.list_backends(exclude_tags=())
    if not callable(chosen) and chosen not in known:
        raise ConfigError(f"{call}: backend = {chosen!r} is not one of torch's, which are {', '.join(known)}")
    check_compiler(chosen, call)
    return chosen
