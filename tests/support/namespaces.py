"""Hosts on one machine: network namespaces, each with its own interface on a switch that nothing else reaches."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PORT = 29500  # nothing else runs in these namespaces
_NET, _MOUNTS, _NAMES = 0x40000000, 0x00020000, 0x04000000  # of setns and unshare


@dataclass(frozen=True)
class Network:
    """Hosts and the switch between them, by the names of their namespaces."""

    switch: str
    hosts: tuple[str, ...]

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def pull_cable(self, host: int) -> None:
        """Disconnect a host silently: nothing reaches it or comes from it."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "down")


@contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Make hosts. Skip the test if the machine does not permit it."""
    if shutil.which("ip") is None:
        pytest.skip("needs network namespaces: no command ip (Debian: iproute2)")
    own = f"dynmo{os.getpid()}"
    made = Network(f"{own}s", tuple(f"{own}h{host}" for host in range(num_hosts)))
    try:
        _build(made)
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs network namespaces, which this machine does not permit: {error.stderr.strip()}")
    finally:
        for name in (made.switch, *made.hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _build(made: Network) -> None:
    for name in (made.switch, *made.hosts):
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", made.switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", made.switch, "link", "set", "switch", "up")
    for number, host in enumerate(made.hosts):
        port = f"port{number}"
        _ip("-n", made.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("-n", made.switch, "link", "set", port, "master", "switch", "up")
        _ip("-n", host, "addr", "add", f"{made.address(number)}/24", "dev", "eth0")
        _ip("-n", host, "link", "set", "eth0", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def enter(network: Network, rank: int) -> None:
    """Move this process to the host of that number, from where it meets the others at the first host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network.hosts[rank]}") as namespace:
        if libc.setns(namespace.fileno(), _NET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(MASTER_ADDR=network.address(0), MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="eth0")


def rename(host: str, address: str, folder: Path) -> None:
    """Name this process's host ``host``, which resolves to ``address``, for this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_MOUNTS | _NAMES):
        raise OSError(ctypes.get_errno(), "unshare")
    folder.mkdir()
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} {host}\n")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    libc.sethostname(host.encode(), len(host))
