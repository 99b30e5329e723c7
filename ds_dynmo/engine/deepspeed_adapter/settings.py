"""DeepSpeed's configuration: read it, and find what the newest DeepSpeed refuses in it."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from typing import Any

import hjson  # comes with DeepSpeed, which reads its configuration with it
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

# What DeepSpeed 0.19.8 refuses by name (runtime/config.py), and older versions do not: each of them depends on which
# layers a stage has, or was never tried with layers that move.
REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)


def read_settings(source: Any) -> dict[str, Any]:
    """Read a DeepSpeed configuration from a file, or from the base64 text that DeepSpeed's launchers pass on.

    Raises:
        ValueError, TypeError, OSError: it is neither, or no JSON.
    """
    text = os.fspath(source)
    if os.path.exists(text):
        with open(text) as file:
            return dict(hjson.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys))
    try:
        return dict(hjson.loads(base64.urlsafe_b64decode(text).decode()))
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("there is no such file, and it is no base64 text") from error


def removed_blocks(settings: Mapping[str, Any]) -> list[str]:
    """List the blocks of a configuration that the newest DeepSpeed no longer has."""
    return [key for key in REMOVED if key in settings]


def waits_for_norm(engine: Any) -> bool:
    """Does an optimizer step wait for a norm, or a flag for overflows, of all stages? Read in DeepSpeed 0.19.8."""
    if engine.gradient_clipping() > 0:
        return True
    if not engine.zero_optimization():
        return bool(engine.bfloat16_enabled() or engine.fp16_enabled())
    checks = engine.bfloat16_enabled() and getattr(engine._config.bfloat16_config, "check_grad_overflow", True)
    return bool(checks or engine.fp16_enabled() or getattr(engine._config.zero_config, "compute_grad_norm", True))


def sums_whole(engine: Any) -> str | None:
    """Name the key by which ZeRO sums every gradient over all replicas, a replica's own too; None: it does not.

    Read in DeepSpeed 0.19.8: ``average_tensor`` and ``reduce_ipg_grads`` of runtime/zero/stage_1_and_2.py.
    """
    keys = {"reduce_scatter": engine.zero_reduce_scatter, "contiguous_gradients": engine.zero_contiguous_gradients}
    return next((key for key, enabled in keys.items() if engine.zero_optimization() and not enabled()), None)


def settings_of(engine: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration as it was given to an engine."""
    settings: dict[str, Any] = engine._config._param_dict
    return settings
