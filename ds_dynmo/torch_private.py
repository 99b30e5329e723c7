"""Every private name of torch that is used here, in one place; read in torch 2.13.0.

:func:`check_torch` refuses a torch that lacks one of them before anything is built. What takes seconds to import is
imported where it is called.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from ds_dynmo.errors import ConfigError

__all__ = ["OpOverload", "OpOverloadPacket", "tree_map"]

Tables = dict[str, Any]
Tensor = TypeVar("Tensor", bound=torch.Tensor)

HOOKS_OF_PARAMETERS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}  # methods of a parameter, and where it keeps what they register
TABLES_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})

NEEDED = (  # module, then a name within it
    "torch._C:_current_graph_task_id",
    "torch._C:_will_engine_execute_node",
    "torch._C:_are_functorch_transforms_active",
    "torch._C:_disabled_torch_function_impl",
    "torch._C:_storage_Use_Count",
    "torch._C:DisableTorchFunctionSubclass",
    "torch._C._autograd:_top_saved_tensors_default_hooks",
    "torch:_grouped_mm",
    "torch:_foreach_norm",
    "torch.ops.aten:_unsafe_view",
    "torch:Tensor._make_subclass",
    "torch:Tensor._version",
    "torch:Tensor._indices",
    "torch:Tensor._values",
    "torch.distributed.distributed_c10d:_get_default_group",
    "torch.distributed.distributed_c10d:_get_default_store",
    "torch.distributed.distributed_c10d:_get_default_timeout",
    "torch.distributed.distributed_c10d:PrefixStore",
    "torch.distributed.distributed_c10d:ProcessGroupGloo",
    "torch.nn:Module._apply",
    "torch.nn:Module._compiled_call_impl",
    "torch.serialization:_save",
    "torch.serialization:_open_zipfile_reader",
    "torch.serialization:_open_zipfile_writer",
    "torch.utils.hooks:RemovableHandle.next_id",
)


def check_torch(needed: Iterable[str] = NEEDED) -> None:
    """Refuse a torch that lacks one of the names ``needed``, or a table of modules or parameters.

    Raises:
        ConfigError: with the names.
    """
    missing = [name.replace(":", ".") for name in needed if not _is_there(*name.split(":"))]
    module = nn.Module()
    missing += [f"torch.nn.Module.{name}" for name in sorted(TABLES_OF_MODULES) if name not in vars(module)]
    missing += [f"torch.Tensor.{name}" for name in HOOKS_OF_PARAMETERS.values() if not hasattr(torch.Tensor, name)]
    if missing:
        raise ConfigError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which ds_dynmo relies on: install a version that "
            "docs/limits.md names"
        )


def _is_there(owner: str, path: str) -> bool:
    try:
        found: Any = torch.ops.aten if owner == "torch.ops.aten" else import_module(owner)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True


# -- autograd -----------------------------------------------------------------------------------------


def backward_pass_number() -> int:
    """Number the backward pass that runs on this thread; -1: none does."""
    return int(torch._C._current_graph_task_id())


def will_run(node: Any) -> bool:
    """Return whether the running backward pass will reach a node of its graph."""
    return bool(torch._C._will_engine_execute_node(node))


def transforms_are_active() -> bool:
    """Return whether a functorch transform, such as ``vmap``, is active."""
    return bool(torch._C._are_functorch_transforms_active())


def saved_tensors_hooks(*, ignore_disabled: bool) -> Any:
    """Return the pair of hooks on tensors that are saved now, as checkpointing sets them; None: there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(ignore_disabled)


no_torch_function: Any = getattr(torch._C, "_disabled_torch_function_impl", None)


def without_torch_function() -> AbstractContextManager[None]:
    """Let ``__torch_function__`` of subclasses of tensors be."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


# -- tensors ------------------------------------------------------------------------------------------


def version_of(tensor: torch.Tensor) -> int:
    """Count the changes in place of a tensor."""
    return tensor._version


def is_only_tensor_of_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor shares the storage of ``tensor``, which is strided."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)  # ``tensor`` and ``storage``


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse COO tensor as they are, not coalesced."""
    return tensor._indices(), tensor._values()


def subclassed(kind: type[Tensor], value: torch.Tensor) -> Tensor:
    """Make a tensor of a subclass with the memory of ``value``."""
    made: Tensor = torch.Tensor._make_subclass(kind, value)  # type: ignore[attr-defined]
    return made


grouped_mm: Callable[..., torch.Tensor] = getattr(torch, "_grouped_mm", None)  # type: ignore[assignment]
"""Multiply groups of rows by a matrix each, what ``nn.functional.grouped_mm`` calls."""


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the norm of each tensor, as ``torch.nn.utils`` does."""
    return list(torch._foreach_norm(tensors))


def reshaped(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Reshape a contiguous tensor; for autograd the result is no view."""
    found: torch.Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return found


