"""Take over from a model in memory what its config does not say, and refuse what cannot be taken over.

Scripts change models after they are built: the rate of a dropout, the token of padding, a layer's place. Transformers
computes with the attributes of its modules then, not with the config.
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.lora import is_adapters, plain_name

__all__ = ["take_settings"]

_PLAIN = (bool, int, float, str, type(None))
_OF_TRAINING = ("training", "gradient_checkpointing")  # how a model is trained: the engine's matter


def take_settings(skeleton: Any, model: nn.Module, label: str) -> None:
    """Copy the settings of the modules of ``model`` to those of ``skeleton``.

    Args:
        skeleton: transformers' model of the config, without memory.
        model: transformers', with adapters or without.

    Raises:
        ConfigError: a module has another class than the config says, or other weights are shared.
    """
    _check_shared(skeleton, model, label)
    given: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = plain_name(path)
        if own is not None and not is_adapters(path):
            given[own] = module  # what an adapter wraps follows the adapter
    for path, module in skeleton.named_modules(remove_duplicate=False):
        found = given.get(path)
        if found is None:
            continue  # if it has weights, they are missing
        if type(found) is not type(module):
            raise ConfigError(
                f"{label}: {path or 'it'} is a {_class(found, module)}, by its config a {_class(module, found)}"
            )
        kept = module.state_dict(keep_vars=True)
        if all(name in kept for name, _ in module.named_buffers(recurse=False)):  # others are made by the config
            settings = vars(module)
            for name, value in vars(found).items():
                if type(value) in _PLAIN and type(settings.get(name, ())) in _PLAIN and _is_setting(name):
                    setattr(module, name, value)


def _is_setting(name: str) -> bool:
    return not name.startswith("_") and name not in _OF_TRAINING


def _class(module: nn.Module, other: nn.Module) -> str:
    """Name a module's class, with that of Python's module where the names alone are equal."""
    kind, name = type(module), type(module).__name__
    return f"{kind.__module__}.{name}" if name == type(other).__name__ else name


def _check_shared(skeleton: Any, model: nn.Module, label: str) -> None:
    expected, found = _shared(skeleton), _shared(model)
    for names in sorted(map(sorted, expected ^ found)):
        has, says = ("", " not") if frozenset(names) in found else (" not", "")
        tied = f"tie_word_embeddings {json.dumps(getattr(skeleton.config, 'tie_word_embeddings', False))}"
        raise ConfigError(f"{label}: {' and '.join(names)} are{has} one weight, by its config ({tied}) they are{says}")


def _shared(model: nn.Module) -> set[frozenset[str]]:
    """Find the names of parameters that are one."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = plain_name(name)
        if own is not None and not is_adapters(name):
            names.setdefault(id(parameter), set()).add(own)
    return {frozenset(group) for group in names.values() if len(group) > 1}
