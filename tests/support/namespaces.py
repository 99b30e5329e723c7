"""Hosts on one machine: network namespaces, each with its own interface on a switch that nothing else reaches.

A host has a name, and the names of the others. As on Debian, its own name resolves to 127.0.1.1 there.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PORT = 29500  # nothing else runs in these namespaces
_NET, _MOUNTS, _NAMES = 0x40000000, 0x00020000, 0x04000000  # of setns and unshare
_FILES = Path("/etc/netns")  # NAME/hosts there is /etc/hosts of what `ip netns exec NAME` runs
_REMOVE = (
    'for name in $1; do ip netns pids "$name" | xargs -r kill -s KILL; ip netns del "$name"; '
    f'rm -rf "{_FILES}/$name"; done; rmdir {_FILES}'
)


entered: tuple[Network, int] | None = None  # where this process runs, if it does on a host of a test


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

    def plug_cable(self, host: int) -> None:
        """Connect a host again."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` on a host."""
        begin = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'
        return ["ip", "netns", "exec", self.hosts[host], *("unshare", "--uts", "sh", "-c", begin), name(host), *command]


def name(host: int) -> str:
    return f"node{host}"


@contextmanager
def network(num_hosts: int, *, own_name: str = "127.0.1.1") -> Iterator[Network]:
    """Make hosts, and remove them with all that runs there. Skip the test if the machine does not permit it.

    Args:
        own_name: the address to which a host's own name resolves there; "": that of its interface.
    """
    if shutil.which("ip") is None:
        pytest.skip("needs network namespaces: no command ip (Debian: iproute2)")
    own = f"dynmo{os.getpid()}-{secrets.token_hex(2)}"
    made = Network(f"{own}s", tuple(f"{own}h{host}" for host in range(num_hosts)))
    from guard import guarded_removal  # in scripts/, which pytest has on its path; programs that import this have not

    with guarded_removal(_REMOVE, " ".join((made.switch, *made.hosts))):
        try:
            _build(made, own_name)
        except (subprocess.CalledProcessError, PermissionError) as error:
            pytest.skip(f"needs network namespaces, which this machine does not permit: {reason(error)}")
        yield made


def reason(error: OSError | subprocess.CalledProcessError) -> str:
    return str(error) if isinstance(error, OSError) else str(error.stderr).strip()


def _build(made: Network, own_name: str) -> None:
    for namespace in (made.switch, *made.hosts):
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", made.switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", made.switch, "link", "set", "switch", "up")
    for number, host in enumerate(made.hosts):
        port = f"port{number}"
        _ip("-n", made.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("-n", made.switch, "link", "set", port, "master", "switch", "up")
        _ip("-n", host, "addr", "add", f"{made.address(number)}/24", "dev", "eth0")
        _ip("-n", host, "link", "set", "eth0", "up")
        names = {name(other): made.address(other) for other in range(len(made.hosts))}
        if own_name:
            names[name(number)] = own_name
        (_FILES / host).mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {known}" for known, address in names.items())]
        (_FILES / host / "hosts").write_text("\n".join(lines) + "\n")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


def enter(network: Network, rank: int) -> None:
    """Move this process to the host of that number, as the only rank there; they meet at the first host."""
    global entered
    entered = network, rank
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network.hosts[rank]}") as namespace:
        if libc.setns(namespace.fileno(), _NET):
            raise OSError(ctypes.get_errno(), "setns")
    if libc.unshare(_MOUNTS | _NAMES):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", _FILES / network.hosts[rank] / "hosts", "/etc/hosts"], check=True)
    libc.sethostname(name(rank).encode(), len(name(rank)))
    os.environ.update(MASTER_ADDR=name(0), MASTER_PORT=str(PORT), LOCAL_SIZE="1")
