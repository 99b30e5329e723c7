"""Check, before anything is built, that all ranks of a launch have the same inputs.

Each rank reads the files of its host. With different files it would train with other numbers than the rest, unnoticed.
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

    If a rank does not take part within the time-out, nothing is checked; a later collective reports the rank.

    Args:
        facts: by name, a short text that has to be the same on every rank.

    Raises:
        ConfigError: on every rank: names the facts that differ, and the ranks that have each value.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = BoundedStore(default_store(), TIMEOUT_SECONDS)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    prefix = f"ds_dynmo/same/{(store.add('ds_dynmo/same/calls', 1) - 1) // world_size}"
    mine = json.dumps(dict(facts))
    try:
        if rank == 0:
            store.set(f"{prefix}/first", mine)
        store.wait([f"{prefix}/first"], timeout)
        first = store.get(f"{prefix}/first").decode()
        if mine != first:
            store.set(f"{prefix}/other/{store.add(f'{prefix}/others', 1)}", json.dumps([rank, dict(facts)]))
        meet(store, f"{prefix}/done", world_size, timeout)
        numbers = range(1, store.add(f"{prefix}/others", 0) + 1)
        others = dict(json.loads(store.get(f"{prefix}/other/{number}")) for number in numbers)
    except RuntimeError:
        return
    with suppress(RuntimeError):  # so that the process with the store does not end before all have read it
        meet(store, f"{prefix}/read", world_size, timeout)
    if others:
        differing = differences([others.get(number, json.loads(first)) for number in range(world_size)])
        raise ConfigError(f"ranks were not given the same: {'; '.join(differing)}")


def differences(facts_of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Describe each fact that differs between ranks, with the ranks that have each value."""
    differing = []
    for name in dict.fromkeys(name for facts in facts_of_ranks for name in facts):
        ranks = ranks_by([facts.get(name, "nothing") for facts in facts_of_ranks])
        if len(ranks) > 1:
            differing.append(f"{name}: {', '.join(f'{value} on ranks {having}' for value, having in ranks.items())}")
    return differing


def ranks_by(values: Sequence[str]) -> dict[str, list[int]]:
    """List the ranks that have each value; ``values`` are by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks
