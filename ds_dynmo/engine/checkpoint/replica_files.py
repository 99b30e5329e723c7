"""Parameters of which every replica has others: DeepSpeed writes one replica's, so each adds its own to our files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ds_dynmo.engine.checkpoint.compact import compact
from ds_dynmo.engine.checkpoint.layer_content import Extras, LoadedLayer
from ds_dynmo.engine.checkpoint.layout import Key, Manifest
from ds_dynmo.engine.checkpoint.optimizer_files import LoadedState
from ds_dynmo.engine.comm.replicas import is_own
from ds_dynmo.engine.optimizer.state import OptimizerState
from ds_dynmo.errors import CheckpointError

_OWN = "replica_own"


def add_own(extras: Extras, module: nn.Module, state: OptimizerState) -> Extras:
    """``extras`` of a layer with weights and optimizer state of the parameters that are this replica's own."""
    own = {name: parameter for name, parameter in module.named_parameters() if is_own(parameter)}
    content = {name: {"weight": p.detach(), "state": state.state_of(p)} for name, p in own.items()}
    return {**extras, _OWN: compact(content)} if own else extras


def own_weights(layer: LoadedLayer) -> LoadedLayer:
    """``layer`` with this replica's weights where DeepSpeed's file has another's."""
    weights = {name: content["weight"] for name, content in _own(layer)}
    return LoadedLayer({**layer.state, **weights}, layer.extras) if weights else layer


def own_optimizer_state(layer: int, loaded: LoadedLayer, optimizer: LoadedState) -> None:
    """Put this replica's state into ``optimizer``, where DeepSpeed's file has another's. ``layer``: its number."""
    for name, content in _own(loaded):
        key: Key = (layer, name)
        optimizer.state.pop(key, None)
        if content["state"]:
            optimizer.state[key] = content["state"]


def _own(layer: LoadedLayer) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from (layer.extras or {}).get(_OWN, {}).items()


def check_replicas(manifest: Manifest, replicas: int, differ: bool, path: str) -> None:
    """Refuse another number of replicas where they differ, as saved or here (``differ``).

    Raises:
        CheckpointError: naming both.
    """
    if (manifest.replicas_differ or differ) and manifest.replicas != replicas:
        raise CheckpointError(
            f"{path}: written with {manifest.replicas} data-parallel replicas, expected {replicas}: each holds "
            "parameters of its own (such as its share of experts), which are not shared out anew"
        )
