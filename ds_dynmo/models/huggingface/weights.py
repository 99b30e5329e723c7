"""Read the tensors of a Hugging Face model, which have names and shapes of their own in its files.

Only the header of a file is read before a layer is built, and then only that layer's tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ds_dynmo.config import load_json
from ds_dynmo.errors import ConfigError, reason_of

__all__ = ["INDEX", "Folder", "InMemory", "Stored", "Tensors", "check_tensors"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN = 4  # names in a message
ROWS = 1024  # of a tensor that are read at once to compare it

# Buffers that older versions of transformers saved.
_IGNORED = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Stored:
    """One tensor of transformers' model as it lies in files, or in memory.

    Attributes:
        target: its name in transformers' model.
        names: of the tensors that it is made of.
        patterns: of ``converter``, one for each of ``names``.
        converter: transformers', which makes it; None: it is the one tensor.
        first: of all that the converter makes of ``names``, by its name in transformers' model.
    """

    target: str
    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    converter: Any = None
    first: str = ""

    def of_experts(self, share: slice, experts: int) -> Stored:
        """Narrow this to ``share`` of ``experts`` where each has tensors of its own; else give it all."""
        by_pattern: dict[str, list[str]] = {}
        for name, pattern in zip(self.names, self.patterns):
            by_pattern.setdefault(pattern, []).append(name)
        if not by_pattern or any(len(names) != experts for names in by_pattern.values()):
            return self
        kept = [(name, pattern) for pattern, names in by_pattern.items() for name in names[share]]
        return replace(self, names=tuple(name for name, _ in kept), patterns=tuple(pattern for _, pattern in kept))

    def value(self, found: Mapping[str, torch.Tensor], model: Any) -> torch.Tensor:
        """Make the tensor of what was read.

        Args:
            model: transformers'.
        """
        return self.values(found, model)[self.target]

    def values(self, found: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Make all tensors that come of ``names``, by their names in transformers' model."""
        if self.converter is None:
            return {self.target: found[self.names[0]]}
        converter = copy.deepcopy(self.converter)
        for name, pattern in zip(self.names, self.patterns, strict=True):
            converter.add_tensor(self.first, name, pattern, found[name])
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Tensors(Protocol):
    """Where weights are read from.

    Attributes:
        label: for messages.
        shapes: of all tensors, by name.
    """

    label: str
    shapes: Mapping[str, tuple[int, ...]]

    def only(self, names: Collection[str]) -> Tensors:
        """Narrow this to the tensors ``names``; nothing is read or copied."""

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read these tensors alone."""


class InMemory:
    """The tensors of a model that exists."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.label = "the model"
        self._tensors = tensors
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def only(self, names: Collection[str]) -> InMemory:
        """Narrow this to the tensors ``names``."""
        return InMemory({name: self._tensors[name] for name in names})

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read these tensors alone."""
        return {name: self._tensors[name].detach() for name in names}


class Folder:
    """The tensors of the safetensors files in a folder; the constructor reads their headers.

    Raises:
        ConfigError: no such files, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.label = str(folder)
        self._found: dict[str, Path] = {}
        shapes = {}
        for path in _files(folder):
            for name, shape in _header(path).items():
                shapes[name] = shape
                self._found[name] = path
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def only(self, names: Collection[str]) -> Folder:
        """Narrow this to the tensors ``names``; nothing is read."""
        kept = copy.copy(self)
        kept.shapes = {name: self.shapes[name] for name in names}
        kept._found = {name: self._found[name] for name in names}
        return kept

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read these tensors alone."""
        from safetensors import SafetensorError, safe_open

        tensors = {}
        for path in dict.fromkeys(self._found[name] for name in names):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        if self._found[name] == path:
                            tensors[name] = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from error
        return tensors

    def are_equal(self, one: str, other: str) -> bool:
        """Compare the values of two tensors, some rows at a time."""
        from safetensors import safe_open

        if self.shapes[one] != self.shapes[other]:
            return False
        with safe_open(self._found[one], "pt") as first, safe_open(self._found[other], "pt") as second:
            left, right = first.get_slice(one), second.get_slice(other)
            for start in range(0, self.shapes[one][0], ROWS):
                if not torch.equal(left[start : start + ROWS].float(), right[start : start + ROWS].float()):
                    return False
        return True


def _files(folder: Path) -> list[Path]:
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():  # transformers prefers the single one, too
        weight_map = load_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f'{folder / INDEX}: should have a "weight_map" of tensors to file names')
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / SINGLE]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        hint = f"; {folder / 'config.json'} instead of the folder is a model with fresh weights"
        if any(folder.glob("pytorch_model*.bin*")):
            hint = "; files of pickle are not read: load them with transformers, and save_pretrained() the model"
        raise ConfigError(f"{folder}: has no file {_some(missing)}{hint if missing == [SINGLE] else ''}")
    return files


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118, no dict
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from error


def check_tensors(
    tensors: Tensors,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    unknown: Collection[str],
    ignored: Collection[str] = (),
) -> None:
    """Refuse tensors that are not the model's.

    Args:
        found: shapes of what they make, by the names in transformers' model.
        expected: what the model has.
        unknown: tensors that make nothing of the model's.
        ignored: patterns of those that transformers leaves out.

    Raises:
        ConfigError: naming the tensors and their shapes.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise ConfigError(f"{tensors.label}: lacks {_some(missing)}, which its config asks for")
    wrong = [name for name, shape in expected.items() if found[name] != shape]
    if wrong:
        shapes = ", ".join(f"{name} {_shape(found[name])} not {_shape(expected[name])}" for name in wrong[:1])
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ConfigError(f"{tensors.label}: has other shapes than its config says: {shapes}{more}")
    patterns = [_IGNORED, *map(re.compile, ignored)]
    unknown = [name for name in unknown if not any(pattern.search(name) for pattern in patterns)]
    if unknown:
        raise ConfigError(f"{tensors.label}: has {_some(unknown)}, which its config knows nothing of")


def _some(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))
