"""Memory that would not arrive as it left: a tensor or an array that shares it would arrive as a copy."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch

from ds_dynmo.engine.move.description import kind_of, path_text
from ds_dynmo.engine.move.layer_tensors import TensorsByMemory
from ds_dynmo.engine.move.object_graph import Path
from ds_dynmo.unmarked import unmarked

_OF_RANK = 'say that its attribute belongs to the rank ("rank_attributes" in the "dynmo" section)'


def check_tensor(path: Path, tensor: torch.Tensor) -> None:
    """Refuse a tensor without values, one in memory that processes share, and one that negates or conjugates another.

    Raises:
        TypeError: with its path.
    """
    if tensor.is_meta:
        raise TypeError(f"{path_text(path)} is on the meta device: it has no values to move")
    data = unmarked(tensor)
    if data.is_conj() or data.is_neg():
        raise TypeError(
            f"{path_text(path)} is a view that conjugates or negates what is in memory, and would arrive without that: "
            "resolve_conj() or resolve_neg() it"
        )
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if is_plain and tensor.device.type == "cpu" and data.untyped_storage().is_shared():
        raise TypeError(
            f"{path_text(path)} lies in memory that processes share (share_memory_()), and would arrive as a copy: "
            f"clone() it, or {_OF_RANK}"
        )


def check_arrays(held: Iterable[tuple[Path, Any]], own: Sequence[torch.Tensor], travels: Callable[[Any], bool]) -> None:
    """Refuse arrays of numpy in a file or in shared memory, and those that share memory within a layer.

    Args:
        held: objects that a layer refers to.
        own: the layer's tensors.
        travels: returns whether an object is sent with the layer.

    Raises:
        TypeError: with the path of the array.
    """
    arrays = [(path, array) for path, array in held if isinstance(array, numpy.ndarray) and array.size]
    if not arrays:
        return
    roots: dict[int, Path] = {}
    tensors = TensorsByMemory(own)
    for path, array in arrays:
        root, holder = _root_of(array)
        if isinstance(holder, mmap.mmap):
            problem = "lies in a file or in memory that processes share"
        elif tensors.find_address(array.__array_interface__["data"][0]) is not None:
            problem = "is the memory of a tensor of the layer"
        elif id(root) in roots:
            problem = f"shares memory with {path_text(roots[id(root)])}"
        else:
            roots[id(root)] = path
            continue
        if travels(array):
            raise TypeError(
                f"{path_text(path)}, a {kind_of(array)}, {problem}, and would arrive as a copy: copy() it, or "
                f"{_OF_RANK}"
            )


def _root_of(array: numpy.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return the array that has the memory, and the object, if any, whose memory it is."""
    root: Any = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    holder = root.base
    while isinstance(holder, memoryview):
        holder = holder.obj
    return root, holder
