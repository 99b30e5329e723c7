"""Launched by the deepspeed command or by Slurm's: 3 stages, then 1."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_dynmo.cli.startup import init_distributed
from tests.support.configs import Case
from tests.support.training import batches, build

DELAY_SECONDS = 4.0


def main(folder: str, policy: str, *command: str) -> None:
    init_distributed()
    repack = {"release": policy, "command": command or None, "release_delay_seconds": DELAY_SECONDS}
    engine = build(Case(stages=3, dynmo={"interval": 0, "repack": repack}))
    data, losses = batches(engine), []
    while engine.global_steps < 6:
        losses.append(engine.train_batch(data).item())
        if engine.global_steps == 2:
            engine.repack(1)
            if policy == "command" and not engine.released:
                engine.repacker._policy_runner.finish()  # until the nodes have left the job
        if engine.released:
            break
    found = {"losses": losses, "steps": engine.global_steps, "released": engine.released}
    if policy == "command" and engine.released:
        time.sleep(2 * DELAY_SECONDS)  # the script is not done when its node leaves the job
    (Path(folder) / f"{policy}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")])
