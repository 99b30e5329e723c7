"""Find the parts of a transformers model that become pipeline layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import plan_of

__all__ = ["Experts", "Outline", "outline_of"]


@dataclass(frozen=True)
class Experts:
    """The experts of a transformers decoder layer.

    Attributes:
        path: of their module in the decoder layer. It is called with tokens ``[tokens, hidden]``, and, ``[tokens,
            top_k]`` each, the numbers and weights of the experts that they chose. Its parameters are
            ``[experts, ...]``, and it reads how many it has from ``num_experts``.
        count: experts of a layer.
        top_k: experts that a token is sent to.
        key: of the config, for ``count``.
        parallel: whether the data-parallel replicas of a stage share them.
    """

    path: str
    count: int
    top_k: int
    key: str
    parallel: bool


@dataclass(frozen=True)
class Outline:
    """Where transformers keeps the parts of a model.

    Attributes:
        paths: per pipeline layer, of its part; a tied head has the last one.
        blocks: name of the list of decoder layers in the model without its head.
        first_block: the pipeline layer of the first decoder layer.
        num_blocks: decoder layers.
        tied: whether embedding and head are one weight.
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


def outline_of(model: Any, label: str) -> Outline:
    """Find the parts that transformers declares.

    Raises:
        ConfigError: they are not embedding, decoder layers and norm, or not all that has weights.
    """
    base, names = model.base_model, plan_of(model.config)
    modules: list[Any] = [getattr(base, name, None) for name in names]
    lists = [name for name, part in zip(names, modules) if isinstance(part, nn.ModuleList)]
    if len(lists) != 1 or None in modules or model.get_output_embeddings() is None:
        raise ConfigError(f"{label}: model_type {model.config.model_type}: its parts {', '.join(names)} are no chain")
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
        raise ConfigError(f"{label}: model_type {model.config.model_type} is no chain of layers: {pair} share weights")
    if outside or len(modules) != at + 2 or before[:1] != [model.get_input_embeddings()]:
        weights = f"weights of no layer: {', '.join(outside[:3])}" if outside else f"parts {', '.join(names)}"
        raise ConfigError(f"{label}: model_type {model.config.model_type} is no chain of layers: it has {weights}")
    return found


def _beside_weight(model: Any, path: str) -> list[str]:
    return [name for name in model.get_submodule(path).state_dict() if name != "weight"]
