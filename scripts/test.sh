#!/usr/bin/env bash
# Sets up once, then checks style, types, documentation and behaviour on the CPU; fails if any of them does. Arguments go
# to pytest:
#   scripts/test.sh                      all tests but the long fuzz forms
#   scripts/test.sh -m fuzz              the fuzz forms alone
#   scripts/test.sh tests/pure -k config
#   scripts/test.sh -n 0                 in one process (three by default: many tests wait)
#   scripts/test.sh --accelerator        tests/accelerator alone, on the machine's accelerators, one test at a time
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if [[ "${1:-}" == --accelerator ]]; then
    shift
    source scripts/setup_env.sh test accelerator || exit 1
    ds_dynmo_accelerators >/dev/null || exit 1
    exec python -m pytest -n 0 tests/accelerator "$@"
fi
source scripts/setup_env.sh test cpu || exit 1

failed=0
check() {
    "$@" || { failed=1; echo "test.sh: failed: $*"; }
}
check python -m ruff check .
check python -m ruff format --check .
check python -m mypy
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
check python -m mkdocs build --quiet --strict --site-dir "$site"
python -m pytest -n 3 --dist worksteal "$@" || exit # last, so that its summary is the last line
exit "$failed"
