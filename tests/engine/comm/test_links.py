"""Several hosts: links that fail silently, and names that no other host can use."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import ds_dynmo
from ds_dynmo.engine.comm import watch
from ds_dynmo.engine.comm.hosts import check_launch
from ds_dynmo.errors import ConfigError
from tests.support.configs import Case
from tests.support.harness import run
from tests.support.namespaces import Network, network
from tests.support.training import batches, build

pytestmark = pytest.mark.ranks

OURS, THEIRS = 2.0, 4.0  # timeouts in seconds: of our collectives, and of the default group
SHORT = [("while layers move", 2)]
LOST = "RankLostError: rank [012],? .* has ended( or was stopped)?(, or the link to its host is cut)?\\. There is no"
NOT_THERE = "RankLostError: (ranks .* did not come to the new world|rank 0 .* has ended)"
ENDS = {  # the error of a rank at work, or of one that was released
    "before a rebalance": LOST,
    "while layers move": LOST,
    "as the new world begins": f"MigrationError: the re-packing failed after .* Resume|released|{LOST}|{NOT_THERE}",
    "before a batch": LOST,
}
RELEASED = 1  # the rank that a re-packing to two stages releases: the others can train without it
ENDS_WITHOUT_RELEASED = {"as the new world begins": "nothing was raised|released"}


def _now(engine: Any, pull: Callable[[], None]) -> None:
    engine.stage.comm.gather_objects(None)
    pull()


def _before_a_rebalance(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    _now(engine, pull)
    engine.rebalance([0, 4, 6, 8])


def _before_a_batch(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    _now(engine, pull)
    engine.train_batch(data)


def _first(pull: Callable[[], None], owner: Any, name: str) -> None:
    """Pull the cable when ``name`` is called."""
    function = getattr(owner, name)

    def pulled(*args: Any, **kwargs: Any) -> Any:
        pull()
        return function(*args, **kwargs)

    setattr(owner, name, pulled)


def _while_layers_move(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    _first(pull, engine.stage.comm.p2p, "exchange_headers")
    engine.repack(2)


def _as_the_new_world_begins(engine: Any, data: Any, pull: Callable[[], None]) -> None:
    _first(pull, dist, "init_process_group")
    engine.repack(2)


MOMENTS: dict[str, Callable[[Any, Any, Callable[[], None]], None]] = {
    "before a rebalance": _before_a_rebalance,
    "while layers move": _while_layers_move,
    "as the new world begins": _as_the_new_world_begins,
    "before a batch": _before_a_batch,
}


def train_and_cut(case: Case, network: Network, victim: int, moment: str) -> str:
    """Train, pull the cable of ``victim`` at this moment, and return the error of this rank."""
    watch.grace_seconds = lambda timeout_seconds: 60.0  # the rank's error is wanted
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    rank = engine.global_rank

    def pull() -> None:
        if rank == victim:
            network.pull_cable(victim)

    try:
        MOMENTS[moment](engine, data, pull)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "released" if engine.released else "nothing was raised"


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        pytest.param(moment, victim, marks=() if (moment, victim) in SHORT else pytest.mark.nightly)
        for moment in ENDS
        for victim in range(3)
    ],
)
def test_every_rank_ends_with_an_error_when_a_cable_is_pulled(moment: str, victim: int) -> None:
    """A rank without a cable cannot reach the store. That neither hides the error nor blocks the rank."""
    case = Case(stages=3, start=(0, 3, 5, 8), dynmo={"interval": 0, "timeout_seconds": OURS})
    timeout = timedelta(seconds=THEIRS)
    with network(3) as hosts:
        ends = run(
            3,
            train_and_cut,
            case,
            hosts,
            victim,
            moment,
            seconds=60,
            hosts=hosts,
            group_timeout=timeout,
            complete=False,
        )
    expected = ENDS | (ENDS_WITHOUT_RELEASED if victim == RELEASED else {})
    assert all(re.match(expected[moment], end) for end in ends), ends


BY_NAME = Case(stages=2, dynmo={"interval": 0, "timeout_seconds": 30.0})


def start(case: Case, begun: str) -> str:
    """Build an engine where no interface was chosen before the default group began, and return the error.

    Args:
        begun: the backends of the default group, as the engine sees them: gloo has begun with it, or begins later.
    """
    initialize = ds_dynmo.initialize

    def without_interface(**arguments: Any) -> Any:
        del os.environ["GLOO_SOCKET_IFNAME"]
        with patch.object(dist, "get_backend_config", lambda: begun):
            return initialize(**arguments)

    ds_dynmo.initialize = without_interface
    try:
        engine = build(case)
    except ConfigError as error:
        return str(error)
    loss = engine.train_batch(batches(engine)).item()
    return f"trained: {loss > 0}, by {os.environ.get('GLOO_SOCKET_IFNAME')}"


def test_a_name_that_resolves_to_loopback_is_refused_where_gloo_has_begun_by_it() -> None:
    """Debian's 127.0.1.1 would make each host tell the others to connect to themselves."""
    with network(2) as hosts:
        found = run(2, start, BY_NAME, "cpu:gloo", hosts=hosts)
    for message in found:
        assert "node0, whose name resolves to 127.0.1.1; node1, whose name resolves to 127.0.1.1" in message
        assert "Set GLOO_SOCKET_IFNAME" in message


def test_gloo_that_begins_with_the_engine_uses_the_interface_that_reaches_rank_0() -> None:
    """As with NCCL: the groups before are not gloo's."""
    with network(2) as hosts:
        found = run(2, start, BY_NAME, "cuda:nccl", hosts=hosts)
    assert found == ["trained: True, by eth0"] * 2


def test_names_that_resolve_to_an_address_of_the_host_are_accepted() -> None:
    with network(2, own_name="") as hosts:
        found = run(2, start, BY_NAME, "cpu:gloo", hosts=hosts)
    assert found == ["trained: True, by None"] * 2


def test_the_environment_of_a_launch_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = nowhere.invalid: no-such-host.invalid finds no host of this"):
        check_launch({"MASTER_ADDR": "nowhere.invalid"})
    for fine in (
        {"MASTER_ADDR": "127.0.0.1"},
        {**two_hosts, "GLOO_SOCKET_IFNAME": "eth0"},
        {"WORLD_SIZE": "2", "LOCAL_SIZE": "2"},
        {"WORLD_SIZE": "2"},
    ):
        check_launch(fine)
