#!/usr/bin/env bash
# The Python environment of this checkout: made once, then put first on PATH. Source it, or let
# scripts/quickstart.sh and scripts/test.sh do so; run as a command it only makes the environment.
#
#   source scripts/setup_env.sh [EXTRA [DEVICE]]
#
# EXTRA   what to install beside the package: "test" (default; with everything the documentation uses), or "" for nothing
# DEVICE  "cpu" (default): torch's CPU build, and programs see no other device; "accelerator": its default build, and
#         DeepSpeed takes the devices that it finds
#
#   a virtual environment is active    it is used as it is; what is missing in it gets installed there
#   the system's Python has torch      .venv is made on top of that torch
#   otherwise                          .venv is made and torch installed first, so that no other package picks one
#
# PYTHON      the interpreter to start from, 3.11 or newer (default: that of .venv, else the first such on PATH)
# TORCH_SPEC  what pip installs where torch is missing, with options (default: the version below, in the build for DEVICE)
#
# Nothing is compiled: our scripts do without DeepSpeed's operators.

ds_dynmo_torch="torch==2.13.0"
ds_dynmo_cpu_index="https://download.pytorch.org/whl/cpu"

ds_dynmo_setup_env() {
    local extra="$1" device="$2" root python prefix
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || return 1
    python="$(ds_dynmo_python "$root")" || return 1
    prefix="$("$python" -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")')"
    if [[ -n "$prefix" && "$prefix" != "$root/.venv" ]]; then
        if ! ds_dynmo_complete "$prefix/bin/python" "$root" "$extra"; then
            ds_dynmo_say "installing what is missing into the active environment $prefix"
            ds_dynmo_install "$prefix/bin/python" "$root" "$extra" "$device" || return 1
        fi
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    else
        prefix="$root/.venv"
        ds_dynmo_venv "$python" "$root" || return 1
        if [[ ! -f "$prefix/ds_dynmo_installed" ]] || ! ds_dynmo_complete "$prefix/bin/python" "$root" "$extra"; then
            ds_dynmo_install "$prefix/bin/python" "$root" "$extra" "$device" || return 1
            echo "$root" >"$prefix/ds_dynmo_installed" # where the checkout was then
        fi
    fi
    export VIRTUAL_ENV="$prefix" PATH="$prefix/bin:$PATH"
    export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$prefix/torchinductor}" # else torch makes one under /tmp
    unset PYTHONHOME
    ds_dynmo_choose "$device" "$root"
}

# Print the interpreter to start from.
ds_dynmo_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11)
    [[ -n "${VIRTUAL_ENV:-}" ]] || candidates=("$1/.venv/bin/python" "${candidates[@]}")
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if ds_dynmo_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    ds_dynmo_say "no Python 3.11 or newer (tried ${candidates[*]}): install one, or name it in PYTHON"
    return 1
}

# Is interpreter $1 a Python that pyproject.toml admits?
ds_dynmo_supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Make .venv in $2 with interpreter $1, unless there is one that can be used.
ds_dynmo_venv() {
    local python="$1" folder="$2/.venv" options=(--clear)
    if [[ -f "$folder/ds_dynmo_installed" && "$(head -n 1 "$folder/ds_dynmo_installed")" != "$2" ]]; then
        ds_dynmo_say "the checkout was moved: making .venv anew"
    elif ds_dynmo_supported "$folder/bin/python" && "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python="$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')" # not that of .venv itself
    if "$python" -c 'import torch' 2>/dev/null; then
        options+=(--system-site-packages)
    fi
    ds_dynmo_say "making .venv with $("$python" --version) ($python)"
    if [[ -L "$folder" ]]; then
        rm "$folder" # --clear would empty the environment that the link leads to
    fi
    "$python" -m venv "${options[@]}" "$folder" && return
    ds_dynmo_say "$python cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)"
    return 1
}

