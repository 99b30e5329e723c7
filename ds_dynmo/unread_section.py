"""Refuse a "dynmo" section that nothing reads: that of an engine of DeepSpeed's own, by ``deepspeed.initialize``.

DeepSpeed ignores keys that it does not know, so a script that calls ``deepspeed.initialize`` in place of
``ds_dynmo.initialize`` would train without ds_dynmo, and nothing would say so. The constructor of DeepSpeed's engine is
wrapped when DeepSpeed is imported, or at once if it was imported before: importing ds_dynmo imports no DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import signature
from types import ModuleType
from typing import Any

from ds_dynmo.errors import ConfigError

SECTION = "dynmo"
_MODULE, _ENGINE = "deepspeed.runtime.engine", "DeepSpeedEngine"


def refuse_unread_section() -> None:
    """Let DeepSpeed's engine refuse a section that it does not read."""
    if (module := sys.modules.get(_MODULE)) is not None:
        _wrap(getattr(module, _ENGINE, None))
    else:
        sys.meta_path.insert(0, _AtImport())


class _AtImport(MetaPathFinder, Loader):
    """Wraps the engine's constructor once its module has been imported, and is no finder any more then."""

    _loader: Any

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the engine's module where it would be found without this finder."""
        if name != _MODULE or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        sys.meta_path.remove(self)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, which keeps its own loader, and wrap the constructor."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _wrap(getattr(module, _ENGINE, None))


def _wrap(engine_class: Any) -> None:
    if engine_class is None:  # a DeepSpeed that ds_dynmo.initialize refuses by name
        return
    construct = engine_class.__init__
    parameters = signature(construct)

    @wraps(construct)
    def refuse_or_construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if SECTION not in vars(self):  # which ds_dynmo's engine has set before
            _check(parameters.bind_partial(self, *args, **kwargs).arguments.get("config"))
        construct(self, *args, **kwargs)

    engine_class.__init__ = refuse_or_construct


def _check(config: Any) -> None:
    section = config.get(SECTION) if isinstance(config, dict) else None
    if isinstance(section, dict) and section.get("enabled", True):
        raise ConfigError(
            f'"{SECTION}": deepspeed.initialize builds an engine of DeepSpeed\'s own, which ignores this section: call '
            "ds_dynmo.initialize, with the same arguments and a PipelineModule as model; to train without ds_dynmo, "
            'remove the section or set "enabled" to false'
        )
