#!/usr/bin/env bash
# Sets up once, then checks style, types, documentation and behaviour; fails if any of them does. Arguments go to pytest:
#   scripts/test.sh                      all tests but the long fuzz forms
#   scripts/test.sh -m fuzz              the fuzz forms alone
#   scripts/test.sh tests/pure -k config
#   scripts/test.sh -n 0                 in one process (three by default: many tests wait)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/setup_env.sh || exit 1

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
