#!/usr/bin/env bash
# Sets up once, then trains a GPT whose layers freeze, in two pipeline stages that re-balance themselves.
# More arguments go to scripts/train.py. MASTER_PORT: where the stages meet on this machine (default: 29500).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

export OMP_NUM_THREADS=1 # both stages share this machine's cores
# The command "deepspeed", by this environment's Python also where DeepSpeed is the system's; in this process, so that
# the stages end when it is killed.
exec python -m deepspeed.launcher.runner --num_gpus 2 --master_port "${MASTER_PORT:-29500}" \
    scripts/train.py --deepspeed_config ds_configs/freezing.json "$@"
