"""Get each decoder layer's arguments by running transformers' ``forward`` with stub layers.

Masks, rotary tables, positions and whatever else a family hands to its layers are made by transformers' own code, once
per stage and micro-batch: a stub in place of each decoder layer records what it is called with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ds_dynmo.models.huggingface.initializing import check_set, drawing_from, unset
from ds_dynmo.models.huggingface.outline import Outline
from ds_dynmo.stage_work import work_of_the_stage
from ds_dynmo.torch_private import children_of, version_of

__all__ = ["Arguments", "StubbedModel", "with_hidden"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional ones, and those by name
Inputs = Mapping[str, torch.Tensor]  # of a model beside the tokens, by transformers' names

_CPU = torch.device("cpu")


class StubbedModel:
    """Transformers' model without weights: stubs stand for its decoder layers, nothing for its other parts.

    All layers of a rank share one. It is an argument of their LayerSpecs and no part of their state: it is neither
    converted, saved nor moved, and a layer that comes from another rank finds this rank's.

    Args:
        skeleton: transformers' model on the "meta" device.
        outline: where its parts are.
        seed: of what transformers may draw when it initializes modules without weights.
    """

    def __init__(self, skeleton: Any, outline: Outline, seed: int) -> None:
        self._skeleton, self._outline, self._seed = skeleton, outline, seed
        self._model: Any = None  # built when it is first needed
        self._device = _CPU
        self._latest: _MicroBatch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._skeleton, self._outline, self._seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> StubbedModel:
        """Copy the model without what was made for a micro-batch: a copy of a layer may run on another thread."""
        twin = type(self)(self._skeleton, self._outline, self._seed)
        vars(twin).update(_model=copy.deepcopy(self._model, memo), _device=self._device)
        return twin

    def arguments(self, block: int, hidden: torch.Tensor, inputs: Inputs) -> Arguments:
        """Return what transformers calls decoder layer ``block`` with.

        The arguments of all decoder layers are made at once, and kept until a micro-batch comes for which they would
        be others. They do not depend on the values of hidden states: NaN stands for these.

        Args:
            hidden: the layer's input, one of its arguments.
        """
        latest = self._latest
        if latest is None or not latest.has(hidden, inputs):
            nothing = hidden.new_full((), math.nan).expand(hidden.shape)
            with work_of_the_stage(), torch.no_grad():
                arguments = self._run(nothing, inputs, training=False)
            latest = self._latest = _MicroBatch.of(hidden, inputs, arguments)
        return with_hidden(latest.arguments[block], hidden)

    def enter(self, embedded: torch.Tensor, inputs: Inputs, *, training: bool) -> torch.Tensor:
        """Compute the first decoder layer's input from embedded tokens; in training there may be dropout."""
        args, kwargs = self._run(embedded, inputs, training=training)[0]
        return args[0] if args else kwargs["hidden_states"]  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Compute logits from what the final norm gives.

        Args:
            head: stands for transformers' output embedding.
        """
        model = self._on(hidden.device, training=False)
        parts = {model.base_model_prefix: lambda *_, **__: _LastHiddenState(hidden), self._outline.head: head}
        with _standing_in(model, parts):
            found: torch.Tensor = model(inputs_embeds=hidden, use_cache=False).logits
        return found

    def _run(self, embedded: torch.Tensor, inputs: Inputs, *, training: bool) -> list[Arguments]:
        """Run ``forward`` up to the last decoder layer, and return what each is called with."""
        base = self._on(embedded.device, training=training).base_model
        calls: list[Arguments] = []
        last = self._outline.num_blocks - 1
        stubs = [_Stub(known, calls, block, block == last) for block, known in enumerate(self._attributes)]
        try:
            with _standing_in(base, {self._outline.blocks: stubs}):
                base(inputs_embeds=embedded, use_cache=False, **inputs)
        except _Reached:
            return calls
        except Exception as error:
            if not calls:
                raise
            raise TypeError(f"a decoder layer gives more than hidden states to transformers' model: {error}") from error
        raise AssertionError(f"transformers' model calls {len(calls)} of {len(stubs)} decoder layers")

    def _on(self, device: torch.device, *, training: bool) -> Any:
        """Return transformers' model on ``device``, in this mode.

        Its buffers have the dtypes of transformers' fp32 model whatever the layers are converted to, as frequencies
        have in transformers' bf16 model: rounded ones would be wrong by more than a radian at position 1000.
        """
        if self._model is None:
            with torch.inference_mode(False), torch.no_grad(), _CPU:
                self._model = _without_parts(self._skeleton, self._outline, self._seed)
        if self._device != device:
            self._model, self._device = self._model.to(device), device
        if self._model.training != training:
            self._model.train(training)
        return self._model

    @cached_property
    def _attributes(self) -> list[dict[str, Any]]:
        """Per decoder layer, numbers and strings that ``forward`` may read from it."""
        blocks = getattr(self._skeleton.base_model, self._outline.blocks)
        return [{name: value for name, value in vars(block).items() if _is_plain(name, value)} for block in blocks]


@dataclass(frozen=True)
class _MicroBatch:
    """The arguments of all decoder layers, and what they depend on.

    Attributes:
        about: of hidden states, and torch's modes.
        inputs: with their versions. While they are kept, their memory is not given to others.
        arguments: by decoder layer, without hidden states.
    """

    about: tuple[Any, ...]
    inputs: tuple[tuple[torch.Tensor, int | None], ...]
    arguments: list[Arguments]

    @classmethod
    def of(cls, hidden: torch.Tensor, inputs: Inputs, arguments: list[Arguments]) -> _MicroBatch:
        kept = tuple((tensor.detach(), _version(tensor)) for tensor in inputs.values())
        return cls(_about(hidden), kept, [with_hidden(each, None) for each in arguments])

    def has(self, hidden: torch.Tensor, inputs: Inputs) -> bool:
        """Return whether these are the arguments for ``hidden`` and ``inputs``.

        The memory of inputs counts: activation checkpointing makes new tensors around it.
        """
        return self.about == _about(hidden) and all(
            version is not None and tensor.is_set_to(kept) and _version(tensor) == version
            for tensor, (kept, version) in zip(inputs.values(), self.inputs, strict=True)
        )


def with_hidden(arguments: Arguments, hidden: torch.Tensor | None) -> Arguments:
    """Replace the hidden states among the arguments of a decoder layer."""
    args, kwargs = arguments
    return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})


def _about(hidden: torch.Tensor) -> tuple[Any, ...]:
    kind = hidden.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return hidden.shape, hidden.dtype, hidden.device, autocast, torch.is_inference_mode_enabled()


def _version(tensor: torch.Tensor) -> int | None:
    """Count the changes in place of a tensor; None: torch does not."""
    return None if tensor.is_inference() else version_of(tensor)


def _without_parts(skeleton: Any, outline: Outline, seed: int) -> Any:
    """Build transformers' model on the CPU, with None in place of every part that has weights."""
    config = copy.deepcopy(skeleton.config)
    config.use_cache = False
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    blocks = getattr(skeleton.base_model, outline.blocks)
    parts = {id(skeleton.get_submodule(path)): None for path in outline.paths}
    model = copy.deepcopy(skeleton, {id(skeleton.config): config, id(blocks): None, **parts})
    for module, name in ((model.base_model, outline.blocks), (model, outline.head)):
        del children_of(module)[name]
    if outline.first_block > 1:
        owner, _, name = outline.paths[1].rpartition(".")
        setattr(model.get_submodule(owner), name, _NoPositions())
    model.to_empty(device=_CPU)
    unset(model.buffers())
    with drawing_from("layer", seed, 0):
        model.apply(skeleton._init_weights)
    check_set("the model", dict(model.named_buffers()))
    return model.eval()


