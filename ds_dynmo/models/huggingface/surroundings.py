"""What the library's model does around the parts that became pipeline layers, without any weights.

The library's own ``forward`` runs, of a model whose decoder layers are stand-ins: one notes what it is called with,
those before it give back what they are given. So masks, positions and whatever else a family hands to its layers are
the library's, by its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Surroundings", "keeping_dtypes"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Surroundings(nn.Module):
    """The library's model around one of its parts.

    Args:
        model: the library's, with None in place of every part that has weights.
        blocks: name of the list of decoder layers in the model without its head.
        head: name of the output embedding in the model.
        attributes: numbers and strings that ``forward`` may read from a decoder layer.
        trains: does it follow ``train()``? Only dropout before the first decoder layer needs that: elsewhere its
            result is not used, and drawing random numbers would change those of the layer.
    """

    def __init__(
        self, model: Any, *, blocks: str, head: str, attributes: Mapping[str, Any], trains: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.blocks = blocks
        self.head = head
        self.attributes = dict(attributes)
        self.trains = trains
        self.train()

    def train(self, mode: bool = True) -> Surroundings:
        """Set the mode as ``nn.Module`` does, where it matters."""
        super().train(mode and self.trains)
        return self

    def enter(self, embedded: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute what the first decoder layer is given, from embedded tokens."""
        args, kwargs = self._reach(0, embedded, inputs)
        return args[0] if args else kwargs["hidden_states"]  # type: ignore[no-any-return]

    @torch.no_grad()
    def call(self, block: int, hidden: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Call:
        """Find what the library calls decoder layer ``block`` with.

        Args:
            hidden: the layer's input.
            inputs: of the model beside the tokens, by the library's names.

        Returns:
            Positional and keyword arguments, ``hidden`` among them.
        """
        args, kwargs = self._reach(block, hidden.detach(), inputs)
        return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

    def logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Compute logits of what the model without its head gives.

        Args:
            head: stands for the library's output embedding.
        """
        base = self.model.base_model_prefix
        with _standing_in(self.model, {base: lambda *_, **__: _Output(hidden), self.head: head}):
            found: torch.Tensor = self.model(inputs_embeds=hidden, use_cache=False).logits
        return found

    def _reach(self, block: int, embedded: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Call:
        stand_ins = [*(_Passing(self.attributes) for _ in range(block)), _Noting(self.attributes)]
        try:
            with _standing_in(self.model.base_model, {self.blocks: stand_ins}):
                self.model.base_model(inputs_embeds=embedded, use_cache=False, **inputs)
        except _Reached as reached:
            return reached.call
        raise AssertionError(f"the library's model does not call its decoder layer {block}")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Surroundings:
        """Convert as ``nn.Module`` does, but for dtypes: the library keeps fp32 frequencies in a bf16 model.

        ``module.bfloat16()``, DeepSpeed's way, would round them, and angles at position 1000 would be wrong by more
        than a radian.
        """
        with keeping_dtypes(self, [name for name, _ in self.named_buffers()]):
            super()._apply(fn, recurse)
        return self


@contextmanager
def keeping_dtypes(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let buffers ``names`` of ``module`` have the values and dtypes that they have now, if they are converted."""
    exact = {name: module.get_buffer(name) for name in names}
    yield
    for name, buffer in exact.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        setattr(owner, leaf, buffer.to(getattr(owner, leaf).device))


class _Reached(Exception):
    """Ends the library's ``forward`` at a decoder layer."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class _StandIn:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        vars(self).update(attributes)


class _Passing(_StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class _Noting(_StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached((args, kwargs))


class _Output:
    """What the library's model without its head returns: nothing but hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _standing_in(module: nn.Module, parts: Mapping[str, Any]) -> Iterator[None]:
    """Let ``module`` have ``parts`` meanwhile, which are no modules."""
    vars(module).update(parts)
    try:
        yield
    finally:
        for name in parts:
            del vars(module)[name]
