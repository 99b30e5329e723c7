"""Decoder layers in halves (``split_blocks``): how one is cut into two layers of the pipeline.

A half is transformers' decoder layer, with zeros in place of the modules of the other half. The library's own
``forward`` computes it: zeros that are normed, scaled and added to a residual stream leave that as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_dynmo.models.huggingface.stubbed_model import Arguments, with_hidden

__all__ = ["Half", "Halves", "check_has_all", "cut_decoder_layers"]


class Zeros(nn.Module):
    """Stands for a module of the other half: returns zeros like the hidden states that it is given.

    Args:
        results: how many values the module returns, the first of which is used; 0: a tensor, no tuple.
    """

    def __init__(self, results: int) -> None:
        super().__init__()
        self.results = results

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return (zeros, *(None for _ in range(1, self.results))) if self.results else zeros


@dataclass(frozen=True)
class Half:
    """One half of a transformers decoder layer.

    Attributes:
        absent: by their names in the decoder layer, the modules of the other half, with their ``results`` (see
            :class:`Zeros`).
    """

    absent: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> None:
        """All rows of each tensor."""

    def has(self, path: str) -> bool:
        """Return whether the module ``path`` of the decoder layer is in this half."""
        return path.partition(".")[0] not in dict(self.absent)

    def of(self, part: nn.Module) -> nn.Module:
        """Leave this half of the decoder layer ``part``."""
        for name, results in self.absent:
            setattr(part, name, Zeros(results))
        return part


Halves = tuple[Half, Half]


@dataclass
class _Call:
    """A decoder layer's call.

    Attributes:
        of_modules: the calls of its modules in their order, with the ``results`` of each.
    """

    arguments: Arguments = ((), {})
    output: Any = None
    of_modules: list[tuple[str, int]] = field(default_factory=list)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.arguments, self.output = (args, kwargs), output

    def note_module(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.of_modules.append((name, len(output) if isinstance(output, tuple) else 0))


@torch.no_grad()
def cut_decoder_layers(model: Any, blocks: Sequence[nn.Module], tokens: torch.Tensor) -> tuple[Halves, ...]:
    """Find where each decoder layer of a transformers ``model`` can be cut, so that halves compute the same to the bit.

    Raises:
        ValueError: one can be cut nowhere, by its modules' names.
    """
    with _noting(blocks) as calls:
        model(tokens, use_cache=False)
    return tuple(_cut(block, call) for block, call in zip(blocks, calls))


def check_has_all(halves: Halves, block: nn.Module) -> None:
    """Refuse ``halves`` of another decoder layer than ``block``: one of them has to have each of its weights.

    Raises:
        ValueError: naming a module.
    """
    for name, module in block.named_children():
        if [*module.parameters()] and sum(half.has(name) for half in halves) != 1:
            raise ValueError(f"{type(block).__name__} has another module than that of a tiny model, {name}")


@contextmanager
def _noting(blocks: Sequence[nn.Module]) -> Iterator[list[_Call]]:
    calls = [_Call() for _ in blocks]
    handles = []
    for block, call in zip(blocks, calls):
        handles.append(block.register_forward_hook(call.note, with_kwargs=True))
        for name, module in block.named_children():
            handles.append(module.register_forward_hook(partial(call.note_module, name)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _cut(block: nn.Module, call: _Call) -> Halves:
    kind = type(block).__name__
    if own := [name for name in block.state_dict() if "." not in name]:
        raise ValueError(f"{kind} has a tensor of its own, {own[0]}, beside those of its modules")
    names = [name for name, _ in call.of_modules]
    unused = [(name, 0) for name, module in block.named_children() if name not in names and [*module.parameters()]]
    for place in range(1, len(names)):
        halves = Half((*call.of_modules[place:], *unused)), Half(tuple(call.of_modules[:place]))
        if not {*names[:place]} & {*names[place:]} and _compute_the_same(halves, block, call):
            return halves
    raise ValueError(
        f"{kind} is no attention and then feed-forward with a residual connection around each: no cut between its "
        f"modules, {', '.join(dict.fromkeys(names))}, makes two layers that compute the same"
    )


def _compute_the_same(halves: Halves, block: nn.Module, call: _Call) -> bool:
    args, kwargs = call.arguments
    hidden = args[0] if args else kwargs["hidden_states"]
    try:
        for half in halves:
            args, kwargs = with_hidden(call.arguments, hidden)
            hidden = half.of(copy.deepcopy(block))(*args, **kwargs)
    except Exception:  # zeros are not what every module may be replaced by
        return False
    return isinstance(hidden, torch.Tensor) and torch.equal(hidden, call.output)
