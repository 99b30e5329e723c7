#!/usr/bin/env bash
# The Python environment of this checkout: made once, then put first on PATH. Source it, or let
# scripts/quickstart.sh and scripts/test.sh do so; run as a command it only makes the environment.
#
#   a virtual environment is active    it is used as it is; what is missing in it gets installed there
#   the system's Python has torch      .venv is made on top of that torch
#   otherwise                          .venv is made and torch installed first, so that no other package picks one
#
# PYTHON      the interpreter to start from, 3.10 or newer (default: the first such on PATH)
# TORCH_SPEC  what pip installs where torch is missing (default: torch==2.13.0). The package index gives the CUDA build
#             on Linux; without a GPU, TORCH_SPEC="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" is smaller.
#
# Nothing is compiled: our scripts do without DeepSpeed's operators.

ds_dynmo_setup_env() {
    local root python prefix candidate stamp
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || return 1
    stamp="$root/.venv/ds_dynmo_installed" # written when .venv is complete: where the checkout was then

    if [[ -x "$root/.venv/bin/python" && "${PYTHON:-$root/.venv/}" == "$root/.venv/"* ]] &&
        { [[ -z "${VIRTUAL_ENV:-}" ]] || [[ "$VIRTUAL_ENV" == "$root/.venv" ]]; } &&
        [[ -f "$stamp" && "$(head -n 1 "$stamp")" == "$root" ]] && ds_dynmo_complete "$root/.venv/bin/python" "$root"; then
        ds_dynmo_use "$root/.venv"
        return
    fi

    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            python="$(command -v "$candidate")"
            break
        fi
        [[ -z "${PYTHON:-}" ]] || break
    done
    if [[ -z "${python:-}" ]]; then
        ds_dynmo_say "no Python 3.10 or newer (tried ${PYTHON:-python3 and python3.10 to python3.13}): install one, or name it in PYTHON"
        return 1
    fi

    prefix="$("$python" -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")')"
    if [[ -n "$prefix" && "$prefix" != "$root/.venv" ]]; then
        if ! ds_dynmo_complete "$prefix/bin/python" "$root"; then
            ds_dynmo_say "installing what is missing into the active environment $prefix"
            ds_dynmo_install "$prefix/bin/python" "$root" || return 1
        fi
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        ds_dynmo_use "$prefix"
        return
    fi

    if [[ -f "$stamp" && "$(head -n 1 "$stamp")" != "$root" ]]; then
        ds_dynmo_say "the checkout was moved: making .venv anew"
        rm -rf "$root/.venv"
    fi
    if ! "$root/.venv/bin/python" -m pip --version >/dev/null 2>&1; then
        local options=(--clear)
        if "$python" -c 'import torch' 2>/dev/null; then
            options+=(--system-site-packages)
        fi
        ds_dynmo_say "making .venv with $("$python" --version) ($python)"
        if ! "$python" -m venv "${options[@]}" "$root/.venv"; then
            ds_dynmo_say "$python cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)"
            return 1
        fi
    fi
    ds_dynmo_install "$root/.venv/bin/python" "$root" || return 1
    echo "$root" >"$stamp"
    ds_dynmo_use "$root/.venv"
}

# Does interpreter $1 have everything that pyproject.toml in $2 asks for, in the versions it asks for?
ds_dynmo_complete() {
    "$1" - "$2/pyproject.toml" <<'PYTHON_CODE' 2>/dev/null
import importlib.metadata, sys

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
from pip._vendor.packaging.requirements import Requirement

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for text in project["dependencies"] + project["optional-dependencies"]["test"]:
    requirement = Requirement(text)
    version = importlib.metadata.version(requirement.name)
    assert requirement.specifier.contains(version, prereleases=True), (text, version)
PYTHON_CODE
}

ds_dynmo_install() {
    local python="$1" root="$2" spec="${TORCH_SPEC:-torch==2.13.0}"
    local pip=("$python" -m pip --disable-pip-version-check install --quiet)
    if ! "$python" -c 'import torch' 2>/dev/null; then
        ds_dynmo_say "installing $spec (once; takes minutes)"
        # shellcheck disable=SC2086  # TORCH_SPEC may hold options of pip
        "${pip[@]}" $spec || { ds_dynmo_say "pip could not install $spec: see above; TORCH_SPEC names another"; return 1; }
    fi
    ds_dynmo_say "installing ds_dynmo, DeepSpeed and the test tools (once)"
    "${pip[@]}" --editable "$root[test]" || { ds_dynmo_say "pip could not install ds_dynmo's requirements: see above"; return 1; }
}

ds_dynmo_use() {
    export VIRTUAL_ENV="$1" PATH="$1/bin:$PATH"
    export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$1/torchinductor}" # else torch makes one under /tmp
    unset PYTHONHOME
}

ds_dynmo_say() {
    echo "setup_env: $*" >&2
}

# shellcheck disable=SC2317  # return where this file is sourced, exit where it is run
ds_dynmo_setup_env || return 1 2>/dev/null || exit 1
