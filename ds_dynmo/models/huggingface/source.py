"""A model of the library's without memory, and how pipeline layers get their parts of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import plan_of
from ds_dynmo.models.huggingface.experts import Experts
from ds_dynmo.models.huggingface.lora import Adapters
from ds_dynmo.models.huggingface.surroundings import Surroundings
from ds_dynmo.models.huggingface.weights import Stored, Tensors
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.torch_private import children_of

__all__ = ["Outline", "Source", "outline_of"]

_CPU = torch.device("cpu")
_INITIALIZED = "_is_hf_initialized"  # the library initializes no tensor that has it


@dataclass(frozen=True)
class Outline:
    """Where the library keeps the parts of a model.

    Attributes:
        paths: per pipeline layer, of its part; a tied head has the last one.
        blocks: name of the list of decoder layers in the model without its head.
        first_block: the pipeline layer of the first decoder layer.
        num_blocks: decoder layers.
        tied: are embedding and head one weight?
    """

    paths: tuple[str, ...]
    blocks: str
    first_block: int
    num_blocks: int
    tied: bool

    @property
    def num_layers(self) -> int:
        """Pipeline layers with weights of their own."""
        return len(self.paths) - self.tied

    @property
    def head(self) -> str:
        """Name of the output embedding in the model."""
        return self.paths[-1]


def outline_of(model: Any, place: str) -> Outline:
    """Find the parts that the library declares.

    Raises:
        ConfigError: they are not embedding, decoder layers and norm, or not all that has weights.
    """
    base, names = model.base_model, plan_of(model.config)
    modules: list[Any] = [getattr(base, name, None) for name in names]
    lists = [name for name, part in zip(names, modules) if isinstance(part, nn.ModuleList)]
    if len(lists) != 1 or None in modules or model.get_output_embeddings() is None:
        raise ConfigError(f"{place}: model_type {model.config.model_type}: its parts {', '.join(names)} are no chain")
    blocks = getattr(base, lists[0])
    at = names.index(lists[0])
    before = [part for part in modules[:at] if any(True for _ in part.parameters())]
    chain = [*before, *blocks, *modules[at + 1 :], model.get_output_embeddings()]
    path = {id(module): name for name, module in model.named_modules()}
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    found = Outline(tuple(path[id(part)] for part in chain), lists[0], len(before), len(blocks), tied)
    inside = tuple(f"{one}." for one in found.paths)
    outside = [name for name in model.state_dict() if not name.startswith(inside)]
    if tied:  # a tied layer has the tied weight alone
        outside += [f"{path}.{name}" for path in found.paths[:: len(chain) - 1] for name in _beside_weight(model, path)]
    owners: dict[int, set[str]] = {}
    for one in found.paths[: found.num_layers]:
        for parameter in model.get_submodule(one).parameters():
            owners.setdefault(id(parameter), set()).add(one)
    shared = next((sorted(paths) for paths in owners.values() if len(paths) > 1), None)
    if shared is not None:
        pair = " and ".join(shared[:2])
        raise ConfigError(f"{place}: model_type {model.config.model_type} is no chain of layers: {pair} share weights")
    if outside or len(modules) != at + 2 or before[:1] != [model.get_input_embeddings()]:
        weights = f"weights of no layer: {', '.join(outside[:3])}" if outside else f"parts {', '.join(names)}"
        raise ConfigError(f"{place}: model_type {model.config.model_type} is no chain of layers: it has {weights}")
    return found


def _beside_weight(model: Any, path: str) -> list[str]:
    return [name for name in model.get_submodule(path).state_dict() if name != "weight"]


@dataclass(frozen=True)
class Source:
    """A model of the library's without memory, and where the weights of its parts come from.

    Attributes:
        skeleton: the library's model on the "meta" device.
        outline: where its parts are.
        inputs: of the model beside the tokens.
        tensors: None for fresh weights.
        places: where a tensor of the model is among ``tensors``; None: under its own name.
        experts: per decoder layer, if it has any.
        trainable: ``requires_grad`` by the library's name; where it says nothing, as the library builds the parameter.
        exact: buffers that the library keeps in fp32 in a bf16 model.
        has_entry, has_exit: does the library's model compute something between its embedding and its first decoder
            layer, or around its output embedding?
        adapters: None: parts are the library's alone.
    """

    skeleton: Any
    outline: Outline
    inputs: tuple[str, ...]
    tensors: Tensors | None
    places: Mapping[str, Stored] | None
    experts: tuple[Experts | None, ...]
    seed: int
    trainable: Mapping[str, bool]
    exact: tuple[str, ...] = ()
    has_entry: bool = False
    has_exit: bool = False
    adapters: Adapters | None = None

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
        """Are embedding and head one weight?"""
        return self.outline.tied

    @property
    def positions(self) -> int | None:
        """See :class:`~ds_dynmo.models.huggingface.modules.Parts`."""
        found = getattr(self.config, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @property
    def reads_later(self) -> bool:
        """See :class:`~ds_dynmo.models.huggingface.experts.PartsWithExperts`; fresh weights are drawn together."""
        return self.tensors is not None and any(one is not None and one.parallel for one in self.experts)

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """List what is saved of pipeline layer ``layer``, by the names in the library's module."""
        part = self.skeleton.get_submodule(self.outline.paths[layer])
        return {name: tuple(tensor.shape) for name, tensor in part.state_dict().items()}

    def of(self, layer: int) -> Source:
        """Narrow this to pipeline layer ``layer``, so that its spec keeps no other layer's weights alive."""
        adapters = None if self.adapters is None else self.adapters.of(self.outline.paths[layer])
        if self.tensors is None:
            return replace(self, adapters=adapters)
        places = {name: self._place(layer, name) for name in self.shapes(layer)}
        names = [name for place in places.values() for name in place.names]
        kept = {place.target: place for place in places.values()}
        return replace(
            self, tensors=self.tensors.only(names), places=None if self.places is None else kept, adapters=adapters
        )

    def build(self, layer: int) -> nn.Module:
        """Build the library's module of pipeline layer ``layer`` with its weights and adapters, on the CPU."""
        part, path = self.build_base(layer), self.outline.paths[layer]
        if self.adapters is None:
            return part
        return self.adapters.into(part, path, lambda: self._generator(layer, "adapter"))

    def build_base(self, layer: int) -> nn.Module:
        """Build it without adapters."""
        config, path = self.config, self.outline.paths[layer]
        part: nn.Module = copy.deepcopy(self.skeleton.get_submodule(path), {id(config): config})
        part.to_empty(device=_CPU).train()
        if self.tensors is None:
            _unset((*part.parameters(), *part.buffers()))
            with self._generator(layer):
                part.apply(self.skeleton._init_weights)
            _check_set(path, {**dict(part.named_parameters()), **dict(part.named_buffers())})
        else:
            _unset(part.buffers())
            self._read(part, layer, self.tensors)
            _check_set(path, dict(part.named_buffers()))
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(self.trainable.get(f"{path}.{name}", parameter.requires_grad))
        return part

    def read_experts(self, part: nn.Module, layer: int, share: slice) -> None:
        """See :class:`~ds_dynmo.models.huggingface.experts.PartsWithExperts`."""
        experts = self._experts_of(layer)
        assert self.tensors is not None and experts is not None
        for name, parameter in part.get_submodule(experts.path).named_parameters():
            place = self._place(layer, f"{experts.path}.{name}").of_experts(share, experts.count)
            value = place.value(self.tensors.read(place.names), self.skeleton)
            if len(value) == experts.count:
                value = value[share]
            own = torch.empty_like(parameter[share], memory_format=torch.contiguous_format)
            parameter.data = own.copy_(value)

    def exact_buffers(self, layer: int) -> list[str]:
        """See :class:`~ds_dynmo.models.huggingface.modules.Parts`."""
        prefix = f"{self.outline.paths[layer]}."
        return [name.removeprefix(prefix) for name in self.exact if name.startswith(prefix)]

    def around_embedding(self) -> Surroundings | None:
        """See :class:`~ds_dynmo.models.huggingface.modules.Parts`."""
        return self.around(0, trains=True) if self.has_entry else None

    def around_block(self, block: int) -> Surroundings:
        """See :class:`~ds_dynmo.models.huggingface.modules.Parts`."""
        return self.around(block)

    def around_head(self) -> Surroundings | None:
        """See :class:`~ds_dynmo.models.huggingface.modules.Parts`."""
        return self.around(0) if self.has_exit else None

    def around(self, block: int, *, trains: bool = False) -> Surroundings:
        """Build what is around decoder layer ``block``, embedding and head, on the CPU."""
        skeleton, outline = self.skeleton, self.outline
        config = copy.deepcopy(self.config)
        config.use_cache = False
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
        blocks = self.blocks
        parts = {id(skeleton.get_submodule(path)): None for path in outline.paths}
        model = copy.deepcopy(skeleton, {id(self.config): config, id(blocks): None, **parts})
        for module, name in ((model.base_model, outline.blocks), (model, outline.head)):
            del children_of(module)[name]
        learned = outline.paths[1] if outline.first_block > 1 else None
        if learned is not None:
            owner, _, name = learned.rpartition(".")
            setattr(model.get_submodule(owner), name, _Nothing())
        model.to_empty(device=_CPU)
        _unset(model.buffers())
        with self._generator(0), torch.no_grad():
            model.apply(skeleton._init_weights)
        _check_set("the model", dict(model.named_buffers()))
        plain = {k: v for k, v in vars(blocks[block]).items() if v is None or type(v) in (bool, int, float, str)}
        attributes = {name: value for name, value in plain.items() if not name.startswith("_")}
        return Surroundings(model, blocks=outline.blocks, head=outline.head, attributes=attributes, trains=trains)

    def _experts_of(self, layer: int) -> Experts | None:
        block = layer - self.outline.first_block
        return self.experts[block] if 0 <= block < len(self.experts) else None

    def _place(self, layer: int, name: str) -> Stored:
        target = f"{self.outline.paths[layer]}.{name}"
        return Stored(target, (target,)) if self.places is None else self.places[target]

    @contextmanager
    def _generator(self, layer: int, what: str = "layer") -> Iterator[None]:
        """Draw from the layer's generator meanwhile: the library draws from torch's, whose state is put back."""
        state = torch.get_rng_state()
        torch.set_rng_state(generator_for(what, self.seed, layer).get_state())
        try:
            yield
        finally:
            torch.set_rng_state(state)

    def _read(self, part: nn.Module, layer: int, tensors: Tensors) -> None:
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
                place = self._place(layer, name)
                value.detach().copy_(place.value(tensors.read(place.names), self.skeleton))

    def _compute_buffers(self, part: nn.Module) -> None:
        """Let the library compute what is in no file."""
        saved = list(part.state_dict(keep_vars=True).values())
        for tensor in saved:
            setattr(tensor, _INITIALIZED, True)
        with self._generator(0), torch.no_grad():
            part.apply(self.skeleton._init_weights)
        for tensor in saved:
            delattr(tensor, _INITIALIZED)


def _unset(tensors: Iterable[torch.Tensor]) -> None:
    """Mark what nobody has given a value: memory may hold numbers that look right."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.detach().fill_(math.nan)


def _check_set(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ConfigError(f"{path}.{name}: transformers gives no value to it: only a file of weights could")


class _Nothing(nn.Module):
    """Stands for learned positions, which are a pipeline layer of their own."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)
