"""Find experts and routers in the decoder layers of a transformers model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import TOP_K, experts_key
from ds_dynmo.models.huggingface.experts import keep_share
from ds_dynmo.models.huggingface.modules import RouterLoss
from ds_dynmo.models.huggingface.outline import Experts

__all__ = ["can_share", "find_experts", "find_router_loss"]

# What transformers' experts are called with: tokens, numbers of experts, their weights.
CALLS = (["hidden_states", "top_k_index", "top_k_weights"], ["hidden_states", "router_indices", "routing_weights"])
TOKENS = 11  # of a trial


def find_experts(config: Any, blocks: Sequence[nn.Module], label: str, *, parallel: bool) -> list[Experts | None]:
    """Describe the experts of each decoder layer; None: it has none.

    Raises:
        ConfigError: there are no experts to distribute over replicas (``parallel``).
    """
    found = [_experts_in(config, block, parallel) for block in blocks]
    if parallel and not any(found):
        known = "none whose call is known here" if experts_key(config) else "no experts"
        raise ConfigError(f"expert_parallel: {label}, model_type {config.model_type}, has {known} to share out")
    return found


def _experts_in(config: Any, block: nn.Module, parallel: bool) -> Experts | None:
    key = experts_key(config)
    top_k = None if key is None else getattr(config, TOP_K, None)
    if key is None or not isinstance(top_k, int):
        return None
    for path, module in block.named_modules():
        count = getattr(module, "num_experts", None)
        parameters = list(module.parameters())
        if (
            list(inspect.signature(module.forward).parameters) in CALLS
            and parameters
            and all(len(parameter) == count for parameter in parameters)
            and count == getattr(config, key)
        ):
            return Experts(path, count, top_k, key, parallel)
    return None


@torch.no_grad()
def can_share(model: Any, blocks: Sequence[nn.Module]) -> bool:
    """Find out whether experts give the same results where each has only the tokens that chose it, with weight 1."""
    for block, experts in zip(blocks, find_experts(model.config, blocks, "the model", parallel=True)):
        if experts is None:
            continue
        module, count = block.get_submodule(experts.path), experts.count
        hidden = torch.randn(TOKENS, model.config.hidden_size)
        chosen = torch.rand(TOKENS, count).topk(experts.top_k).indices
        weights = torch.rand(TOKENS, experts.top_k)
        expected, found = module(hidden, chosen, weights), torch.zeros_like(hidden)
        for share in (slice(0, count // 2), slice(count // 2, count)):
            part = copy.deepcopy(module)
            keep_share(part, share, count)
            tokens, places = ((chosen >= share.start) & (chosen < share.stop)).nonzero(as_tuple=True)
            numbers = (chosen[tokens, places] - share.start).unsqueeze(1)
            made = part(hidden[tokens], numbers, torch.ones(len(tokens), 1))
            found.index_add_(0, tokens, made * weights[tokens, places].unsqueeze(1))
        if not torch.allclose(expected, found, rtol=1e-4, atol=1e-5):
            return False
    return True


def find_router_loss(model: Any, blocks: Sequence[nn.Module], label: str) -> tuple[RouterLoss | None, list[bool]]:
    """Describe what routers add to the loss, None where the config does not ask for it, and which layers have one.

    Raises:
        ConfigError: the config asks for it, and it is not known what transformers would compute.
    """
    config = model.config
    none = [False] * len(blocks)
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not getattr(config, "output_router_logits", False) or not coefficient:
        return None, none
    record = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(record, "target_class", record)
    experts, top_k = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    paths = [_first_of(block, kind) for block in blocks] if isinstance(kind, type) else []
    routers = {path for path in paths if path is not None}
    if len(routers) != 1 or not isinstance(experts, int) or not isinstance(top_k, int):
        raise ConfigError(
            f"{label}: output_router_logits: model_type {config.model_type} has no router loss known here"
        )
    has = [path is not None for path in paths]
    return RouterLoss(experts, top_k, sum(has), coefficient, routers.pop(), getattr(record, "index", 0)), has


def _first_of(block: nn.Module, kind: type) -> str | None:
    return next((path for path, module in block.named_modules() if isinstance(module, kind)), None)
