"""Refuse keys of the DeepSpeed configuration that are taken for others: misspelt, or outside the "dynmo" section.

DeepSpeed ignores keys that it does not know, and scripts keep settings of their own beside its. So only a key that is
nearly one of DeepSpeed's, or that has a value which the section takes under that name, is refused. ds-dynmo-train
refuses every other key too (``ds_dynmo.cli.training.places``): no script reads its configuration.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ds_dynmo.config.dynmo import DynMoConfig
from ds_dynmo.config.explain import show
from ds_dynmo.errors import ConfigError
from ds_dynmo.unread_section import SECTION

__all__ = ["DEEPSPEED_KEYS", "SECTION", "check_section_name", "check_top_level"]

DEEPSPEED_KEYS = frozenset(
    (
        *("activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet"),
        *("comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor"),
        *("curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last", "datastates_ckpt"),
        *("disable_allgather", "disable_python_gc", "dump_state", "eigenvalue", "elasticity", "expert_parallel"),
        *("flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping"),
        *("gradient_predivide_factor", "graph_harvesting", "hybrid_engine", "log_level"),
        *("managed_gradient_accumulation", "memory_breakdown", "nebula", "optimizer", "pipeline"),
        *("prescale_gradients", "progressive_layer_drop", "quantize_training", "scheduler"),
        *("seq_parallel_communication_data_type", "sparse_attention", "sparse_gradients", "steps_per_print"),
        *("tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size"),
        *("train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size"),
        *("wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer"),
        *("zero_force_ds_cpu_optimizer", "zero_optimization"),
    )
)
"""Top-level keys that DeepSpeed 0.19.8 looks for."""

_SHORTEST = 8  # letters of a key; of shorter ones other words are near: "comet" and "comment"
_LONG = 12  # letters of a key of which a beginning is no other word
_NEAR = 0.87  # similarity of 8 letters with one wrong, and of 16 with two
_NEAR_SECTION = 0.8  # of 5 letters with one wrong


def check_section_name(settings: Mapping[str, Any]) -> None:
    """Refuse a key that differs from "dynmo" only in case, punctuation or a letter. No key of DeepSpeed does.

    Raises:
        ConfigError: naming the key.
    """
    for key in settings:
        if key != SECTION and isinstance(key, str) and _similarity(_letters(key), SECTION) >= 0.8:
            raise ConfigError(f'{key}: unknown top-level key; did you mean "{SECTION}"?')


def check_top_level(settings: Mapping[str, Any]) -> None:
    """Refuse a key that is nearly one of DeepSpeed's, beside it too, or one of the section's.

    Raises:
        ConfigError: naming the key, and the one that was meant.
    """
    keys = sorted(DEEPSPEED_KEYS)
    for key, value in settings.items():
        if key in DEEPSPEED_KEYS or not isinstance(key, str):
            continue
        if key in DynMoConfig.model_fields:
            if value != {} and _section_takes(key, value):
                raise ConfigError(
                    f'{key} = {show(value)}: is a key of the "{SECTION}" section, and is ignored outside of it: '
                    f'"{SECTION}": {{"{key}": {show(value)}}}. Give a setting of your own another name'
                )
        elif (near := next((known for known in keys if _is_near(key, known, value)), None)) is not None:
            raise ConfigError(
                f"{key} = {show(value)}: DeepSpeed has no such top-level key, and would ignore it; did you mean "
                f'"{near}"? Give a setting of your own another name'
            )


def _is_near(key: str, known: str, value: Any) -> bool:
    """Return whether ``key`` is ``known`` misspelt or cut off, and no word of its own."""
    key, known = _letters(key), _letters(known)
    if isinstance(value, Mapping) and "enabled" in value:  # a section, as "wandb" is
        return _similarity(key, known) >= _NEAR_SECTION
    if known in key and key != known:  # "checkpoints", "lr_scheduler"
        return False
    if len(known) < _LONG and f"{key}s" == known:  # "data_type"
        return False
    cut_off = len(key) >= _LONG and known.startswith(key)
    return cut_off or (len(known) >= _SHORTEST and _similarity(key, known) >= _NEAR)


def _section_takes(key: str, value: Any) -> bool:
    try:
        DynMoConfig.model_validate({key: value})
    except ValidationError:
        return False
    return True


def _letters(key: str) -> str:
    return re.sub(r"[\W_]", "", key.lower())


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
