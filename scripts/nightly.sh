#!/usr/bin/env bash
# Runs what takes hours, one step after the other, and says at the end which steps passed, failed or were not run:
#   scripts/nightly.sh                 all steps
#   scripts/nightly.sh long versions   these alone
#
#   short       what CI runs: scripts/test.sh, and its short form on the emulated device
#   long        tests marked nightly: random sequences, more combinations, programs that are launched or installed
#   compiled    tests in which DeepSpeed compiles its own Adam; needs a C++ compiler and Python's headers
#   emulated    tests on ranks on the emulated device, and of the nightly ones those of moves
#   endurance   random rounds of training, for HOURS (default: 2), and what processes hold after many moves
#   faults      FAULTS (default: 1000) faults, one per trial, at places of a run on random ranks
#   mutations   the code broken in small ways: a quick test has to fail
#   versions    the lowest and highest tested versions of DeepSpeed, torch, transformers and peft
#   pythons     scripts/test.sh under each other Python of PYTHONS (default: 3.12 and 3.13) that is installed
#
# The output of each step is in a file of FOLDER (default: nightly/). A step without what it needs is "not run".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
FOLDER="${FOLDER:-nightly}"
PYTHONS="${PYTHONS:-3.12 3.13}"
HOURS="${HOURS:-2}"
FAULTS="${FAULTS:-1000}"
STEPS=(short long compiled emulated endurance faults mutations versions pythons)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # as scripts/test.sh
mkdir -p "$FOLDER" || exit 1

short() { bash scripts/test.sh && DS_ACCELERATOR=emulated bash scripts/test.sh; }
long() { bash scripts/test.sh -m nightly; }
compiled() { bash scripts/test.sh -m compiled; }
emulated() {
    DS_ACCELERATOR=emulated bash scripts/test.sh -m "ranks and not nightly and not compiled" &&
        DS_ACCELERATOR=emulated bash scripts/test.sh -m nightly tests/engine/test_bitwise.py tests/engine/move/test_moves.py
}
endurance() {
    (
        source scripts/setup_env.sh test cpu || exit 1
        python -m tests.endurance --growth
        grown=$?
        python -m tests.endurance --hours "$HOURS" --seed "$(date +%Y%m%d)0000" --folder "$FOLDER/endurance" --keep-going &&
            exit "$grown"
    )
}
faults() { (source scripts/setup_env.sh test cpu && python -m tests.faults --count "$FAULTS"); }
mutations() { (source scripts/setup_env.sh test cpu && python -m tests.mutations); }
versions() { bash scripts/test_versions.sh; }

# Test a clone under another Python: .venv belongs to this checkout's.
under_python() {
    local clone
    clone="$(mktemp -d)" || return 1
    git clone --quiet . "$clone" && (cd "$clone" && env -u VIRTUAL_ENV PYTHON="python$1" bash scripts/test.sh)
    local code=$?
    rm -rf "$clone"
    return "$code"
}

failed=0
summary=()
run_step() { # NAME COMMAND...
    local name="$1" seconds=$SECONDS result=passed
    shift
    echo "nightly.sh: $name: $FOLDER/$name.log"
    "$@" >"$FOLDER/$name.log" 2>&1 || { failed=1 result=FAILED; }
    summary+=("$(printf '%-12s %-8s %6d s  %s' "$name" "$result" $((SECONDS - seconds)) \
        "$(grep -E '[0-9]+ (passed|caught)|^[0-9]+ (of|trials)' "$FOLDER/$name.log" | tail -n 1)")")
}

for step in "${@:-${STEPS[@]}}"; do
    case "$step" in
    pythons)
        for version in $PYTHONS; do
            if command -v "python$version" >/dev/null; then
                run_step "python$version" under_python "$version"
            else
                summary+=("$(printf '%-12s not run: python%s is not on PATH' "python$version" "$version")")
            fi
        done
        ;;
    short | long | compiled | emulated | endurance | faults | mutations | versions) run_step "$step" "$step" ;;
    *)
        echo "nightly.sh: no step \"$step\"; steps: ${STEPS[*]}" >&2
        exit 2
        ;;
    esac
done
printf '%s\n' "${summary[@]}"
exit "$failed"