# Does interpreter $1 have everything that pyproject.toml in $2 asks for, with extra $3, in the versions it asks for?
ds_dynmo_complete() {
    "$1" - "$2/pyproject.toml" "$3" <<'PYTHON_CODE' 2>/dev/null
import importlib.metadata, sys, tomllib

from pip._vendor.packaging.requirements import Requirement

path, extra = sys.argv[1:]
with open(path, "rb") as file:
    project = tomllib.load(file)["project"]
for text in project["dependencies"] + (project["optional-dependencies"][extra] if extra else []):
    requirement = Requirement(text)
    version = importlib.metadata.version(requirement.name)
    assert requirement.specifier.contains(version, prereleases=True), (text, version)
PYTHON_CODE
}

# Install torch for device $4 where it is missing, then the checkout $2 with extra $3, by interpreter $1.
ds_dynmo_install() {
    local python="$1" root="$2" extra="$3" device="$4" spec="${TORCH_SPEC:-}"
    local pip=("$python" -m pip --disable-pip-version-check install --quiet)
    if ! "$python" -c 'import torch' 2>/dev/null; then
        if [[ -n "$spec" ]]; then
            ds_dynmo_say "installing $spec (TORCH_SPEC)"
        elif [[ "$device" == cpu ]] && ds_dynmo_reached "$python" "$ds_dynmo_cpu_index/torch/"; then
            spec="$ds_dynmo_torch --index-url $ds_dynmo_cpu_index"
            ds_dynmo_say "installing $ds_dynmo_torch, CPU build (once; about 0.2 GB)"
        else
            spec="$ds_dynmo_torch"
            ds_dynmo_say "installing $spec, the package index's build (once; up to 2.7 GB: on Linux it is the CUDA build)"
            [[ "$device" != cpu ]] || ds_dynmo_say "the index of its CPU build cannot be reached: $ds_dynmo_cpu_index"
        fi
        # shellcheck disable=SC2086  # it may hold options of pip
        "${pip[@]}" $spec || { ds_dynmo_say "pip could not install $spec: see above; TORCH_SPEC names another"; return 1; }
    fi
    ds_dynmo_say "installing ds_dynmo and DeepSpeed${extra:+, with the extra \"$extra\"} (once)"
    "${pip[@]}" --editable "$root${extra:+[$extra]}" || { ds_dynmo_say "pip could not install ds_dynmo's requirements: see above"; return 1; }
}

ds_dynmo_reached() {
    "$1" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$2" 2>/dev/null
}

# Let programs see no device but $1; of the checkout $2 the emulated one, where it is asked for.
ds_dynmo_choose() {
    if [[ "$1" == cpu ]]; then
        export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
    elif [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
        unset DS_ACCELERATOR CUDA_VISIBLE_DEVICES # of a call for the CPU
    elif [[ "${DS_ACCELERATOR:-}" == emulated ]]; then
        export PYTHONPATH="$2/tests/emulated/site:$2${PYTHONPATH:+:$PYTHONPATH}"
    fi
}

# Say which accelerators DeepSpeed finds, and print how many. Fails without one.
ds_dynmo_accelerators() {
    local found name count torch
    found="$(python -c 'from deepspeed.accelerator import get_accelerator as get
import torch
print(get().device_name(), get().device_count(), torch.__version__)' | tail -n 1)" || return 1
    read -r name count torch <<<"$found"
    if [[ "$name" == cpu || "$count" == 0 ]]; then
        ds_dynmo_say "no accelerator is seen by torch $torch. If this is its CPU build, remove .venv and try again"
        return 1
    fi
    ds_dynmo_say "$count accelerator(s) of kind $name, torch $torch"
    echo "$count"
}

ds_dynmo_say() {
    echo "setup_env: $*" >&2
}

# shellcheck disable=SC2317  # return where this file is sourced, exit where it is run
ds_dynmo_setup_env "${1-test}" "${2-cpu}" || return 1 2>/dev/null || exit 1
