"""Hosts for a test, and the folder in which commands of docs/hosts.md run on them as they are printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.namespaces import Network, name, network
from tests.support.pages import ROOT
from tests.support.script import flags

THREE = 3


@pytest.fixture
def three_hosts() -> Iterator[Network]:
    with network(THREE) as hosts:
        yield hosts


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with our scripts, a file of hosts, and a small model as the configuration of the page's commands."""
    folder = tmp_path / "checkout"
    (folder / "ds_configs").mkdir(parents=True)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    flags(folder, "dense")
    (folder / "config.json").rename(folder / "ds_configs" / "starter.json")
    (folder / "hostfile").write_text("".join(f"{name(host)} slots=1\n" for host in range(THREE)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return folder
