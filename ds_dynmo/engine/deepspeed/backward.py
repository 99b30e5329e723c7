"""Run a backward pass from a tensor of ds_dynmo's, as DeepSpeed's pipeline engine runs one (read in 0.19.8).

DeepSpeed's stages but the last run the backward pass from the tensors they sent (runtime/pipe/engine.py,
``_exec_backward_pass``). ``BF16_Optimizer`` does not run this pass, but clears the gradients of the last pass before it
and accumulates those of this one after it. The last stage runs the pass from its loss, whose outputs have hooks that a
tensor of ds_dynmo's lacks. So the former way is right on every stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def backward_from(engine: Any, roots: Iterable[torch.Tensor]) -> None:
    """Run autograd's backward pass from each of ``roots``, which are scalars; parameters see one pass."""
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True  # else a hook takes the pass for one that the user runs
    try:
        for root in roots:
            root.backward()
    finally:
        engine._running_engine_backward = False
    if engine.using_bf16_optimizer and not engine._config.bfloat16_config.immediate_grad_update:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)
