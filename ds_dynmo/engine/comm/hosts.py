"""Check, before gloo connects, that the ranks' hosts can reach each other by the addresses that gloo would offer."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from ds_dynmo.engine.comm.bounded import BoundedStore, meet
from ds_dynmo.errors import ConfigError
from ds_dynmo.interface import INTERFACE, local_size


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a launch whose environment cannot work, before any process group is made.

    Raises:
        ConfigError: this host cannot resolve the name of rank 0's host; or there are ranks on other hosts, and this one
            would offer an address that only it can reach.
    """
    _check_master(environment.get("MASTER_ADDR"))
    here = local_size(environment)
    loopback = _loopback(environment)
    if loopback is not None and here is not None and int(here) < int(environment.get("WORLD_SIZE", 1)):
        raise ConfigError(_refusal([loopback]))


def _check_master(address: str | None) -> None:
    """Refuse a name of rank 0's host that this host cannot resolve.

    Raises:
        ConfigError: with the name and the reason.
    """
    if address is None:
        return
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR = {address}: {socket.gethostname()} finds no host of this name: {error}. Set it to rank 0's "
            "host by a name or an address that every host knows"
        ) from error


def check_hosts(store: BoundedStore, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Refuse ranks on several hosts if one of them would offer an address that only it can reach. Collective.

    If a rank does not take part within the time-out, nothing is checked; a later collective reports the rank.

    Raises:
        ConfigError: on every rank: names the hosts, and the variable to set there.
    """
    turn = (store.add("ds_dynmo/hosts/calls", 1) - 1) // world_size  # a process may make several engines
    prefix = f"ds_dynmo/hosts/{turn}"
    loopback = _loopback(os.environ)
    if loopback is not None:
        store.set(f"{prefix}/loopback/{store.add(f'{prefix}/loopbacks', 1)}", loopback)
    if rank == 0:
        store.set(f"{prefix}/first", identity())
    try:
        store.wait([f"{prefix}/first"], timedelta(seconds=timeout_seconds))
        store.add(f"{prefix}/elsewhere", int(store.get(f"{prefix}/first").decode() != identity()))
        meet(store, f"{prefix}/done", world_size, timedelta(seconds=timeout_seconds))
    except RuntimeError:
        return
    loopbacks = store.add(f"{prefix}/loopbacks", 0)
    if loopbacks and store.add(f"{prefix}/elsewhere", 0):
        names = {store.get(f"{prefix}/loopback/{number}").decode() for number in range(1, loopbacks + 1)}
        with suppress(RuntimeError):  # so that the process with the store does not end before all have read it
            meet(store, f"{prefix}/read", world_size, timedelta(seconds=timeout_seconds))
        raise ConfigError(_refusal(sorted(names)))


def _refusal(hosts: list[str]) -> str:
    return (
        f"the ranks are on several hosts, and other hosts cannot reach the address by which gloo would offer this: "
        f"{'; '.join(hosts)}. Set {INTERFACE} on every host to the interface that the others reach (ip -brief address "
        "lists them; with DeepSpeed's launcher in .deepspeed_env), or mend /etc/hosts"
    )


def _loopback(environment: Mapping[str, str]) -> str | None:
    """Name this host and the address that gloo would offer, if only the host itself can reach it."""
    if environment.get(INTERFACE):
        return None
    host = socket.gethostname()
    address = _usable_address(host)
    if address is None:
        return f"{host}, whose name has no address of this host"
    if ipaddress.ip_address(address.split("%")[0]).is_loopback:
        return f"{host}, whose name resolves to {address}"
    return None


def _usable_address(host: str) -> str | None:
    """Return the first address of the name that this host can bind to, as torch 2.13.0 and gloo do."""
    try:
        addresses = socket.getaddrinfo(host, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None


def identity() -> str:
    """Identify this host, or this container: those that share a network have the same identity."""
    facts = [socket.gethostname()]
    readers: tuple[Callable[[], str], ...] = (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/net"),
    )
    for read in readers:
        try:
            facts.append(read())
        except OSError:  # not Linux
            facts.append("")
    return json.dumps(facts)
