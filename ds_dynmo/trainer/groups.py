"""Parameter groups as transformers' trainer makes them: with weight decay, and without (biases, norms)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import Trainer

__all__ = ["parameter_groups"]

PLACE = re.compile(r"^(?:tied_modules\.[^.]+|(\d+))\.part\.")
"""How DeepSpeed names the part in a layer: by its number, or by the name of a tie, which is that of the embedding."""


def parameter_groups(module: Any, whole: Any, paths: Sequence[str], weight_decay: float) -> list[dict[str, Any]]:
    """Make the parameter groups of a rank's own layers; one may be empty.

    Args:
        module: a ``PipelineModule``.
        whole: transformers' model, whose names say which parameters decay.
        paths: of the layers' parts in it.
    """
    decays = set(Trainer.get_decay_parameter_names(None, whole))
    known = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    groups: tuple[list[Any], list[Any]] = [], []
    for name, parameter in module.named_parameters():
        place = PLACE.match(name)
        assert place is not None, name
        of_library = f"{paths[int(place[1] or 0)]}.{name[place.end() :]}"
        assert of_library in known, f"{name} is {of_library}"
        if parameter.requires_grad:
            groups[of_library not in decays].append(parameter)
    return [
        {"params": groups[0], "weight_decay": weight_decay},
        {"params": groups[1], "weight_decay": 0.0},
    ]
