"""Take apart modules that cannot be sent whole, and put them together around ones that are built from a spec.

A module whose attribute is a lambda, or whose hook is a closure, cannot be pickled. It becomes :class:`Dismantled`: all
of it that can be sent, its children whole where they can be. The receiver puts it into a module that it builds from the
layer's spec. References to such a module are references to the one that is built.
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
    """What can be sent of a module that cannot.

    Attributes:
        attributes: plain ones.
        left: names of attributes that are those of the module that is built.
        hooks: torch's tables of them; None: those of the module that is built.
        extra_state: as bytes; None: the module has none.
        children: per name, a module, its parts if it cannot be sent either, or None.
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


def find_parts(
    module: nn.Module, references: Collection[int], of_rank: Mapping[int, Container[str]], path: str = ""
) -> dict[str, nn.Module]:
    """Find the modules that have to be taken apart, ``module`` and some below it, by their paths.

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
            found |= find_parts(child, known, of_rank, f"{path}.{name}" if path else name)
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
        references: see :func:`why_it_stays`; those to modules that are taken apart are among them.
        apart: the ``id`` of each of those.
        of_rank: by ``id`` of a module, attributes that stay behind.
        reasons: gets, by name, why an attribute stays behind.
    """
    own = {name: value for name, value in vars(module).items() if name not in MODULE_MACHINERY}
    left = {name for name in own if name in of_rank.get(id(module), ())}
    for name in own.keys() - left:
        if (reason := why_it_stays(own[name], references)) is not None:
            left.add(name)
            reasons[name] = reason
    hooks = {name: value for name, value in vars(module).items() if name in HOOKS}
    if (reason := why_it_stays(hooks, references)) is not None:
        reasons.update(dict.fromkeys(hooks, reason))
    return Dismantled(
        parameters=dict(parameters_of(module)),
        buffers=dict(buffers_of(module)),
        non_persistent=set(non_persistent_of(module)),
        attributes={name: value for name, value in own.items() if name not in left},
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


def assemble(shell: nn.Module, parts: Dismantled, device: torch.device) -> nn.Module:
    """Put ``parts`` into ``shell``, a module of the same class."""
    own = vars(shell)
    for name in own.keys() - MODULE_MACHINERY - parts.left:
        del own[name]
    own.update({**parts.attributes, **(parts.hooks or {})})
    children = {
        name: assemble(children_of(shell)[name], child, device) if isinstance(child, Dismantled) else child  # type: ignore[arg-type]
        for name, child in parts.children.items()
    }
    parameters_of(shell).clear()
    parameters_of(shell).update(parts.parameters)
    children_of(shell).clear()
    children_of(shell).update(children)
    set_buffers(shell, dict(parts.buffers), set(parts.non_persistent))
    shell.training = parts.training
    if parts.extra_state is not None:
        shell.set_extra_state(from_bytes(parts.extra_state, device))
    return shell


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
