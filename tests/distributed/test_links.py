"""Several hosts: links that die without a word, and names that no other host can use."""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest

from ds_dynmo.engine.comm.hosts import check_launch
from ds_dynmo.errors import ConfigError
from tests.distributed import link_workloads
from tests.distributed.harness import run
from tests.distributed.namespaces import network
from tests.distributed.workloads import Case

OURS, THEIRS = 2.0, 4.0  # seconds: of our collectives, and of the default group
ENDS = {  # of a rank at work, and of one that was released
    "before a rebalance": "MigrationError: rebalance is collective, but .*Timed out waiting",
    "while layers move": r"MigrationError: ranks \[.*\] .as numbered at the launch. do not answer any more: .*failed",
    "as the new world begins": "MigrationError: the re-packing failed after .* Resume|RuntimeError: called: False",
    "while parked": "RuntimeError: .*(Timed out waiting|Connection)|RuntimeError: called: False",
    "before a batch": "RuntimeError: .*(Timed out waiting|Connection)",
}
SHORT = [("before a rebalance", 0), ("while layers move", 2), ("as the new world begins", 0), ("while parked", 0)]


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        pytest.param(moment, victim, marks=() if (moment, victim) in SHORT else pytest.mark.fuzz)
        for moment in ENDS
        for victim in range(3)
    ],
)
def test_every_rank_ends_with_an_error_when_a_cable_is_pulled(moment: str, victim: int) -> None:
    """A rank cannot ask the store any more, which torch would wait for: that hides no error and keeps no rank."""
    case = Case(stages=3, start=(0, 3, 5, 8), dynmo={"interval": 0, "timeout_seconds": OURS, "repack": PARK})
    timeout = timedelta(seconds=THEIRS)
    with network(3) as hosts:
        ends = run(3, link_workloads.cut, case, hosts, victim, moment, seconds=60, hosts=hosts, group_timeout=timeout)
    assert all(re.match(ENDS[moment], end) for end in ends), ends


PARK = {"release": "park"}
BY_NAME = Case(stages=2, dynmo={"interval": 0, "timeout_seconds": 30.0})


def test_a_name_that_resolves_to_loopback_is_refused_where_ranks_span_hosts(tmp_path: Path) -> None:
    """Debian's 127.0.1.1: each host would tell the others to come to themselves."""
    with network(2) as hosts:
        found = run(2, link_workloads.start, BY_NAME, "node", "127.0.1.1", str(tmp_path), hosts=hosts)
    for message in found:
        assert "node0, whose name resolves to 127.0.1.1; node1, whose name resolves to 127.0.1.1" in message
        assert "Set GLOO_SOCKET_IFNAME" in message


def test_names_that_resolve_as_they_should_are_taken(tmp_path: Path) -> None:
    with network(2) as hosts:
        found = run(2, link_workloads.start_by_address, BY_NAME, hosts, str(tmp_path), hosts=hosts)
    assert found == ["trained: True"] * 2


def test_the_environment_of_a_launch_is_enough_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    two_hosts = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for size in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        with pytest.raises(
            ConfigError, match=r"localhost, whose name resolves to .*Set GLOO_SOCKET_IFNAME on every host"
        ):
            check_launch({"WORLD_SIZE": "4", size: "2"})
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(ConfigError, match="whose name has no address of this host"):
        check_launch(two_hosts)
    for fine in (
        {**two_hosts, "GLOO_SOCKET_IFNAME": "eth0"},
        {"WORLD_SIZE": "2", "LOCAL_SIZE": "2"},
        {"WORLD_SIZE": "2"},
    ):
        check_launch(fine)
