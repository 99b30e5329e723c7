"""The dynamic loss scale of fp16 training, as ``DeepSpeedZeroOptimizer`` keeps it (read in DeepSpeed 0.19.8).

It is the same on every rank: overflows are agreed on before it changes. A static scale is the configuration's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def set_loss_scale_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Take over the :func:`saved_loss_scale` of a checkpoint, if both are dynamic."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if state and scaler is not None and _state_in(vars(scaler)):
        vars(scaler).update({name: value for name, value in state.items() if name in vars(scaler)})


def saved_loss_scale(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Find the state of a dynamic loss scale in a ``state_dict`` of a wrapper; empty where there is none."""
    scaler = state_dict.get("loss_scaler")
    return _state_in(vars(scaler)) if scaler is not None else {}


def present_loss_scale(optimizer: Any) -> float:
    """Return the factor that the gradients of this batch have."""
    return float(getattr(optimizer, "loss_scale", None) or 1.0)


def _state_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the state; a static scale has no iteration of its last overflow."""
    dynamic = values.get("last_overflow_iter") is not None
    return {name: values[name] for name in _STATE if name in values} if dynamic else {}
