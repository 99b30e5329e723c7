"""Descriptions of objects, which are equal on any rank if and only if the objects are.

An unpickled copy may differ from the original without an error: a method may come back as another of the same name, an
attribute may be lost, two references to one object may become references to two. The descriptions differ in such cases.
"""

from __future__ import annotations

import functools
import logging
import pathlib
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_dynmo.engine.move.object_graph import (
    MODULE_MACHINERY,
    Path,
    Step,
    all_children,
    is_constant,
    is_immutable,
    place_in_class,
    text,
)
from ds_dynmo.engine.move.pickling import dump, load, stand_in
from ds_dynmo.unmarked import unmarked

Line = tuple[Path, str]
NOTHING = "nothing"
_READ_AS_THEY_ARE = (list, tuple, dict, OrderedDict, defaultdict, deque, functools.partial, types.MethodType)
_LONGEST_TEXT = 60
_NONE_LEFT_OUT: Mapping[int, Container[str]] = {}


def describe(
    roots: Sequence[tuple[Path, Any]], known: Mapping[int, str], left_out: Mapping[int, Container[str]] = _NONE_LEFT_OUT
) -> list[Line]:
    """Describe every object that can be reached from ``roots``: one line each, by path.

    Args:
        known: by ``id``, the text of objects that are not entered, such as tensors that travel.
        left_out: by ``id`` of a module, attributes to leave out.
    """
    lines: list[Line] = []
    first: dict[int, Path] = {}
    frozen: dict[int, str | None] = {}
    waiting = list(roots)
    for path, value in waiting:  # grows during the loop
        whole = known.get(id(value)) or _plain(value, frozen)
        if whole is None and id(value) in first:
            whole = f"the same object as {path_text(first[id(value)])}"
        if whole is not None:
            lines.append((path, whole))
            continue
        first[id(value)] = path
        lines.append((path, _text(value, frozen)))
        names = left_out.get(id(value), ())
        parts = [part for part in _parts(value) if part[0][0][1] not in names]
        waiting += (((*path, *steps), part) for steps, part in sorted(parts, key=_order))
    return lines


def first_difference(sent: Sequence[Line], arrived: Sequence[Line]) -> tuple[Path, str, str] | None:
    """Find the first path at which two descriptions differ, with both texts; None: they are equal."""
    if sent == arrived:
        return None
    here, there = dict(sent), dict(arrived)
    for path in [*here, *there]:
        texts = here.get(path, NOTHING), there.get(path, NOTHING)
        if texts[0] != texts[1]:
            return path, *texts
    return None


def known_texts(tensors: Sequence[torch.Tensor], references: Mapping[int, Any]) -> dict[int, str]:
    """Return the texts of tensors and references for :func:`describe`."""
    texts = {id(value): f"reference {number}" for number, value in references.items()}
    return {**texts, **{id(tensor): f"tensor {n}, a {kind_of(tensor)}" for n, tensor in enumerate(tensors)}}


def why_it_stays(value: Any, references: Iterable[int] = ()) -> str | None:
    """Return why ``value`` cannot be sent to another rank: it cannot be pickled, or it is unpickled as something else.

    Args:
        references: the ``id`` of each object that has a counterpart on the receiving rank.

    Returns:
        None if it can be sent.
    """
    if is_constant(value):
        return None
    try:
        dumped = dump(value, {key: number for number, key in enumerate(references)})
        tensors = [stand_in(tensor) for tensor in dumped.tensors]
        back = load(dumped.data, tensors, dumped.referred)
        sent = describe([((), value)], known_texts(dumped.tensors, dumped.referred))
        difference = first_difference(sent, describe([((), back)], known_texts(tensors, dumped.referred)))
    except Exception as error:  # whatever a user's object raises
        return f"{type(error).__name__}: {error}"
    return None if difference is None else f"{difference[1]} comes back from a pickle as {difference[2]}"


def can_be_sent(value: Any, references: Iterable[int] = ()) -> bool:
    """Return whether another rank would load an equal ``value`` from its pickle."""
    return why_it_stays(value, references) is None


