#!/usr/bin/env bash
# Sets up once, then checks style, types, documentation and behaviour on the CPU; fails if any of them does. Arguments go
# to pytest:
#   scripts/test.sh                      the quick tests: in minutes, what catches every breakage of tests/mutations
#   scripts/test.sh --changed            those that concern what changed since main (tests/changed.py), or since a COMMIT
#   scripts/test.sh -m nightly           the nightly ones alone; scripts/nightly.sh runs more
#   scripts/test.sh tests/cli -k config
#   scripts/test.sh -n 0                 in one process (three by default: many tests wait)
#   scripts/test.sh --cpu 25             and which tests compute for longest, whatever else the machine does
#   scripts/test.sh --accelerator        tests/accelerator alone, on the machine's accelerators, one test at a time
#   DS_ACCELERATOR=emulated scripts/test.sh                 the short form on the emulated device, which is compiled once
#   DS_ACCELERATOR=emulated scripts/test.sh tests/engine    other tests on the emulated device
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if [[ "${1:-}" == --accelerator ]]; then
    shift
    source scripts/setup_env.sh test accelerator || exit 1
    ds_dynmo_accelerators >/dev/null || exit 1
    exec python -m pytest -n 0 tests/accelerator "$@"
fi
asked="${DS_ACCELERATOR:-}"
source scripts/setup_env.sh test cpu || exit 1
# One thread per test: three tests run at once, and more threads than cores wait for each other. It halves the time.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run_tests() {
    python -m pytest -n 3 --dist worksteal ${CI:+--durations=25} "$@"
}
if [[ "$asked" == emulated ]]; then
    export DS_ACCELERATOR=emulated
    (($# > 0)) || set -- @tests/emulated/short_form.txt # pytest reads its arguments there
    run_tests "$@"
    code=$?
    # 5: no test ran, for want of a compiler
    [[ "$code" == 5 && -z "${CI:-}" ]] && exit 0
    exit "$code"
fi
if [[ "${1:-}" == --changed ]]; then
    chosen="$(python -m tests.changed "${@:2}")" || exit 1
    [[ -n "$chosen" ]] || exit 0
    mapfile -t chosen <<<"$chosen"
    set -- "${chosen[@]}"
fi

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
run_tests "$@" || failed=1
exit "$failed"
