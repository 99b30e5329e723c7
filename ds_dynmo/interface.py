"""The network interface by which ranks on other hosts reach this one, for gloo.

Left alone, gloo offers the address to which the host's own name resolves. Debian's /etc/hosts resolves it to 127.0.1.1,
by which other hosts reach themselves; and a host may have a name, but no address for it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Mapping, MutableMapping

import psutil  # comes with DeepSpeed

INTERFACE = "GLOO_SOCKET_IFNAME"
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # of torchrun, and of DeepSpeed's launcher
BEYOND = ("203.0.113.1", "2001:db8::1")  # addresses of no host, to which the default routes lead
_logger = logging.getLogger("DynMo")


def choose_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set ``GLOO_SOCKET_IFNAME``, where it is not set, to the interface by which this host reaches rank 0's.

    It counts for groups that are made later. Nothing is set if no interface can be told to be the right one.
    """
    master = environment.get("MASTER_ADDR")
    if environment.get(INTERFACE) or not master:
        return
    alone = environment.get("WORLD_SIZE", "1") in ("1", local_size(environment))
    interface = interface_to(master, alone=alone)
    if interface is None:
        return
    environment[INTERFACE] = interface
    if not alone and environment.get("LOCAL_RANK", "0") == "0":
        _logger.info(f"{socket.gethostname()}: gloo uses {interface}; set {INTERFACE} to choose another interface")


def local_size(environment: Mapping[str, str]) -> str | None:
    """Return the number of ranks on this host, as the launcher says it; None: it does not."""
    return next((environment[name] for name in LOCAL_SIZES if name in environment), None)


def interface_to(master: str, *, alone: bool) -> str | None:
    """Return the interface by which this host reaches ``master``; None if there is none, or no way to tell.

    If that is a loopback interface, ``master`` is this host. Others then reach it by the interface of its default
    route, or by the only one it has.

    Args:
        alone: all ranks are on this host.
    """
    if _source(master) is None:
        return None
    interfaces = {
        _without_scope(address.address): name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    for target in (master, *BEYOND):
        source = _source(target)
        if source in interfaces and (alone or not ipaddress.ip_address(source).is_loopback):
            return interfaces[source]
    outward = {name for address, name in interfaces.items() if not _stays_on_link(address)}
    candidates = outward or set(interfaces.values())  # a host with loopback alone has all ranks
    return candidates.pop() if len(candidates) == 1 else None


def _source(target: str) -> str | None:
    """Return the address from which this host would send to ``target``. Nothing is sent."""
    try:
        addresses = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.connect(address)
                return _without_scope(trial.getsockname()[0])
        except OSError:
            continue
    return None


def _without_scope(address: str) -> str:
    return address.split("%")[0]


def _stays_on_link(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.is_loopback or parsed.is_link_local
