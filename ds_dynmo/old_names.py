"""Import paths of earlier versions. They work, with a DeprecationWarning that says what to write."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

MODULES = {
    "ds_dynmo.engine.hosts": {"check_launch": "ds_dynmo.engine.comm.hosts.check_launch"},
    "ds_dynmo.partitioners.even_out": {"even_out": "ds_dynmo.partitioners.ties.even_out"},
    "ds_dynmo.partitioners.move_costs": {"MoveCosts": "ds_dynmo.partitioners.MoveCosts"},
    "ds_dynmo.partitioners.shortest": {"shortest": "ds_dynmo.partitioners.makespan"},
    "ds_dynmo.partitioners.uniform": {"uniform": "ds_dynmo.partitioners.uniform"},
    "ds_dynmo.shm_operator": {"skip_shm_operator": "ds_dynmo.skip_shm_operator"},
}
"""Per module that is gone, where its public names are now."""

NAMES = {
    "ds_dynmo.engine.elastic.release": {"Place": "ds_dynmo.engine.elastic.release.RankLocation"},
    "ds_dynmo.partitioners": {"shortest": "ds_dynmo.partitioners.makespan"},
}
"""Per package that exists, what its renamed names are called now."""


def register_modules(package: str) -> None:
    """Let the modules of :data:`MODULES` that were in ``package`` be imported.

    A finder would set the imported module as an attribute of its package, over the function ``uniform``.
    """
    for name in MODULES:
        if name.rpartition(".")[0] == package:
            sys.modules[name] = _OldModule(name)


def lookup(module: str, name: str) -> Any:
    """Give what ``module.name`` was, for the module's ``__getattr__``.

    Raises:
        AttributeError: there was no such name, either.
    """
    old = f"{module}.{name}"
    new = (NAMES.get(module) or MODULES.get(module) or {}).get(name)
    if new is not None:
        warnings.warn(f"{old} is an old name: write {new}", DeprecationWarning, stacklevel=3)
        new_module, _, new_name = new.rpartition(".")
        return getattr(import_module(new_module), new_name)
    if old in MODULES:
        return sys.modules[old]
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _OldModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return lookup(self.__name__, name)
