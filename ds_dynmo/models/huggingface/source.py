"""A transformers model without memory, and how pipeline layers get their parts of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.models.huggingface.halves import Halves
from ds_dynmo.models.huggingface.initializing import check_set, drawing_from, unset
from ds_dynmo.models.huggingface.lora import Adapters
from ds_dynmo.models.huggingface.outline import Experts, Outline
from ds_dynmo.models.huggingface.shares import Share
from ds_dynmo.models.huggingface.stubbed_model import StubbedModel
from ds_dynmo.models.huggingface.weights import Stored, Tensors
from ds_dynmo.models.pruning.config import PruningConfig

__all__ = ["Source"]

_CPU = torch.device("cpu")
_INITIALIZED = "_is_hf_initialized"  # transformers initializes no tensor that has it


@dataclass(frozen=True)
class Source:
    """A transformers model without memory, and where the weights of its parts come from.

    Attributes:
        skeleton: transformers' model on the "meta" device.
        outline: where its parts are.
        stubbed: transformers' model around its parts.
        inputs: of the model beside the tokens, in the order in which they follow those.
        tensors: None for fresh weights.
        stored_tensors: per tensor of the model, those in ``tensors`` that it is made of; None: the one of its name.
        experts: per decoder layer, if it has any.
        trainable: ``requires_grad`` by transformers' name; where it says nothing, as transformers builds the parameter.
        exact: buffers that transformers keeps in fp32 in a bf16 model.
        has_input_transform: whether transformers' model computes something between its embedding and its first decoder
            layer.
        has_output_transform: whether it computes something around its output embedding.
        adapters: None: parts are transformers' alone.
        slices: of the vocabulary, each a layer of the pipeline at both ends; 0: it is whole.
        halves: per decoder layer, each half a layer of the pipeline; empty: decoder layers are whole.
        pruning: how decoder layers can be pruned; None: they cannot.
        untied: whether the head gets a copy of the embedding's weights, which are its own in the model as it is given.
    """

    skeleton: Any
    outline: Outline
    stubbed: StubbedModel
    inputs: tuple[str, ...]
    tensors: Tensors | None
    stored_tensors: Mapping[str, Stored] | None
    experts: tuple[Experts | None, ...]
    seed: int
    trainable: Mapping[str, bool]
    exact: tuple[str, ...] = ()
    has_input_transform: bool = False
    has_output_transform: bool = False
    adapters: Adapters | None = None
    slices: int = 0
    halves: tuple[Halves, ...] = ()
    pruning: PruningConfig | None = None
    untied: bool = False

    @property
    def config(self) -> Any:
        return self.skeleton.config

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The decoder layers, without memory."""
        found: Sequence[nn.Module] = getattr(self.skeleton.base_model, self.outline.blocks)
        return found

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one weight."""
        return self.outline.tied

    @property
    def positions(self) -> int | None:
        """Tokens that a sequence may have; None: any number."""
        found = getattr(self.config, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @property
    def reads_later(self) -> bool:
        """Whether :meth:`build` leaves experts without weights and memory, for :meth:`read_experts`; not if fresh."""
        return self.tensors is not None and any(one is not None and one.parallel for one in self.experts)

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """List what is saved of pipeline layer ``layer``, by the names in transformers' module."""
        part = self.skeleton.get_submodule(self.outline.paths[layer])
        return {name: tuple(tensor.shape) for name, tensor in part.state_dict().items()}

    def places(self, layer: int) -> range:
        """Return the numbers in the pipeline's list of what part ``layer`` is there: one, or one per slice or half."""
        first, count = (sum(map(self._num_places, parts)) for parts in (range(layer), (layer,)))
        return range(first, first + count)

    def is_block(self, layer: int) -> bool:
        """Return whether part ``layer`` is a decoder layer."""
        return 0 <= layer - self.outline.first_block < self.outline.num_blocks

    def _num_places(self, layer: int) -> int:
        if layer in (0, len(self.outline.paths) - 1):
            return max(self.slices, 1)
        return 2 if self.halves and self.is_block(layer) else 1

    def of(self, layer: int) -> Source:
        """Narrow this to part ``layer``, so that its spec keeps no other layer's weights alive."""
        adapters = None if self.adapters is None else self.adapters.of(self.outline.paths[layer])
        if self.tensors is None:
            return replace(self, adapters=adapters)
        stored = [self._stored(layer, name) for name in self.shapes(layer)]
        tensors = self.tensors.only([name for one in stored for name in one.names])
        of_layer = None if self.stored_tensors is None else {one.target: one for one in stored}
        return replace(self, tensors=tensors, stored_tensors=of_layer, adapters=adapters)

    def build(self, layer: int, share: Share | None = None) -> nn.Module:
        """Build transformers' module of pipeline layer ``layer`` with its weights and adapters, on the CPU.

        Args:
            share: what is built and read of it; None: all. Fresh weights are drawn whole, as a seed says.
        """
        part, path = self.build_base(layer, share), self.outline.paths[layer]
        if self.adapters is None:
            return part
        return self.adapters.into(part, path, share, lambda: drawing_from("adapter", self.seed, layer))

    def build_base(self, layer: int, share: Share | None = None) -> nn.Module:
        """Build it without adapters."""
        config, path = self.config, self.outline.paths[layer]
        part: nn.Module = copy.deepcopy(self.skeleton.get_submodule(path), {id(config): config})
        if share is not None and self.tensors is not None:
            part = share.of(part)
        part.to_empty(device=_CPU).train()
        if self.tensors is None:
            unset((*part.parameters(), *part.buffers()))
            with drawing_from("layer", self.seed, layer):
                part.apply(self.skeleton._init_weights)
            if self.untied and path == self.outline.head:
                part.get_parameter("weight").data.copy_(self.build_base(0).get_parameter("weight").detach())
            check_set(path, {**dict(part.named_parameters()), **dict(part.named_buffers())})
            part = part if share is None else share.of(part)
        else:
            unset(part.buffers())
            self._read(part, layer, self.tensors, None if share is None else share.rows)
            check_set(path, dict(part.named_buffers()))
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(self.trainable.get(f"{path}.{name}", parameter.requires_grad))
        return part

    def read_experts(self, part: nn.Module, layer: int, share: slice) -> None:
        """Read the weights of ``share`` of all experts into ``part``, pipeline layer ``layer``."""
        experts = self._experts_of(layer)
        assert self.tensors is not None and experts is not None
        for name, parameter in part.get_submodule(experts.path).named_parameters():
            stored = self._stored(layer, f"{experts.path}.{name}").of_experts(share, experts.count)
            value = stored.value(self.tensors.read(stored.names), self.skeleton)
            if len(value) == experts.count:
                value = value[share]
            own = torch.empty_like(parameter[share], memory_format=torch.contiguous_format)
            parameter.data = own.copy_(value)

    def exact_buffers(self, layer: int) -> list[str]:
        """List the buffers of pipeline layer ``layer``, by transformers' names, that are fp32 in its bf16 model."""
        prefix = f"{self.outline.paths[layer]}."
        return [name.removeprefix(prefix) for name in self.exact if name.startswith(prefix)]

    def _experts_of(self, layer: int) -> Experts | None:
        return self.experts[layer - self.outline.first_block] if self.is_block(layer) else None

    def _stored(self, layer: int, name: str) -> Stored:
        target = f"{self.outline.paths[layer]}.{name}"
        return Stored(target, (target,)) if self.stored_tensors is None else self.stored_tensors[target]

    def _read(self, part: nn.Module, layer: int, tensors: Tensors, rows: range | None) -> None:
        if next(part.buffers(), None) is not None:
            self._compute_buffers(part)
        experts = self._experts_of(layer)
        later = f"{experts.path}." if self.reads_later and experts is not None else None
        parameters = dict(part.named_parameters())
        for name, value in part.state_dict(keep_vars=True).items():
            if later is not None and name.startswith(later):
                parameter = parameters[name]
                parameter.data = parameter.new_empty(()).expand(parameter.shape)  # no memory
            else:
                stored = self._stored(layer, name)
                whole = stored.value(tensors.read(stored.names), self.skeleton)  # of a file, no page yet
                value.detach().copy_(whole if rows is None else whole[rows.start : rows.stop])

    def _compute_buffers(self, part: nn.Module) -> None:
        """Let transformers compute what is in no file."""
        saved = list(part.state_dict(keep_vars=True).values())
        for tensor in saved:
            setattr(tensor, _INITIALIZED, True)
        with drawing_from("layer", self.seed, 0), torch.no_grad():
            part.apply(self.skeleton._init_weights)
        for tensor in saved:
            delattr(tensor, _INITIALIZED)
