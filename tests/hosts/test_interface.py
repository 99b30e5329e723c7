"""Which interface gloo uses, by what a host knows of its network."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from ds_dynmo import interface
from ds_dynmo.interface import BEYOND, INTERFACE, choose_interface

LOOPBACK = {"lo": "127.0.0.1"}
ONE = {**LOOPBACK, "eth0": "10.0.0.2"}
TWO = {**ONE, "docker0": "172.17.0.1"}


@pytest.mark.parametrize(
    ("interfaces", "master", "beyond", "local_size", "chosen"),
    [
        pytest.param(TWO, "10.0.0.2", None, "1", "eth0", id="it reaches rank 0's host"),
        pytest.param(TWO, "127.0.0.1", "172.17.0.1", "2", "lo", id="all ranks are here"),
        pytest.param(TWO, "127.0.0.1", "10.0.0.2", "1", "eth0", id="Debian's name of this host, and a default route"),
        pytest.param(TWO, "127.0.0.1", "10.0.0.2", None, "eth0", id="no launcher says how many ranks are here"),
        pytest.param(ONE, "127.0.0.1", None, "1", "eth0", id="the only way out"),
        pytest.param(LOOPBACK, "127.0.0.1", None, "1", "lo", id="no way out: all launches are here"),
        pytest.param(TWO, "127.0.0.1", None, "1", None, id="two ways out: refused later"),
        pytest.param(ONE, None, "10.0.0.2", "1", None, id="rank 0's name is unknown: refused later"),
    ],
)
def test_gloo_uses_the_interface_by_which_others_reach_this_host(
    interfaces: Mapping[str, str],
    master: str | None,
    beyond: str | None,
    local_size: str | None,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``master`` and ``beyond``: addresses from which this host would send to rank 0's, and along its default route."""
    sources = {"node0": master, BEYOND[0]: beyond}
    listed = {name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in interfaces.items()}
    monkeypatch.setattr(interface, "_source", sources.get)
    monkeypatch.setattr(interface.psutil, "net_if_addrs", lambda: listed)
    environment = {"MASTER_ADDR": "node0", "WORLD_SIZE": "2"}
    if local_size is not None:
        environment["LOCAL_WORLD_SIZE"] = local_size
    choose_interface(environment)
    assert environment.get(INTERFACE) == chosen


def test_an_interface_that_is_named_stays() -> None:
    environment = {"MASTER_ADDR": "localhost", INTERFACE: "ib0"}
    choose_interface(environment)
    assert environment[INTERFACE] == "ib0"


def test_a_process_alone_uses_loopback() -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}
    choose_interface(environment)
    assert environment[INTERFACE].startswith("lo")