def _is_plain(name: str, value: Any) -> bool:
    return not name.startswith("_") and (value is None or type(value) in (bool, int, float, str))


class _Reached(Exception):
    """Ends transformers' ``forward`` at its last decoder layer."""


class _Stub:
    """Stands for a decoder layer: records what it is called with, and returns the hidden states of that.

    Args:
        attributes: of the layer, which ``forward`` may read.
        calls: of the stubs before; gets one more.
        block: the layer's number.
        is_last: whether ``forward`` ends here.
    """

    def __init__(self, attributes: Mapping[str, Any], calls: list[Arguments], block: int, is_last: bool) -> None:
        vars(self).update(attributes)
        self._calls, self._block, self._is_last = calls, block, is_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert len(self._calls) == self._block, "transformers' model calls decoder layers in another order"
        self._calls.append((args, kwargs))
        if self._is_last:
            raise _Reached
        return args[0] if args else kwargs["hidden_states"]


class _LastHiddenState:
    """What transformers' model without its head returns: nothing but hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _NoPositions(nn.Module):
    """Stands for learned positions, which are a pipeline layer of their own."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


@contextmanager
def _standing_in(module: nn.Module, parts: Mapping[str, Any]) -> Iterator[None]:
    """Let ``module`` have ``parts`` meanwhile, which are no modules."""
    vars(module).update(parts)
    try:
        yield
    finally:
        for name in parts:
            del vars(module)[name]
