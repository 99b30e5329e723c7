"""What DeepSpeed's conversion to a universal checkpoint wants to find."""

from __future__ import annotations

import re
from typing import Any

from ds_dynmo.engine.deepspeed_adapter.files import universal_information, writes_optimizer_shards
from ds_dynmo.engine.stage import StageContext


def universal_info(engine: Any, stage: StageContext) -> dict[str, Any]:
    """What DeepSpeed's conversion to a universal checkpoint asks the client for: a weight may be on several stages."""
    if not writes_optimizer_shards(engine):
        return {}
    tied = [rf"tied_modules\.{re.escape(key)}\..*" for key in stage.layers.tied_keys()]
    for tie in stage.layers.own_uses:  # a later use may have the weight by another name, and weights of its own
        names = tie.weights[tie.uses[0]]
        tied += [rf"tied_modules\.{re.escape(tie.key)}\.{re.escape(name)}$" for name in names]
    return universal_information(tied)
