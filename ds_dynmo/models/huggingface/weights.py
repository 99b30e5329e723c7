"""Read the tensors of a Hugging Face model, which have names and shapes of their own in its files.

Only the header of a file is read before a layer is built, and then only that layer's tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ds_dynmo.config import load_json
from ds_dynmo.errors import ConfigError

__all__ = ["INDEX", "ExpertFiles", "Folder", "Stored", "Tensors", "check_tensors", "stored"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN = 4  # names in a message

# Buffers that older versions of the library saved.
_IGNORED = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
_EXPERTS = re.compile(r"(?P<layer>.*)\.mlp\.experts\.(?P<name>\w+)$")


@dataclass(frozen=True)
class ExpertFiles:
    """How files of a model have experts, each matrix a tensor of its own.

    Attributes:
        block: what stands for "mlp" in names.
        matrices: by the parameter in memory, of all experts, those that lie behind one another in it for each expert.
    """

    block: str
    matrices: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Stored:
    """One parameter as it lies in the library's files: ``names``, each of ``shape``, one after the other."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def pieces(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split ``parameter`` by ``names``, into views of its memory."""
        return dict(zip(self.names, parameter.view(len(self.names), *self.shape)))

    def of_experts(self, share: slice, experts: int) -> Stored:
        """Narrow this to the tensors of ``share`` of ``experts`` that lie one after the other."""
        per_expert = len(self.names) // experts
        return Stored(self.names[share.start * per_expert : share.stop * per_expert], self.shape)


def stored(name: str, shape: tuple[int, ...], files: ExpertFiles | None) -> Stored:
    """Locate parameter ``name`` in the library's files.

    Args:
        files: of a model with experts. None: every parameter is one tensor, as in memory.
    """
    if files is None:
        return Stored((name,), shape)
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return Stored((name.replace(".mlp.", f".{files.block}."),), shape)
    matrices = files.matrices[match["name"]]
    experts, rows, columns = shape
    names = tuple(
        f"{match['layer']}.{files.block}.experts.{expert}.{matrix}.weight"
        for expert in range(experts)
        for matrix in matrices
    )
    return Stored(names, (rows // len(matrices), columns))


class Tensors(Protocol):
    """Where weights are read from.

    Attributes:
        place: for messages.
        shapes: of all tensors, by name.
    """

    place: str
    shapes: Mapping[str, tuple[int, ...]]

    def only(self, names: Collection[str]) -> Tensors:
        """Narrow this to the tensors ``names``; nothing is read or copied."""

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read these tensors alone."""


class InMemory:
    """The tensors of a model that exists."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.place = "the model"
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

    Args:
        prefix: of the library's model without its head, such as "transformer": files may be without it.

    Raises:
        ConfigError: no such files, or one that cannot be read.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.place = str(folder)
        self._found: dict[str, tuple[Path, str]] = {}
        shapes = {}
        for path in _files(folder):
            for key, shape in _header(path).items():
                name = key if key.startswith((f"{prefix}.", "lm_head.")) else f"{prefix}.{key}"
                shapes[name] = shape
                self._found[name] = (path, key)
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
        for path in dict.fromkeys(self._found[name][0] for name in names):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        if self._found[name][0] == path:
                            tensors[name] = file.get_tensor(self._found[name][1])
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from error
        return tensors


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        weight_map = load_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f'{folder / INDEX}: should have a "weight_map" of tensors to file names')
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / SINGLE]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        fresh = f"; {folder / 'config.json'} instead of the folder is a model with fresh weights"
        raise ConfigError(f"{folder}: has no file {_some(missing)}{fresh if missing == [SINGLE] else ''}")
    return files


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118, no dict
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def check_tensors(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], *, optional: Collection[str]) -> None:
    """Refuse tensors that are not the model's.

    Args:
        optional: names that may be there too.

    Raises:
        ConfigError: naming the tensors and their shapes.
    """
    missing = [name for name in expected if name not in tensors.shapes]
    if missing:
        raise ConfigError(f"{tensors.place}: lacks {_some(missing)}, which its config asks for")
    wrong = [name for name, shape in expected.items() if tensors.shapes[name] != shape]
    if wrong:
        shapes = ", ".join(f"{name} {_shape(tensors.shapes[name])} not {_shape(expected[name])}" for name in wrong[:1])
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ConfigError(f"{tensors.place}: has other shapes than its config says: {shapes}{more}")
    unknown = [
        name for name in tensors.shapes if name not in expected and name not in optional and not _IGNORED.search(name)
    ]
    if unknown:
        raise ConfigError(f"{tensors.place}: has {_some(unknown)}, which its config knows nothing of")


def _some(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))
