"""Ports for the programs that tests start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 10_000


def free_port() -> int:
    """Return a port of this host on which nobody listens.

    Until the program listens, which takes it seconds, Linux gives the port to no connection: it is below those that
    connections, and sockets that bind to port 0, get.
    """
    below = int(RANGE_OF_CONNECTIONS.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(FIRST, below)  # whatever seed a test has set
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
