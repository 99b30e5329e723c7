"""DeepSpeed's universal checkpoints: the files that ``ds_to_universal`` writes, each with one whole parameter.

Beside them are copies of the ``mp_rank_*`` files of the checkpoint that was converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    CAT_DIM,
    FP32_WEIGHT_KEY,
    PARAM,
    PARAM_GROUPS,
    PARAM_N_SUB_PARAMS,
    PARAM_SHAPES,
    SUB_PARAM_SHAPE,
    VOCAB_TENSOR,
)
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

__all__ = ["FP32_WEIGHT_KEY", "PARAM_GROUPS", "PARAM_SHAPES", "SubparamShape"]

LATEST = "latest_universal"  # a file beside the folder, with its name
PARAMETERS = "zero"  # the folder with a folder per parameter
OPTIMIZER = "zero/optimizer_state.pt"  # options of parameter groups
MOMENTS = ("exp_avg", "exp_avg_sq")  # the converter knows no others
STEP = "step"

_ADAM = (torch.optim.Adam, torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam)


@dataclass(frozen=True)
class WholeParameter:
    """A parameter, or a moment of it, joined from tensor-parallel slices.

    Attributes:
        dim: the dimension along which slices were joined.
        parts: so many parameters in one, equal in size along ``dim``, of which slices were joined each by itself.
        sub_shape: the same for parts that differ in size; None: there are none.
        vocabulary: rows that only filled up a slice were left out.
    """

    tensor: torch.Tensor
    dim: int
    parts: int
    sub_shape: SubparamShape | None
    vocabulary: bool

    @classmethod
    def of(cls, content: Any) -> WholeParameter | None:
        """Read the content of a file; None: it holds something else, as after ZeRO stage 3."""
        if not isinstance(content, dict) or not isinstance(content.get(PARAM), torch.Tensor):
            return None
        return cls(
            tensor=content[PARAM],
            dim=content.get(CAT_DIM, 0),
            parts=content.get(PARAM_N_SUB_PARAMS, 1),
            sub_shape=content.get(SUB_PARAM_SHAPE),
            vocabulary=bool(content.get(VOCAB_TENSOR, False)),
        )


def keeps_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer's state is :data:`MOMENTS` and a count of steps, and nothing else."""
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    return isinstance(optimizer, _ADAM) and not amsgrad


def count_of_steps(optimizer: torch.optim.Optimizer, saved: Any) -> Any:
    """Convert a count of steps, which another optimizer may have written, to what this one keeps."""
    if isinstance(optimizer, FusedAdam | DeepSpeedCPUAdam):
        return int(saved)
    return torch.tensor(float(saved))
