"""Derive a tiny model of the same kind from a config of the library's."""

from __future__ import annotations

import copy
from typing import Any

from ds_dynmo.models.huggingface.configs import EXPERTS

__all__ = ["tiny_config"]

VOCABULARY = 96
POSITIONS = 32  # at least: a trial has fewer tokens
WINDOW = 7  # tokens, fewer than a trial has
LAYERS = 12  # at most, to have every kind of layer
WIDTH = 32  # of feed-forward parts and experts
HIDDEN = 64  # where heads have a width of their own
NUM_EXPERTS = 8
CHOSEN = 2

_WINDOWS = ("sliding_window", "attention_chunk_size")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k", "moe_k")
_KINDS = ("layer_types", "mlp_layer_types")  # a list of what each layer is


def tiny_config(config: Any) -> dict[str, Any]:
    """Shrink the sizes of ``config``, and keep what its model computes: kinds of layers, scales, positions.

    Widths of heads stay, because positions depend on them; there are fewer heads, layers, experts and tokens.
    """
    library_names = {own: name for name, own in config.attribute_map.items()}
    own_values = copy.deepcopy(config.to_dict())
    values: dict[str, Any] = {library_names.get(key, key): value for key, value in own_values.items()}
    values["dtype"] = "float32"
    values["vocab_size"] = VOCABULARY
    _shrink_layers(values, config)
    _shrink_heads(values, config)
    _shrink_experts(values)
    for key, value in values.items():
        if key.endswith("token_id"):
            values[key] = _token(value)
        elif key.endswith(("dropout", "pdrop", "jitter_noise")) and isinstance(value, float):
            values[key] = 0.0
        elif key in _WINDOWS and isinstance(value, int):
            values[key] = min(value, WINDOW)
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


def _shrink_layers(values: dict[str, Any], config: Any) -> None:
    counted = "num_hidden_layers" if "num_hidden_layers" in values else "num_layers"
    layers = values[counted]
    dense = values.get("first_k_dense_replace")
    if isinstance(dense, int) and dense > 1:
        values["first_k_dense_replace"] = 1
    kinds = list(zip(*(one for key in _KINDS if isinstance(one := getattr(config, key, None), list) and one)))
    kept = max([kinds.index(kind) + 1 for kind in set(kinds)], default=1)
    kept = min(max(kept, 3), layers) if kept <= LAYERS else layers
    for key, value in values.items():
        if isinstance(value, list) and len(value) == layers:
            values[key] = value[:kept]
    values[counted] = kept
    if isinstance(values.get("max_window_layers"), int):
        values["max_window_layers"] = min(values["max_window_layers"], kept - 1)


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
