"""Find out, before anything is built, whether all ranks of a launch were given the same.

Each of them reads its own files: one whose host has others would train on, with other numbers than the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import BoundedStore, meet
from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import default_store

TIMEOUT_SECONDS = 60.0  # the ranks have met already


def check_same(facts: Mapping[str, str]) -> None:
    """Refuse ranks whose facts differ. Collective.

    Nothing comes of it if a rank does not take part within the time-out: what follows says so.

    Args:
        facts: by name, a short text that has to be the same on every rank.

    Raises:
        ConfigError: on every rank: names what differs, and which ranks have what.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = BoundedStore(default_store(), TIMEOUT_SECONDS)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    turn = (store.add("ds_dynmo/same/calls", 1) - 1) // world_size
    part = f"ds_dynmo/same/{turn}"
    try:
        store.set(f"{part}/{rank}", json.dumps(dict(facts)))
        if rank == 0:
            keys = [f"{part}/{number}" for number in range(world_size)]
            store.wait(keys, timeout)
            store.set(f"{part}/found", "; ".join(differences([json.loads(store.get(key)) for key in keys])))
        store.wait([f"{part}/found"], timeout)
        found = store.get(f"{part}/found").decode()
    except RuntimeError:
        return
    with suppress(RuntimeError):  # the process that has the store may end only when all have read it
        meet(store, f"{part}/read", world_size, timeout)
    if found:
        raise ConfigError(f"ranks were not given the same: {found}")


def differences(every: Sequence[Mapping[str, str]]) -> list[str]:
    """Say of each fact that is not the same on every rank which ranks have what."""
    found = []
    for name in dict.fromkeys(name for facts in every for name in facts):
        ranks = ranks_by([facts.get(name, "nothing") for facts in every])
        if len(ranks) > 1:
            found.append(f"{name}: {', '.join(f'{value} on ranks {having}' for value, having in ranks.items())}")
    return found


def ranks_by(values: Sequence[str]) -> dict[str, list[int]]:
    """List the ranks that have each value; ``values`` are by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks
