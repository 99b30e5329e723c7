#!/usr/bin/env bash
# Runs the test suite against each tested version of another package (ds_dynmo/engine/versions.py) that is not installed, or
# against those in VERSIONS. Each is installed into a folder of its own in front of the environment's packages. torch comes
# with the libraries of its build: gigabytes, unless the index of the CPU build can be reached. Arguments go to pytest:
#   scripts/test_versions.sh
#   VERSIONS="torch==2.12.0 peft==0.21.1" scripts/test_versions.sh tests/engine
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/setup_env.sh test cpu || exit 1

if [[ -z "${VERSIONS:-}" ]]; then
    VERSIONS="$(python -c 'from importlib.metadata import version
from ds_dynmo.engine.versions import TESTED
print(*(f"{name}=={tested}" for name in TESTED for tested in TESTED[name] if tested != version(name).split("+")[0]))')" || exit 1
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # as scripts/test.sh
folder="$(mktemp -d)" || exit 1
trap 'rm -rf "$folder"' EXIT
failed=0
for package in $VERSIONS; do
    options=(--no-deps --no-build-isolation)
    if [[ "$package" == torch==* ]]; then
        options=()
        ! ds_dynmo_reached python "$ds_dynmo_cpu_index/torch/" || options=(--index-url "$ds_dynmo_cpu_index")
    fi
    DS_BUILD_OPS=0 python -m pip --disable-pip-version-check install --quiet "${options[@]}" \
        --target "$folder/$package" "$package" || exit 1
    echo "test_versions.sh: $package"
    PYTHONPATH="$PWD:$folder/$package" python -m pytest -n 3 --dist worksteal -p no:cacheprovider "$@" || failed=1
    rm -rf "${folder:?}/$package"
done
exit "$failed"
