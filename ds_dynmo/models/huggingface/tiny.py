"""Derive a tiny model of the same kind from a transformers config."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ds_dynmo.models.huggingface.configs import EXPERTS, differs_by_layer

__all__ = ["count_kinds", "first_of_kind", "tiny_config"]

VOCABULARY = 32  # fewer than a trial has tokens
POSITIONS = 32  # at least: a trial has fewer tokens
WINDOW = 7  # tokens, fewer than a trial has
LAYERS = 3  # at least, where the model has so many
WIDTH = 32  # of feed-forward parts and experts
HIDDEN = 64  # where heads have a width of their own
NUM_EXPERTS = 8
CHOSEN = 2

_WINDOWS = ("sliding_window", "attention_chunk_size", "keep_window_size", "index_topk")  # in tokens
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k", "moe_k")


def tiny_config(config: Any, blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """Shrink the sizes of ``config``, and keep what its model computes: kinds of layers, scales, positions, dropout.

    Widths of heads stay, because positions depend on them; there are fewer heads, layers, experts and tokens.

    Args:
        blocks: the decoder layers of its model; the first are kept, up to the first one of the last kind.

    Raises:
        ValueError: there is no such config.
    """
    if differs_by_layer(config):
        raise ValueError("sizes differ from layer to layer")
    library_names = {own: name for name, own in config.attribute_map.items()}
    own_values = copy.deepcopy(config.to_dict())
    values: dict[str, Any] = {library_names.get(key, key): value for key, value in own_values.items()}
    values["dtype"] = "float32"
    values["vocab_size"] = VOCABULARY
    _shrink_layers(values, blocks)
    _shrink_heads(values, config)
    _shrink_experts(values)
    for key, value in values.items():
        if key.endswith("token_id"):
            values[key] = _token(value)
        elif key in _WINDOWS and isinstance(value, int):
            values[key] = min(value, WINDOW)
        elif key == "router_aux_loss_coef" and value:
            values[key] = 1.0  # a small one would hide a wrong router loss
        elif key == "max_position_embeddings" and isinstance(value, int):
            values[key] = max(value, POSITIONS)
        elif "intermediate_size" in key or key in ("ffn_hidden_size", "ffn_dim"):
            values[key] = [WIDTH] * len(value) if isinstance(value, list) else WIDTH if value else value
    return {config.attribute_map.get(key, key): value for key, value in values.items()}


def _token(value: Any) -> Any:
    """Keep special tokens within the vocabulary."""
    if isinstance(value, list):
        return [_token(one) for one in value]
    return value if not isinstance(value, int) or value < VOCABULARY else VOCABULARY - 1


def _shrink_layers(values: dict[str, Any], blocks: Sequence[nn.Module]) -> None:
    layers = len(blocks)
    kept = min(max(_first_of_last_kind(blocks) + 1, LAYERS), layers)
    for key, value in values.items():
        if isinstance(value, list) and len(value) == layers:
            values[key] = value[:kept]
    values["num_hidden_layers" if "num_hidden_layers" in values else "num_layers"] = kept


def count_kinds(blocks: Sequence[nn.Module]) -> int:
    """Count the decoder layers that differ in their modules, or in what is on, off, named or absent in these."""
    return len({*first_of_kind(blocks)})


def first_of_kind(blocks: Sequence[nn.Module]) -> list[int]:
    """Find for each decoder layer the first one of its kind, as :func:`count_kinds` tells them apart."""
    kinds = [frozenset(_facts(block).items()) for block in blocks]
    return [kinds.index(kind) for kind in kinds]


def _first_of_last_kind(blocks: Sequence[nn.Module]) -> int:
    """Find the first layer of the kind that begins last; here layers with other numbers differ too.

    What has another value in every layer, such as the layer's number, makes no kind.
    """
    facts = [_facts(block, numbers=True) for block in blocks]
    values: dict[Any, set[Any]] = {}
    for one in facts:
        for key, value in one.items():
            values.setdefault(key, set()).add(value)
    kinds = [frozenset((key, value) for key, value in one.items() if len(values[key]) < len(blocks)) for one in facts]
    return max(kinds.index(kind) for kind in {*kinds})


def _facts(block: nn.Module, *, numbers: bool = False) -> Mapping[tuple[str, str], Any]:
    kept = (bool, str, type(None), *((int, float) if numbers else ()))
    facts: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        facts[path, ""] = type(module)
        facts.update({(path, name): value for name, value in vars(module).items() if type(value) in kept})
    return facts


def _shrink_heads(values: dict[str, Any], config: Any) -> None:
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    own_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    fewer = 2 if groups in (None, heads) else 4
    values["num_attention_heads"] = fewer
    if groups is not None:
        values["num_key_value_heads"] = fewer if groups == heads else 1 if groups == 1 else 2
    keys, linear = values.get("linear_num_key_heads"), ("linear_num_heads", "linear_num_key_heads")
    for key in linear:  # of linear attention
        if isinstance(values.get(key), int):
            values[key] = 2
    if isinstance(keys, int):
        values["linear_num_value_heads"] = 2 if values["linear_num_value_heads"] == keys else 4
    is_split = own_width * heads == config.hidden_size  # by the heads, as some models need it
    values["hidden_size"] = fewer * own_width if is_split else HIDDEN


def _shrink_experts(values: dict[str, Any]) -> None:
    for key in EXPERTS:
        if isinstance(values.get(key), int) and values[key] > NUM_EXPERTS:
            values[key] = NUM_EXPERTS
    for key in _CHOSEN:
        if isinstance(values.get(key), int) and values[key] > CHOSEN:
            values[key] = CHOSEN
    if isinstance(values.get("n_group"), int) and values["n_group"] > 1:
        values["n_group"], values["topk_group"] = 2, 1