def kind_of(value: Any) -> str:
    """Return the name of an object's type."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def path_text(path: Path) -> str:
    """Write the path of an attribute of a layer."""
    return text(path).removeprefix(".") or "the layer itself"


# -- one object ---------------------------------------------------------------------------------------


def _plain(value: Any, frozen: dict[int, str | None]) -> str | None:
    """Return an immutable object as text; None: it, or something that it holds, can change.

    Two equal objects of this kind are interchangeable.
    """
    if is_constant(value):
        return text_of_constant(value)
    if not is_immutable(value):
        return None
    if id(value) not in frozen:
        frozen[id(value)] = None  # if it holds itself
        held = value if isinstance(value, frozenset) else [part for _, part in all_children(value)]
        texts = [text for part in held if (text := _plain(part, frozen)) is not None]
        if len(texts) == len(held):
            ordered = sorted(texts) if isinstance(value, frozenset) else texts
            frozen[id(value)] = _short(f"{kind_of(value)} {ordered}")
    return frozen[id(value)]


def text_of_constant(value: Any) -> str:
    """Return a constant as text, equal on every rank where the constants are."""
    if isinstance(value, torch.device):
        return f"the device {value.type}"  # of this rank
    if isinstance(value, types.ModuleType | logging.Logger):
        return f"{kind_of(value)} {value.__name__ if isinstance(value, types.ModuleType) else value.name}"
    if not isinstance(value, types.GenericAlias) and (isinstance(value, type) or hasattr(value, "__qualname__")):
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    return _short(f"{kind_of(value)} {value.as_posix() if isinstance(value, pathlib.PurePath) else repr(value)}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... ({zlib.crc32(text.encode()):08x})"


def _text(value: Any, frozen: dict[int, str | None]) -> str:
    """Describe an object without the objects that it refers to."""
    if isinstance(value, torch.Tensor):  # not sent as a tensor, so its values are compared
        return tensor_text(value)
    if isinstance(value, types.FunctionType):
        return f"the function {value.__module__}.{value.__qualname__} ({_code_checksum(value.__code__):08x})"
    if isinstance(value, torch.jit.ScriptFunction):
        return f"the scripted function {value.name} ({zlib.crc32(str(value.code).encode()):08x})"
    if isinstance(value, types.MethodType):
        place = place_in_class(value)
        return "a bound method" if place is None else f"the method {place[0].__qualname__}.{place[1]}"
    if isinstance(value, set | frozenset):
        return _short(f"{kind_of(value)} {sorted(str(_plain(item, frozen) or kind_of(item)) for item in value)}")
    return f"a {kind_of(value)}"


def _parts(value: Any) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """Yield the parts of an object: the state that its class pickles, if it defines that, else what it refers to."""
    if isinstance(value, torch.Tensor | RemovableHandle | set | frozenset):
        return
    if isinstance(value, nn.Module):
        yield from _of_module(value)
    elif type(value) in _READ_AS_THEY_ARE or (state := _custom_state(value)) is None:
        yield from (((step,), part) for step, part in all_children(value))
    else:
        yield from state


def _order(part: tuple[tuple[Step, ...], Any]) -> list[tuple[str, str]]:
    return [(kind, key if isinstance(key, str) else text_of_constant(key)) for kind, key in part[0]]


def _of_module(module: nn.Module) -> Iterator[tuple[tuple[Step, ...], Any]]:
    state = vars(module)
    if type(module).__getstate__ is not nn.Module.__getstate__:
        try:
            state = module.__getstate__()
        except Exception:  # it refuses, or a user's method fails
            state = vars(module)
    for name, part in state.items():
        step: Step = ("attribute", name)
        if name not in MODULE_MACHINERY:
            yield (step,), part
        elif name in ("_parameters", "_buffers", "_modules"):
            yield from (((("attribute", of),), child) for of, child in part.items())
        elif isinstance(part, dict):  # hooks: their numbers depend on others of this process
            yield from (((step, ("item", place)), hook) for place, hook in enumerate(part.values()))


def _custom_state(value: Any) -> list[tuple[tuple[Step, ...], Any]] | None:
    """Return the state that the class of ``value`` pickles; None: the class does not define it, or refuses."""
    kind = type(value)
    customs = ("__reduce__", "__reduce_ex__", "__getstate__")
    if all(getattr(kind, name, None) is getattr(object, name, None) for name in customs):
        return None
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled
        return None
    if isinstance(reduced, str):
        return []
    parts = [part if place < 3 or part is None else list(part) for place, part in enumerate(reduced)]
    return [((("state", place),), part) for place, part in enumerate(parts)]


def _code_checksum(code: types.CodeType) -> int:
    constants = [_code_checksum(c) if isinstance(c, types.CodeType) else _constant_text(c) for c in code.co_consts]
    return zlib.crc32(repr((code.co_name, code.co_code, code.co_names, constants)).encode())


def _constant_text(value: Any) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def tensor_text(tensor: torch.Tensor) -> str:
    """Describe a tensor by its values."""
    return f"a {kind_of(tensor)} of {tensor.dtype}, shape {list(tensor.shape)}, checksum {checksum(tensor):08x}"


def checksum(tensor: torch.Tensor) -> int:
    """Compute a checksum of a tensor's values; -1: it has no values."""
    if tensor.is_meta:
        return -1
    data = unmarked(tensor)
    data = data.to_dense() if data.layout != torch.strided else data
    return zlib.crc32(data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if data.numel() else 0
