"""Which processes are a rank's launchers, that a rank ends with them, and when it ends one: without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_dynmo.cli.command_line import refuse_on_ranks
from ds_dynmo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import sys, threading, time
sys.path.insert(0, {root!r})
from ds_dynmo import end_with_launcher
from ds_dynmo.launch import _launchers

end_with_launcher()
end_with_launcher()
print(len(_launchers()), threading.active_count() - 1, flush=True)
time.sleep(60)
print("outlived")
"""
REFUSED = """
import sys
sys.path.insert(0, {root!r})
from ds_dynmo.cli.command_line import refuse_on_ranks
from ds_dynmo.errors import ConfigError

sys.exit(refuse_on_ranks(ConfigError("wrong")))
"""
LAUNCHER = """
import subprocess, sys
at = sys.argv.index("--") + 1
above, program = sys.argv[1:at], sys.argv[at:]
if above[0] == "0":
    sys.exit(subprocess.run(program).returncode)
if above[0] == "1":
    program = [program[0], "--local_rank=0", *program[1:]]
    sys.exit(subprocess.run([sys.executable, "-u", *program]).returncode)
subprocess.run([sys.executable, __file__, str(int(above[0]) - 1), "--", *program])
"""


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[Path, Path]:
    rank, launcher = tmp_path / "rank.py", tmp_path / "launcher.py"
    rank.write_text(RANK.format(root=str(ROOT)))
    launcher.write_text(LAUNCHER)
    return rank, launcher


@pytest.mark.parametrize("launchers", [1, 2])
@pytest.mark.parametrize("arguments", [[], ["--steps", "3", "--", "x"]])
def test_a_rank_ends_with_its_topmost_launcher(
    launchers: int, arguments: list[str], scripts: tuple[Path, Path]
) -> None:
    rank, launcher = scripts
    command = [sys.executable, str(launcher), str(launchers), "--", str(rank), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        assert top.stdout.readline() == f"{launchers} 1\n"
        top.kill()
        assert top.stdout.read() == ""  # returns when the rank, which holds the other end, has ended


def test_a_rank_ends_with_a_launcher_that_found_it_on_its_path(tmp_path: Path, scripts: tuple[Path, Path]) -> None:
    """A command that a package installs: the launcher's words name it, the rank's have its folder too."""
    rank, launcher = scripts
    command = tmp_path / "rank-command"
    command.write_text(f"#!{sys.executable} -u\n{rank.read_text()}")
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [sys.executable, str(launcher), "0", "--", "rank-command", "--steps", "3"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        assert top.stdout.readline() == "1 1\n"
        top.kill()
        assert top.stdout.read() == ""


def test_a_program_without_a_launcher_continues(scripts: tuple[Path, Path]) -> None:
    """Its parent is a shell, which is not watched."""
    command = ["sh", "-c", f"{sys.executable} {scripts[0]}; true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "0 0\n"
        os.killpg(shell.pid, signal.SIGKILL)


@pytest.mark.parametrize(("restarts", "ends"), [("2", True), ("1", False), ("0", False)])
def test_an_error_that_every_start_repeats_ends_the_agent_that_would_start_again(
    restarts: str, ends: bool, tmp_path: Path
) -> None:
    """The rank was started once more already. Without another start left, torchrun fails by itself and says why."""
    rank, launcher = tmp_path / "rank.py", tmp_path / "launcher.py"
    rank.write_text(REFUSED.format(root=str(ROOT)))
    launcher.write_text(LAUNCHER)
    environment = {**os.environ, "TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_RESTART_COUNT": "1"}
    command = [sys.executable, str(launcher), "1", "--", str(rank)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGTERM if ends else 2), done.stderr
    assert "ds-dynmo-train: error: wrong" in done.stderr


def test_an_error_that_another_start_may_not_have_lets_the_agent_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr("ds_dynmo.cli.command_line.end_restarts", lambda: ended.append(True))
    monkeypatch.delenv("RANK", raising=False)
    assert refuse_on_ranks(ConfigError("ranks cannot meet"), retry=True) == 2 and not ended
    assert refuse_on_ranks(ConfigError("wrong")) == 2 and ended
