#!/usr/bin/env bash
# Sets up once, then tries everything that needs accelerators on those of this machine: tests, training, schedules,
# moves, profiles and memory. Says at the end what held. Arguments go to scripts/try_accelerators.py; --help lists them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh "" accelerator # scripts/test.sh adds what tests need
ds_dynmo_accelerators >/dev/null
export OMP_NUM_THREADS=1
exec python scripts/try_accelerators.py "$@"
