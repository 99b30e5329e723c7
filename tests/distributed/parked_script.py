"""Launched by the deepspeed command: of 2 stages one is released and parked, and never recalled."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_dynmo.cli.startup import init_distributed
from tests.distributed.support.configs import Case
from tests.distributed.support.training import batches, build

if __name__ == "__main__":
    init_distributed()
    engine = build(Case(stages=2, dynmo={"interval": 0, "repack": {"release": "park"}}))
    engine.train_batch(batches(engine))
    engine.repack(1)
    print("parks" if engine.released else "trains on", flush=True)
    if engine.released:
        engine.wait_for_recall()
    time.sleep(600.0)
