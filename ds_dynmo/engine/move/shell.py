"""A layer without its tensors, as bytes.

The sender loads the bytes of a whole layer once, with tensors without values, and compares the result with the layer;
of a layer in parts, or one that a callback completes, the receiver does. So none arrives as something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.move.description import (
    NOTHING,
    Line,
    describe,
    first_difference,
    kind_of,
    known_texts,
    path_text,
)
from ds_dynmo.engine.move.dismantling import HOOKS, assemble, dismantle, free_values, modules_to_dismantle
from ds_dynmo.engine.move.pickling import dump, load, stand_in
from ds_dynmo.engine.move.references import Outside
from ds_dynmo.engine.state.layer_record import LayerRecord
from ds_dynmo.torch_private import moves_by_itself, number_hooks_after

Build = Callable[[], nn.Module]
_REMEDY = (
    "set it where the layer arrives (engine.on_layer_arrival), or say that it belongs to the rank "
    '("rank_attributes" in the "dynmo" section)'
)


@dataclass(frozen=True)
class Shell:
    """A layer's objects as bytes, with its tensors by number.

    Attributes:
        dismantled_paths: of modules that are filled into a layer built from the spec; (): the layer is pickled whole.
        of_rank: by path of a module, its attributes that belong to the rank.
        reasons: by name of an attribute, why it is not sent.
        description: of the layer, to compare on arrival; None: the sender has compared already.
    """

    data: bytes
    dismantled_paths: tuple[str, ...]
    of_rank: Mapping[str, frozenset[str]]
    reasons: Mapping[str, str]
    description: list[Line] | None

    @classmethod
    def of(cls, layer: LayerRecord, outside: Outside, completed: bool) -> tuple[Shell, list[torch.Tensor]]:
        """Pickle ``layer``, and return its tensors too.

        Args:
            outside: references of the layer to objects that it does not own.
            completed: whether a user's callback completes the layer on arrival.

        Raises:
            TypeError: something would arrive as something else, or not at all.
        """
        whole = None if outside.rank_attributes else _pickled_whole(layer, outside, completed)
        return whole or _pickled_in_parts(layer, outside)

    def build(self, build: Build, device: torch.device) -> nn.Module | None:
        """Build the module that the parts are put into, without values of its tensors; None: the layer comes whole.

        The spec builds it where the user's code does, usually in host memory. Only a class that says itself what moving
        to a device means is moved: an attribute that stays behind may hold tensors.

        Raises:
            TypeError: the layer from ``build`` lacks modules.
        """
        if not self.dismantled_paths:
            return None
        built = build()
        modules = dict(built.named_modules(remove_duplicate=False))
        if missing := [path for path in self.dismantled_paths if path not in modules]:
            raise TypeError(
                f"{kind_of(built)} has submodules {missing} that cannot be pickled and that its spec does not build"
            )
        held = (*built.parameters(), *built.buffers())
        moves = any(moves_by_itself(modules[path]) for path in self.dismantled_paths)
        if moves and not any(tensor.is_meta for tensor in held):
            built = built.to(device)
        free_values(built)
        return built

    def load(
        self,
        tensors: Sequence[torch.Tensor],
        references: Mapping[int, Any],
        built: nn.Module | None,
        device: torch.device,
    ) -> LayerRecord:
        """Load the layer with these tensors and references, and with what :meth:`build` has built."""
        layer: LayerRecord = (
            load(self.data, tensors, references)
            if built is None
            else self._load_in_parts(tensors, references, built, device)
        )
        _number_later_hooks_after(layer.module)
        return layer

    def _load_in_parts(
        self, tensors: Sequence[torch.Tensor], references: Mapping[int, Any], built: nn.Module, device: torch.device
    ) -> LayerRecord:
        modules = dict(built.named_modules(remove_duplicate=False))
        numbered = {len(self.dismantled_paths) + number: held for number, held in references.items()}
        numbered.update((number, modules[path]) for number, path in enumerate(self.dismantled_paths))
        layer: LayerRecord = load(self.data, tensors, numbered)
        layer.module = assemble(built, layer.module, device)
        return layer

    def check(self, arrived: LayerRecord, tensors: Sequence[torch.Tensor], references: Mapping[int, Any]) -> None:
        """Refuse a layer that differs from the one sent.

        Raises:
            TypeError: with the first difference.
        """
        if self.description is None:
            return
        left_out = {id(part): self.of_rank.get(path, ()) for path, part in arrived.module.named_modules()}
        known = known_texts(tensors, references)
        difference = first_difference(self.description, describe(_roots(arrived), known, left_out))
        if difference is None:
            return
        path, here, there = difference
        reason = next((self.reasons[name] for kind, name in path if name in self.reasons), None)
        came = "is not there" if there == NOTHING else f"is {there}"
        raise TypeError(
            f"{path_text(path)} of a {kind_of(arrived.module)} is {here}, and where the layer arrives it {came}: "
            f"{_REMEDY}{f'; it cannot be sent: {reason}' if reason else ''}"
        )


def _number_later_hooks_after(module: nn.Module) -> None:
    """Let hooks registered later not replace those of a module from another process."""
    tables = [table for part in module.modules() for name, table in vars(part).items() if name in HOOKS]
    numbers = [number for table in tables if isinstance(table, dict) for number in table]
    number_hooks_after(max(numbers, default=-1))


def _pickled_whole(layer: LayerRecord, outside: Outside, completed: bool) -> tuple[Shell, list[torch.Tensor]] | None:
    """Pickle a whole layer; None: it cannot be pickled, or the loaded layer differs."""
    try:
        dumped = dump(layer, {key: number for number, key in enumerate(outside.references)})
        sent = describe(_roots(layer), known_texts(dumped.tensors, dumped.referred))
        tensors = [stand_in(tensor) for tensor in dumped.tensors]
        back = load(dumped.data, tensors, dumped.referred)
        if first_difference(sent, describe(_roots(back), known_texts(tensors, dumped.referred))) is not None:
            return None
    except Exception:  # any error of a user's object; the attempt in parts names it
        return None
    return Shell(dumped.data, (), {}, {}, sent if completed else None), dumped.tensors


def _pickled_in_parts(layer: LayerRecord, outside: Outside) -> tuple[Shell, list[torch.Tensor]]:
    """Pickle the parts of a layer that can be sent, for a layer that the receiver builds."""
    module, of_rank = layer.module, outside.rank_attributes
    apart = modules_to_dismantle(module, outside.references, of_rank)
    numbers = {id(part): number for number, part in enumerate(apart.values())}
    known = {**numbers, **{key: len(apart) + number for number, key in enumerate(outside.references)}}
    reasons: dict[str, str] = {}
    dismantled = dismantle(module, known, numbers, of_rank, reasons)
    dumped = dump(replace(layer, module=dismantled), known)
    referred = {number - len(apart): held for number, held in dumped.referred.items() if number >= len(apart)}
    paths = {path: of_rank[id(part)] for path, part in module.named_modules() if id(part) in of_rank}
    description = describe(_roots(layer), known_texts(dumped.tensors, referred), of_rank)
    return Shell(dumped.data, tuple(apart), paths, reasons, description), dumped.tensors


def _roots(layer: LayerRecord) -> list[tuple[tuple[tuple[str, Any], ...], Any]]:
    others = [field.name for field in fields(layer) if field.name != "module"]
    return [((), layer.module), *(((("item", name),), getattr(layer, name)) for name in others)]
