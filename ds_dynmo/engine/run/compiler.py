"""torch's compiler: its requirements on this machine, and its use.

Several names here are private in torch (read in 2.13.0).
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import (
    call_uncompiled,
    dynamo,
    dynamo_errors,
    find_cpp_compiler,
    inductor_errors,
    tree_leaves,
)

CACHE = "TORCHINDUCTOR_CACHE_DIR"
_NO_LIMIT = 2**31 - 1
_OF_THE_MACHINE = (OSError, MemoryError, subprocess.SubprocessError)


def default_backend() -> str:
    """Return the backend that DeepSpeed's accelerator names, ``"inductor"`` on a CPU."""
    return str(get_accelerator().get_compile_backend())


def prepare(backend: Any, asked_by: str) -> None:
    """Choose torch's cache folder, and check that torch can compile on this machine.

    Args:
        asked_by: the key or call that needs it, for messages.

    Raises:
        ConfigError: the folder cannot be written; on a CPU the C++ compiler or Python's headers are missing; on an
            accelerator one small function cannot be compiled.
    """
    if backend != "inductor":
        return
    _use_cache(asked_by)
    if get_accelerator().device_name() == "cpu":
        _check_cpp(asked_by)
    else:
        _try_on_device(asked_by)


_ALLOWED = {"fullgraph": True, "dynamic": False, "disable": False}  # allowed arguments, which are the defaults here


def backend_of_call(
    backend: Any = None,
    compile_kwargs: Mapping[str, Any] | None = None,
    schedule: Any = None,
    compiled_autograd_enabled: bool = False,
) -> Any:
    """Read the arguments of DeepSpeed's ``engine.compile``, and prepare its backend.

    Raises:
        ConfigError: an argument is impossible layer by layer, or :func:`prepare` raises it.
    """
    call = "engine.compile"
    for key, value in (compile_kwargs or {}).items():
        if key not in _ALLOWED or value is not _ALLOWED[key]:
            allowed = ", ".join(f"{name!r}: {only}" for name, only in _ALLOWED.items())
            raise ConfigError(
                f"{call}: compile_kwargs[{key!r}] = {value!r}: each layer is one graph of fixed sizes, compiled in one "
                f"way on every rank; allowed are {allowed}"
            )
    if schedule is not None:
        raise ConfigError(f"{call}: schedule = {schedule!r} is for DeepCompile, which compiles a whole stage; omit it")
    if compiled_autograd_enabled:
        raise ConfigError(
            f"{call}: compiled_autograd_enabled = True: it compiles the backward pass of a whole stage as one graph, "
            "which depends on where layers are; allowed is False"
        )
    chosen = default_backend() if backend is None else backend
    known = torch.compiler.list_backends(exclude_tags=())
    if not callable(chosen) and chosen not in known:
        raise ConfigError(f"{call}: backend = {chosen!r} is not one of torch's, which are {', '.join(known)}")
    prepare(chosen, call)
    return chosen


def _use_cache(asked_by: str) -> None:
    """Keep compiled code in the user's cache folder, unless the user chose another (torch's is in /tmp)."""
    if CACHE not in os.environ:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        os.environ[CACHE] = os.path.join(caches, "ds_dynmo_inductor")
    folder = Path(os.environ[CACHE])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{asked_by}: {CACHE} = {str(folder)!r}: {error}; set it to a folder of yours") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{asked_by}: {CACHE} = {str(folder)!r} cannot be written; set it to a folder of yours")


def _check_cpp(asked_by: str) -> None:
    needs = "needs a C++ compiler and Python's headers on a CPU (`apt install g++ python3-dev`)"
    try:
        find_cpp_compiler()
    except inductor_errors().InvalidCxxCompiler:
        cxx = os.environ.get("CXX")
        tried = "g++" if cxx is None else f"CXX = {cxx!r}"
        raise ConfigError(f"{asked_by} {needs}: {tried} does not run; install one, or set CXX") from None
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise ConfigError(f"{asked_by} {needs}: {headers / 'Python.h'} is missing; install them")


def _try_on_device(asked_by: str) -> None:
    """Compile one small function: requirements differ between devices (Triton, a C compiler)."""
    device = get_accelerator().current_device_name()
    try:
        torch.compile(torch.neg, backend="inductor", dynamic=False)(torch.ones(2, device=device))
    except Exception as error:
        raise ConfigError(
            f'{asked_by}: torch\'s compiler, "inductor", fails on {device!r}: {_first_line(error)}; install what it '
            "lacks, or leave layers uncompiled"
        ) from error


def runner(kind: type, backend: Any) -> Callable[..., Any]:
    """Build the function that runs layers of a class compiled: ``run(layer, *args, **kwargs)``.

    Equal layers share compiled code. The code depends only on the layer and its inputs, not on earlier layers of this
    process: each is one graph with fixed sizes, or not compiled.
    """

    def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return call_uncompiled(layer, *args, **kwargs)

    code = run.__code__.replace(co_name=kind.__name__)  # torch caches compiled code per code object
    function = FunctionType(code, globals(), kind.__name__)
    compiled: Callable[..., Any] = torch.compile(
        function, fullgraph=True, dynamic=False, backend=_of_fixed_sizes(backend)
    )
    return compiled


class _DependsOnDataError(RuntimeError):
    """A layer whose sizes or numbers depend on its data: compiled, it might fail on other data."""


def _of_fixed_sizes(backend: Any) -> Callable[..., Any]:
    """Restrict ``backend`` to graphs in which all sizes and numbers are known."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    compile_graph = dynamo().lookup_backend(backend)

    def of_fixed_sizes(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            for value in tree_leaves(node.meta.get("example_value")):
                if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat) and free_unbacked_symbols(value):
                    raise _DependsOnDataError(f"the result of {node.name} depends on the data")
        return compile_graph(graph, inputs)

    return of_fixed_sizes


@contextmanager
def compiling_through(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call ``begin`` and ``end`` around each compilation of torch, without its limit of compilations.

    Beyond a limit torch would run a layer uncompiled, or fail; which layer would depend on the layers compiled before.
    """

    def begins(_: Any) -> None:
        begin()

    def ends(_: Any) -> None:
        end()

    handler = dynamo().callback.callback_handler
    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        with dynamo().config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
            yield
    finally:
        handler.remove_start_callback(begins)
        handler.remove_end_callback(ends)


def why_not(error: Exception) -> str | None:
    """Return why a layer cannot be compiled; None: the error is the layer's or the machine's.

    An error of the machine (no space left, a killed compiler) occurs on one rank only.
    """
    errors = dynamo_errors()
    cause = error.inner_exception if isinstance(error, errors.BackendCompilerFailed) else error
    if isinstance(cause, (*_OF_THE_MACHINE, inductor_errors().CppCompileError)):
        return None
    if isinstance(cause, _DependsOnDataError):
        return str(cause)
    if not isinstance(error, errors.TorchDynamoException) and not _while_compiling(error):
        return None
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _while_compiling(error: Exception) -> bool:
    """Return whether an error was raised while torch compiled; some have no compiler class."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame in frames)
