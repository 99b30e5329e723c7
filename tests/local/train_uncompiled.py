"""scripts/train.py, without the operator that DeepSpeed compiles first in every new environment (40 s)."""

from __future__ import annotations

import runpy
from pathlib import Path

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "train.py"), run_name="__main__")
