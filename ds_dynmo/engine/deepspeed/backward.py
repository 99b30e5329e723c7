"""A backward pass that begins at a tensor of ours, as DeepSpeed's pipeline engine runs one (read in 0.19.8).

A stage that is not the last goes back from what it sent, in runtime/pipe/engine.py, ``_exec_backward_pass``: around it
``BF16_Optimizer``, which is not asked to run the pass, is told to forget the gradients of the pass before and to add up
those of this one. The last stage goes back from its loss, with hooks on what its layers gave, which a tensor of ours
does not have. So the former way is the right one on every stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def backward_from_own(engine: Any, roots: Iterable[torch.Tensor]) -> None:
    """Run autograd's backward pass from each of some scalars; gradients reach parameters as in one other pass."""
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
