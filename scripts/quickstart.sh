#!/usr/bin/env bash
# Sets up once, then trains a GPT whose layers freeze, in two pipeline stages that re-balance themselves, on the CPU:
#   scripts/quickstart.sh --accelerator     on the machine's accelerators: one stage each, two at most
# More arguments go to scripts/train.py. MASTER_PORT: where the stages meet on this machine (default: 29500).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stages=2
if [[ "${1:-}" == --accelerator ]]; then
    shift
    source scripts/setup_env.sh "" accelerator
    count="$(ds_dynmo_accelerators)"
    if [[ "$count" == 1 ]]; then
        stages=1
        echo "quickstart.sh: one accelerator holds one stage, so no layer can move" >&2
    fi
else
    source scripts/setup_env.sh "" cpu
    echo "quickstart.sh: on the CPU; --accelerator as the first argument tries this machine's devices" >&2
fi

export OMP_NUM_THREADS=1 # both stages share this machine's cores
# The command "deepspeed", by this environment's Python also where DeepSpeed is the system's; in this process, so that
# the stages end when it is killed.
exec python -m deepspeed.launcher.runner --num_gpus "$stages" --master_port "${MASTER_PORT:-29500}" \
    scripts/train.py --deepspeed_config ds_configs/freezing.json "$@"