# -- files --------------------------------------------------------------------------------------------

Record = tuple[str, Any, int]
"""A part of a file of ``torch.save``: its name, a storage or bytes, and its size in bytes."""


def copied_records(content: Any) -> list[Record]:
    """Return what ``torch.save`` would write, with a copy of each storage in host memory. They are copied in turn."""
    records = _Records()
    torch.serialization._save(content, records, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    return records.found


def write_records(records: Iterable[Record], path: str) -> None:
    """Write a file as ``torch.save`` does; it does not hold Python's lock meanwhile."""
    with torch.serialization._open_zipfile_writer(path) as file:
        for record in records:
            file.write_record(*record)


def pickle_of(path: str) -> bytes:
    """Read what is pickled beside the tensors of a file, as ``torch.load`` finds it."""
    with torch.serialization._open_zipfile_reader(path) as file:
        pickled: bytes = file.get_record("data.pkl")
        return pickled


class _Records:
    """Stands in for torch's writer of a file, and keeps copies of what it is given."""

    def __init__(self) -> None:
        self.found: list[Record] = []

    def write_record(self, name: str, data: Any, num_bytes: int) -> None:
        """Keep a part of the file."""
        if isinstance(data, torch.UntypedStorage) and torch._C._storage_Use_Count(data._cdata) > 1:
            data = data.clone()  # of a tensor on the CPU; that of another device was copied for this call
        self.found.append((name, data, num_bytes))


# -- modules and parameters ---------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of a module's own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the table of a module's own buffers."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's own children."""
    return module._modules


def non_persistent_of(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its ``state_dict`` lacks."""
    return module._non_persistent_buffers_set


def set_buffers(module: nn.Module, buffers: dict[str, torch.Tensor | None], non_persistent: set[str]) -> None:
    """Replace the buffers of a module."""
    module._buffers = buffers
    module._non_persistent_buffers_set = non_persistent


def moves_by_itself(module: nn.Module) -> bool:
    """Return whether a module's class has a method of its own for moves to a device, which may move any attribute."""
    kind = type(module)
    return kind.to is not nn.Module.to or kind._apply is not nn.Module._apply


def hooks_of(parameter: torch.Tensor, method: str) -> list[Any]:
    """List what was registered on a parameter by ``method``, a key of :data:`HOOKS_OF_PARAMETERS`."""
    return list((getattr(parameter, HOOKS_OF_PARAMETERS[method], None) or {}).values())


def replace_hooks(parameter: torch.Tensor, method: str, replaced: Callable[[dict[int, Any]], dict[int, Any]]) -> None:
    """Replace the hooks by number that were registered on a parameter by ``method``; their handles stay valid."""
    table = getattr(parameter, HOOKS_OF_PARAMETERS[method], None)
    if table:
        hooks = replaced(dict(table))
        table.clear()
        table.update(hooks)


def number_hooks_after(number: int) -> None:
    """Let hooks that are registered from now on have larger numbers than ``number``."""
    RemovableHandle.next_id = max(RemovableHandle.next_id, number + 1)


def compiled_call_of(module: Any) -> Any:
    """Return what is called in place of a module, as ``nn.Module.compile`` sets it; None: nothing is."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Let ``call`` be called in place of a module; None: the module itself, as before."""
    if call is None:
        del module._compiled_call_impl
    else:
        module._compiled_call_impl = call


# -- processes ----------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the default group's store."""
    return dist.distributed_c10d._get_default_store()


def prefix_store(prefix: str, store: Any) -> Any:
    """Make a view of a store whose keys begin with ``prefix``."""
    return dist.distributed_c10d.PrefixStore(prefix, store)


def lazy_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a backend of gloo whose ranks connect when they exchange their first message.

    It belongs to no process group. torch 2.13.0 takes the setting from the environment alone. A torch without it
    connects all ranks at once, which costs sockets and time.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def is_of_backend(error: BaseException) -> bool:
    """Return whether an error is of a process group's backend or store. gloo's has no class of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def without_prefixes(store: Any) -> Any:
    """Return the store below all views of it."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    return store


def devices_of_default_group() -> list[torch.device]:
    """List the devices that the default group has a backend for."""
    return list(dist.distributed_c10d._get_default_group()._device_types)


def timeout_on(device: torch.device) -> timedelta:
    """Return how long operations of the default group on ``device`` wait.

    Where the backend does not tell, the time-out is what torch gives to a group of such a backend by default.
    """
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    try:
        timeout: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):
        timeout = dist.distributed_c10d._get_default_timeout(dist.get_backend())
    return timeout


# -- the compiler -------------------------------------------------------------------------------------


def dynamo_config() -> Any:
    """Import the settings of torch's compiler of Python."""
    import torch._dynamo

    return torch._dynamo.config
