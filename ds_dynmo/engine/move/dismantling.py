"""Sending modules in parts, if they cannot be pickled whole, into modules that the receiver builds from a spec.

A module with a lambda as an attribute, or a closure as a hook, cannot be pickled. It becomes :class:`Dismantled`: all
parts of it that can be sent, and whole children where possible. The receiver puts these into a module that it builds
from the layer's spec. References to the module become references to the built one.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.objects import from_bytes, to_bytes
from ds_dynmo.engine.move.description import can_be_sent, why_it_stays
from ds_dynmo.engine.move.object_graph import MODULE_MACHINERY
from ds_dynmo.engine.move.pickling import stand_in
from ds_dynmo.torch_private import (
    TABLES_OF_MODULES,
    buffers_of,
    children_of,
    non_persistent_of,
    parameters_of,
    set_buffers,
)

_TRAVELS_ANYHOW = TABLES_OF_MODULES | {"training"}
HOOKS = MODULE_MACHINERY - _TRAVELS_ANYHOW  # tables that refer to each other by the numbers of hooks


@dataclass
class Dismantled:
    """The parts that can be sent of a module that cannot be pickled.

    Attributes:
        attributes: plain attributes.
        left: names of attributes that keep the values of the built module.
        hooks: torch's tables of hooks; None: those of the built module.
        extra_state: as bytes; None: the module has none.
        children: per name, a module, its parts if it cannot be pickled either, or None.
    """

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    non_persistent: set[str]
    attributes: dict[str, Any]
    left: set[str]
    hooks: dict[str, Any] | None
    training: bool
    extra_state: bytes | None
    children: dict[str, Any]


def modules_to_dismantle(
    module: nn.Module, references: Collection[int], of_rank: Mapping[int, Container[str]], path: str = ""
) -> dict[str, nn.Module]:
    """Find the modules to take apart, ``module`` and some below it, by path.

    Args:
        references: see :func:`why_it_stays`.
        of_rank: by ``id`` of a module, attributes that stay behind.
    """
    found = {path: module}
    for name, child in children_of(module).items():
        known = {*references, *map(id, found.values())}
        if child is None or id(child) in known:
            continue
        if any(id(part) in of_rank for part in child.modules()) or not can_be_sent(child, known):
            found |= modules_to_dismantle(child, known, of_rank, f"{path}.{name}" if path else name)
    return found


def dismantle(
    module: nn.Module,
    references: Collection[int],
    apart: Container[int],
    of_rank: Mapping[int, Container[str]],
    reasons: dict[str, str],
) -> Dismantled:
    """Take ``module`` apart.

    Args:
        references: see :func:`why_it_stays`; references to modules that are taken apart are among them.
        apart: the ``id`` of each module that is taken apart.
        of_rank: by ``id`` of a module, attributes that stay behind.
        reasons: filled with the reason why an attribute stays behind, by name.
    """
    attributes = {name: value for name, value in vars(module).items() if name not in MODULE_MACHINERY}
    left = {name for name in attributes if name in of_rank.get(id(module), ())}
    for name in attributes.keys() - left:
        if (reason := why_it_stays(attributes[name], references)) is not None:
            left.add(name)
            reasons[name] = reason
    hooks = {name: value for name, value in vars(module).items() if name in HOOKS}
    if (reason := why_it_stays(hooks, references)) is not None:
        reasons.update(dict.fromkeys(hooks, reason))
    return Dismantled(
        parameters=dict(parameters_of(module)),
        buffers=dict(buffers_of(module)),
        non_persistent=set(non_persistent_of(module)),
        attributes={name: value for name, value in attributes.items() if name not in left},
        left=left,
        hooks=hooks if reason is None else None,
        training=module.training,
        extra_state=to_bytes(module.get_extra_state()) if _has_extra_state(module) else None,
        children={
            name: dismantle(child, references, apart, of_rank, reasons)
            if child is not None and id(child) in apart
            else child
            for name, child in children_of(module).items()
        },
    )


def free_values(built: nn.Module) -> None:
    """Free the memory of a module's plain tensors, in whose place others come."""
    for part in built.modules():
        for held in (parameters_of(part), buffers_of(part)):
            for name, tensor in held.items():
                if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_quantized:  # type: ignore[union-attr]
                    held[name] = stand_in(tensor)  # type: ignore[arg-type, assignment]


def assemble(built: nn.Module, dismantled: Dismantled, device: torch.device) -> nn.Module:
    """Put the parts of ``dismantled`` into ``built``, a module of the same class."""
    attributes = vars(built)
    for name in attributes.keys() - MODULE_MACHINERY - dismantled.left:
        del attributes[name]
    attributes.update({**dismantled.attributes, **(dismantled.hooks or {})})
    children = {
        name: assemble(children_of(built)[name], child, device) if isinstance(child, Dismantled) else child  # type: ignore[arg-type]
        for name, child in dismantled.children.items()
    }
    parameters_of(built).clear()
    parameters_of(built).update(dismantled.parameters)
    children_of(built).clear()
    children_of(built).update(children)
    set_buffers(built, dict(dismantled.buffers), set(dismantled.non_persistent))
    built.training = dismantled.training
    if dismantled.extra_state is not None:
        built.set_extra_state(from_bytes(dismantled.extra_state, device))
    return built


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
