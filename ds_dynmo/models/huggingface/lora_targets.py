"""Which modules get LoRA adapters: the names that a user gives are checked, and chosen where nobody gives any."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import library_module
from ds_dynmo.models.huggingface.lora_config import COPIES, peft_package

__all__ = ["check_names", "choose_targets", "default_targets", "targets_in"]

# Modules that choose experts or tokens, are used for some tokens alone, or belong to a norm, by their names.
LEFT_OUT = re.compile(r"expert|router|indexer|norm|^gate$")
ALL_LINEAR = "all-linear"  # peft's word


def default_targets(model_type: str) -> list[str] | str | None:
    """Return peft's default for a family: names or a pattern; None: it has none.

    peft 0.21 does not find its default for Mixtral itself.
    """
    defaults = peft_package().utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    found: list[str] | str | None = defaults.get(model_type)
    return found


def choose_targets(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """Name all linear layers of attention and of dense feed-forward parts.

    Args:
        model: transformers', with or without memory. A name is that of the module alone where no other module of the
            model has it, else its path in the decoder layer.
        blocks: its decoder layers.
    """
    paths: list[str] = []
    chosen: set[int] = set()
    for block in blocks:
        for path, module in block.named_modules():
            if isinstance(module, _linear_kinds()) and not any(map(LEFT_OUT.search, path.split("."))):
                paths.append(path)
                chosen.add(id(module))
    others = {_last(path) for path, module in model.named_modules() if id(module) not in chosen}
    return list(dict.fromkeys(path if _last(path) in others else _last(path) for path in paths))


def targets_in(model: nn.Module, key: str = "target_modules") -> str:
    """List the names of modules that ``key`` of a ``LoraConfig`` may have."""
    kinds: Any = nn.Module if key == COPIES else (*_linear_kinds(), nn.Embedding)
    paths = [path for path, one in model.named_modules() if isinstance(one, kinds) and [*one.parameters(recurse=False)]]
    return ", ".join(dict.fromkeys(map(_last, paths)))


def check_names(config: Any, model: nn.Module, label: str) -> None:
    """Refuse names of modules that there are not: peft ignores them if it finds others.

    Args:
        config: peft's.
        model: transformers', with or without memory.

    Raises:
        ConfigError: with the first such name, and those that there are.
    """
    paths = [path for path, _ in model.named_modules()]
    for key in ("target_modules", COPIES):
        names = getattr(config, key) or ()
        for name in [names] if isinstance(names, str) else names:
            if not _is_found(name, paths, is_pattern=name is names):
                known = targets_in(model, key)
                raise ConfigError(f"{label}: peft.{key}: the model has no module {name}; it has {known}")


def _is_found(name: str, paths: Sequence[str], *, is_pattern: bool) -> bool:
    if not is_pattern:
        return any(path == name or path.endswith(f".{name}") for path in paths)
    try:
        return name.lower() == ALL_LINEAR or any(re.fullmatch(name, path) for path in paths)
    except re.error:
        return True  # peft says what is wrong with it


def _linear_kinds() -> tuple[type[nn.Module], ...]:
    return nn.Linear, library_module("pytorch_utils").Conv1D


def _last(path: str) -> str:
    return path.rpartition(".")[2]
