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

from ds_dynmo.engine.deepspeed.files import GROUP_OPTIONS, slice_number

__all__ = ["FP32_WEIGHT_KEY"]

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
        view: the shape to which ``part_sizes`` refer; None: the parameter's.
        part_sizes: sizes along ``dim`` of parts that differ; None: there are none.
        vocabulary: rows that only filled up a slice were left out.
    """

    tensor: torch.Tensor
    dim: int
    parts: int
    view: list[int] | None
    part_sizes: tuple[int, ...] | None
    vocabulary: bool

    @classmethod
    def of(cls, content: Any) -> WholeParameter | None:
        """Read the content of a file; None: it holds something else, as after ZeRO stage 3."""
        if not isinstance(content, dict) or not isinstance(content.get(PARAM), torch.Tensor):
            return None
        dim, view, sizes = content.get(CAT_DIM, 0), None, None
        shape = content.get(SUB_PARAM_SHAPE)
        if isinstance(shape, SubparamShape):
            dim, view = shape.partition_dim, [sum(size) if isinstance(size, tuple) else size for size in shape.shape]
            sizes = shape.shape[dim] if isinstance(shape.shape[dim], tuple) else (view[dim],)
        return cls(
            tensor=content[PARAM],
            dim=dim,
            parts=content.get(PARAM_N_SUB_PARAMS, 1),
            view=view,
            part_sizes=sizes,
            vocabulary=bool(content.get(VOCAB_TENSOR, False)),
        )


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group that a saved stage had.

    Attributes:
        names: of its parameters.
        options: None: not known, because stock DeepSpeed keeps those of the first stage alone.
    """

    names: list[str]
    options: dict[str, Any] | None


def saved_groups(stage: Any, optimizer: Any) -> list[SavedGroup]:
    """Read the parameter groups of a saved stage.

    Args:
        stage: the content of its file.
        optimizer: that of :data:`OPTIMIZER`, if it is the first stage; else None.

    Raises:
        ValueError: the files do not say, or not the same.
    """
    shapes = stage.get(PARAM_SHAPES) if isinstance(stage, dict) else None
    if not isinstance(shapes, list):
        raise ValueError(f"it lacks {PARAM_SHAPES}")
    options = stage.get(GROUP_OPTIONS)
    if options is None:
        options = optimizer[PARAM_GROUPS] if isinstance(optimizer, dict) and PARAM_GROUPS in optimizer else None
    if options is not None and len(options) != len(shapes):
        raise ValueError(f"{PARAM_SHAPES} has {len(shapes)} parameter groups, but there are options of {len(options)}")
    return [SavedGroup(list(names), known) for names, known in zip(shapes, options or [None] * len(shapes))]


def source_file(engine: Any, count: int) -> int:
    """Choose the one of ``count`` saved stage files that this rank's counters come from, as DeepSpeed does."""
    return slice_number(engine) * count // int(engine.mp_world_size)


def keeps_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's state is exactly :data:`MOMENTS` and a count of steps."""
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    return isinstance(optimizer, _ADAM) and not amsgrad


def count_of_steps(optimizer: torch.optim.Optimizer, saved: Any) -> Any:
    """Convert a count of steps, which another optimizer may have written, to what this one keeps."""
    if isinstance(optimizer, FusedAdam | DeepSpeedCPUAdam):
        return int(saved)
    return torch.tensor(float(saved), device="cpu")
