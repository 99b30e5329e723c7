#!/usr/bin/env bash
# Runs the test suite against the oldest version of DeepSpeed that is allowed, or against those in VERSIONS. Each is
# installed into a folder of its own in front of the environment's DeepSpeed. Arguments go to pytest:
#   scripts/test_versions.sh
#   VERSIONS="0.18.9 0.19.0" scripts/test_versions.sh tests/local
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/setup_env.sh || exit 1

folder="$(mktemp -d)" || exit 1
trap 'rm -rf "$folder"' EXIT
failed=0
for version in ${VERSIONS:-0.18.9}; do
    DS_BUILD_OPS=0 python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
        --target "$folder/$version" "deepspeed==$version" || exit 1
    echo "test_versions.sh: deepspeed $version"
    PYTHONPATH="$PWD:$folder/$version" python -m pytest -n 3 --dist worksteal -p no:cacheprovider "$@" || failed=1
done
exit "$failed"
