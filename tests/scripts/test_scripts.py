"""What quickstart.sh, test.sh and test_versions.sh install and run, with a Python that only writes down its calls."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "torch==2.13.0"
PYTHON = """#!/usr/bin/env bash
# Stands for python3 and for the one of a virtual environment that it makes.
case "$*" in
    *version_info*) ;;
    *"sys.prefix if"*) [[ "$0" != */.venv/* ]] || echo "${0%/bin/python}" ;;
    *realpath*) echo BASE ;;
    *"-m venv --clear"*) rm -rf "${!#}"/*; mkdir -p "${!#}/bin"; cp "$0" "${!#}/bin/python" ;;
    *"pip --version"* | --version) echo 3 ;;
    "-c import torch") [[ -e "${0%/*}/torch" ]] ;;
    *urlopen*) [[ -n "${REACHED:-}" ]] ;;
    *get_accelerator*) echo "DeepSpeed's line"; echo "$DEVICES" ;;
    "- "*) exec REAL "$@" ;;
    *"-m tests.changed"*) printf '%s\n' ${CHANGED-} ;;
    *" install "*) echo "${@:3}" >>CALLS; [[ "$*" != *torch==* ]] || touch "${0%/*}/torch" ;;
    *) echo "[${DS_ACCELERATOR-any},${CUDA_VISIBLE_DEVICES-all}]${PYTHONPATH:+ $PYTHONPATH} $*" >>CALLS ;;
esac
"""


class Checkout:
    """A copy of scripts/ whose package needs pip, which is there, and whose extra "test" needs what never is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (folder / "pyproject.toml").write_text(
            '[project]\ndependencies = ["pip"]\noptional-dependencies.test = ["no-such-package"]\n'
        )
        (folder / "bin").mkdir()
        python = folder / "bin" / "python3"
        python.write_text(
            PYTHON.replace("REAL", sys.executable).replace("CALLS", str(self._calls)).replace("BASE", str(python))
        )
        python.chmod(0o755)

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[list[str], str]:
        """Return what was installed and run, and what the script said."""
        self._calls.write_text("")
        done = subprocess.run(
            ["bash", str(self.folder / "scripts" / script), *arguments],
            env={"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
        )
        said = done.stdout + done.stderr
        assert done.returncode == ("no accelerator" in said), said
        return [
            line.removeprefix("--disable-pip-version-check ") for line in self._calls.read_text().splitlines()
        ], said


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def launched(stages: int, *arguments: str, sees: str) -> str:
    words = ["-m deepspeed.launcher.runner --num_gpus", str(stages), "--master_port 29500 scripts/train.py"]
    return " ".join([sees, *words, "--deepspeed_config ds_configs/freezing.json", *arguments])


ON_CPU, ON_EMULATED, ANYWHERE = "[cpu,]", "[emulated,]", "[any,all]"
TESTS = "-m pytest -n 3 --dist worksteal"
EMULATED = {"DS_ACCELERATOR": "emulated"}
SHORT_FORM = "@tests/emulated/short_form.txt"


@pytest.mark.parametrize(
    ("variables", "spec", "says"),
    [
        ({"REACHED": "1"}, f"{TORCH} --index-url {CPU_INDEX}", "CPU build (once; about 0.2 GB)"),
        ({}, TORCH, "up to 2.7 GB"),
        ({"REACHED": "1", "TORCH_SPEC": "torch==2.9.0 --pre"}, "torch==2.9.0 --pre", "torch==2.9.0 --pre (TORCH_SPEC)"),
    ],
)
def test_the_quickstart_installs_the_package_alone_and_uses_the_cpu(
    variables: dict[str, str], spec: str, says: str, checkout: Checkout
) -> None:
    """Also if the environment shows it devices."""
    shown = {"CUDA_VISIBLE_DEVICES": "0,1", "DS_ACCELERATOR": "cuda"}
    calls, said = checkout.run("quickstart.sh", "--steps", "2", **variables, **shown)
    assert calls == [
        f"install --quiet {spec}",
        f"install --quiet --editable {checkout.folder}",
        launched(2, "--steps", "2", sees=ON_CPU),
    ]
    assert says in said and "--accelerator as the first argument" in said
    assert (f"cannot be reached: {CPU_INDEX}" in said) is (not variables)


def test_each_command_installs_once_what_it_needs(checkout: Checkout) -> None:
    checkout.run("quickstart.sh")
    assert checkout.run("quickstart.sh")[0] == [launched(2, sees=ON_CPU)]
    calls, _ = checkout.run("test.sh", "-k", "config", DS_ACCELERATOR="cuda")
    assert calls[0] == f"install --quiet --editable {checkout.folder}[test]" and TORCH not in str(calls)
    assert calls[-1] == f"{ON_CPU} {TESTS} -k config"


@pytest.mark.parametrize(
    ("asked", "arguments", "runs"),
    [
        ({}, [], [f"{ON_CPU} {TESTS}"]),
        ({"CI": "true"}, [], [f"{ON_CPU} {TESTS} --durations=25"]),
        ({"CHANGED": "tests/source tests/cli"}, ["--changed"], [f"{ON_CPU} {TESTS} tests/source tests/cli"]),
        ({"CHANGED": ""}, ["--changed"], []),
        (EMULATED, [], [f"{ON_EMULATED} {TESTS} {SHORT_FORM}"]),
        (EMULATED, ["tests/accelerator", "-x"], [f"{ON_EMULATED} {TESTS} tests/accelerator -x"]),
    ],
)
def test_tests_run_on_the_cpu_or_on_the_emulated_device(
    asked: dict[str, str], arguments: list[str], runs: list[str], checkout: Checkout
) -> None:
    calls, _ = checkout.run("test.sh", *arguments, **asked)
    assert [call for call in calls if " -m pytest " in call] == runs


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (2, 2), (8, 2)])
def test_accelerators_are_tried_where_they_are_asked_for(count: int, stages: int, checkout: Checkout) -> None:
    """Also where a call for the CPU has set the variables."""
    asked = {"DEVICES": f"cuda {count} 2.13.0+cu130", "REACHED": "1"}
    calls, said = checkout.run(
        "quickstart.sh", "--accelerator", "--steps", "2", **asked, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES=""
    )
    assert [calls[0], calls[-1]] == [f"install --quiet {TORCH}", launched(stages, "--steps", "2", sees=ANYWHERE)]
    assert f"{count} accelerator(s) of kind cuda, torch 2.13.0+cu130" in said and "2.7 GB" in said
    assert ("no layer can move" in said) is (count == 1)
    calls, _ = checkout.run("test.sh", "--accelerator", "-x", **asked)
    assert calls[-1] == f"{ANYWHERE} -m pytest -n 0 tests/accelerator -x"


def test_one_command_tries_everything_on_accelerators(checkout: Checkout) -> None:
    """Programs that it starts find the emulated one where that is asked for."""
    calls, _ = checkout.run(
        "try_accelerators.sh", "--quick", DEVICES="cuda 2 2.13.0", REACHED="1", DS_ACCELERATOR="cpu"
    )
    assert calls[-1] == f"{ANYWHERE} scripts/try_accelerators.py --quick"
    calls, _ = checkout.run("try_accelerators.sh", DEVICES="emulated 8 2.13.0", DS_ACCELERATOR="emulated")
    folder = checkout.folder
    assert calls[-1] == f"[emulated,all] {folder}/tests/emulated/site:{folder} scripts/try_accelerators.py"


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "try_accelerators.sh"])
def test_no_accelerator_is_an_error_where_one_is_asked_for(script: str, checkout: Checkout) -> None:
    calls, said = checkout.run(script, "--accelerator", DEVICES="cpu 2 2.13.0+cpu")
    assert "no accelerator is seen by torch 2.13.0+cpu" in said
    assert all(call.startswith("install ") for call in calls)


def test_a_checkout_that_was_moved_gets_a_new_environment(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("quickstart.sh")
    (checkout.folder / ".venv" / "ds_dynmo_installed").write_text("/elsewhere\n")
    calls, said = checkout.run("quickstart.sh")
    assert "the checkout was moved" in said and f"install --quiet --editable {checkout.folder}" in calls


def test_an_environment_that_a_link_leads_to_is_left_alone(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("quickstart.sh")
    folder = checkout.folder / ".venv"
    other = folder.rename(tmp_path / "of another checkout")
    (other / "ds_dynmo_installed").write_text("/elsewhere\n")
    folder.symlink_to(other)
    checkout.run("quickstart.sh")
    assert folder.is_dir() and not folder.is_symlink() and (other / "ds_dynmo_installed").read_text() == "/elsewhere\n"


@pytest.mark.parametrize("reached", ["", "1"])
def test_each_version_is_tested_from_a_folder_of_its_own(reached: str, checkout: Checkout) -> None:
    calls, _ = checkout.run(
        "test_versions.sh", "tests/engine", REACHED=reached, VERSIONS="torch==2.9.0 deepspeed==0.20.0"
    )
    *_, install_torch, test_torch, install_deepspeed, test_deepspeed = calls
    folder = Path(install_torch.split()[-2]).parent
    index = f" --index-url {CPU_INDEX}" if reached else ""
    assert install_torch == f"install --quiet{index} --target {folder}/torch==2.9.0 torch==2.9.0"
    packaged = f"--target {folder}/deepspeed==0.20.0 deepspeed==0.20.0"
    assert install_deepspeed == f"install --quiet --no-deps --no-build-isolation {packaged}"
    for call, package in ((test_torch, "torch==2.9.0"), (test_deepspeed, "deepspeed==0.20.0")):
        assert call.startswith(f"{ON_CPU} {checkout.folder}:{folder / package} -m pytest ")
        assert call.endswith(" tests/engine")
    assert not folder.exists()
