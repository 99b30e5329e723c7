"""The dynamic loss scale of fp16 training, as DeepSpeed's wrappers keep it (read in DeepSpeed 0.19.8).

``DeepSpeedZeroOptimizer`` has a ``loss_scaler``, the wrappers without ZeRO a ``loss_scale_config``. What is in them is
the same on every rank: overflows are agreed on before it changes. A static scale is the configuration's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ds_dynmo.errors import ConfigError

_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale_state(optimizer: Any) -> dict[str, Any]:
    """Return what a dynamic loss scale has come to; empty where there is none."""
    scaler = _scaler(optimizer)
    return _state_in(vars(scaler)) if scaler is not None else {}


def set_loss_scale_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Go on with another rank's :func:`loss_scale_state`, or a checkpoint's, where both are dynamic."""
    scaler = _scaler(optimizer)
    if state and scaler is not None and _state_in(vars(scaler)):
        vars(scaler).update({name: value for name, value in state.items() if name in vars(scaler)})


def saved_loss_scale(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Find the state of a dynamic loss scale in a ``state_dict`` of a wrapper; empty where there is none."""
    scaler = state_dict.get("loss_scaler")
    return _state_in(state_dict if scaler is None else vars(scaler))


def present_loss_scale(optimizer: Any) -> float:
    """Return the factor that the gradients of this batch have."""
    return float(getattr(optimizer, "loss_scale", None) or 1.0)


@contextmanager
def scaled_loss(engine: Any, *, check: bool) -> Iterator[None]:
    """Let the backward pass of the last stage begin at the loss times the loss scale.

    DeepSpeed leaves that out in fp16 without ZeRO (``DeepSpeedEngine.backward``), yet divides the gradients by it.

    Args:
        check: find out whether somebody else scales the loss too; waits for the accelerator.

    Raises:
        ConfigError: afterwards, if so. No step has been made with these gradients.
    """
    before, scale = engine.loss, float(engine.optimizer.loss_scale)
    loss = before.float()
    arrived: list[torch.Tensor] = []
    hook = loss.register_hook(arrived.append) if check and loss.requires_grad else None
    engine.loss = loss * scale
    try:
        yield
    finally:
        engine.loss = before
        if hook is not None:
            hook.remove()
    expected = scale / engine.gradient_accumulation_steps()
    if arrived and scale > 1.0 and math.isclose(arrived[0].item(), expected * scale, rel_tol=0.01):
        raise ConfigError(
            f"fp16 without ZeRO: the loss is multiplied by the loss scale, {scale:g}, twice. DeepSpeed 0.19.8 leaves "
            "it out and ds_dynmo adds it: whoever else does (another DeepSpeed, or your own backward pass) must not"
        )


def _scaler(optimizer: Any) -> Any:
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _state_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the state; a static scale has no iteration of its last overflow."""
    dynamic = values.get("last_overflow_iter") is not None
    return {name: values[name] for name in _STATE if name in values} if dynamic else {}
