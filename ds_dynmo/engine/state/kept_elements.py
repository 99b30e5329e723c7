"""Reduction of parameters to some of their elements, which saves memory of weights, gradients and optimizer state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ds_dynmo.engine import validation
from ds_dynmo.engine.comm.replicas import is_per_replica
from ds_dynmo.engine.deepspeed.module import is_split
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.layer_record import take_over
from ds_dynmo.engine.state.optimizer_state import select
from ds_dynmo.errors import ConfigError, MigrationError
from ds_dynmo.torch_private import parameters_of
from ds_dynmo.unmarked import unmarked

Kept = Sequence[tuple[nn.Module, str, torch.Tensor]]
_CALL = "engine.keep_elements"
_SAME = f"{_CALL}: ranks that hold copies of the same parameters keep the same elements (by hash)"


def refusal(stage: StageContext) -> str | None:
    """Return why elements of parameters cannot be removed; None: they can."""
    optimizer = stage.optimizer.inner
    return None if optimizer is None else validation.not_elementwise(optimizer)


def keep_elements(stage: StageContext, kept: Kept, *, is_moving: bool) -> None:
    """Reduce parameters to some of their elements, as 1-D parameters: ``engine.keep_elements``. Collective.

    Args:
        kept: modules of this stage, each with the name of its parameter and the places of the elements to keep.
        is_moving: whether layers are travelling.

    Raises:
        ConfigError: on every rank that calls; nothing has changed.
        MigrationError: on every rank that can still raise it; parameters had begun to change.
    """
    if stage.chunks.active is not None:
        raise ConfigError(f"{_CALL} was called inside a batch: call it between two batches, on every rank")
    if not is_moving:
        stage.optimizer.match_layers("keep_elements")
    comm = stage.comm
    comm.enter("keep_elements")

    def find() -> tuple[_ElementSelection, list[nn.Parameter]]:
        _check_state(stage, is_moving)
        selection = _ElementSelection(stage)
        for module, name, index in kept:
            selection.add(module, name, index)
        return selection, [_shorter(parameter, index) for *_, parameter, index in selection.entries.values()]

    selection, shorter = comm.everywhere(_CALL, find, error=ConfigError)
    for split, within in ((True, comm.here.in_slice_of_stage), (False, comm.here.in_stage)):
        comm.everywhere(_SAME, partial(selection.digest, split=split), same=str, compared_in=within, error=ConfigError)
    if not comm.max_over_world(torch.tensor([len(shorter)], device="cpu")).item():
        return
    try:
        _replace_parameters(stage, selection, shorter)
        stage.comm.all_done()
    except Exception as error:
        raise MigrationError(
            f"rank {comm.here.rank} failed in {_CALL}: {error}. Parameters had begun to change: resume the "
            "job from its last checkpoint"
        ) from error


def _check_state(stage: StageContext, is_moving: bool) -> None:
    if (problem := refusal(stage)) is not None:
        raise ConfigError(problem)
    if is_moving:
        raise ConfigError("layers are on their way to other stages: call it when they have arrived")
    stage.optimizer.check()
    if stage.optimizer.adapter is not None and stage.optimizer.adapter.holds_gradients:
        raise ConfigError("the optimizer's flat buffers hold gradients of a batch: call it after the optimizer's step")


class _ElementSelection:
    """The parameters of a stage to reduce, each checked.

    Attributes:
        entries: by layer and name: module, name there, parameter and the places of the elements to keep.
    """

    def __init__(self, stage: StageContext) -> None:
        layers = stage.layers
        self._places: dict[int, tuple[int, str]] = {}
        self._users: dict[int, list[tuple[int, str]]] = {}
        for layer, whole in layers.modules().items():
            for path, module in whole.named_modules():
                self._places[id(module)] = layer, path
                for name, parameter in parameters_of(module).items():
                    self._users.setdefault(id(parameter), []).append((layer, f"{path}.{name}".lstrip(".")))
        self._tied = {id(parameter) for parameter in layers.tied_parameters()}
        self.entries: dict[ParamKey, tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = {}

    def add(self, module: nn.Module, name: str, index: torch.Tensor) -> None:
        """Add a parameter.

        Raises:
            ConfigError: it cannot be reduced; with the layer, the name and the reason.
        """
        place = self._places.get(id(module))
        if place is None:
            raise ConfigError(f"{name!r} of a {type(module).__name__}, which is in no layer of this stage")
        layer, path = place
        key = ParamKey(layer, f"{path}.{name}".lstrip("."))
        where = f"layer {layer}: {key.name}"
        parameter = parameters_of(module).get(name)
        if parameter is None:
            raise ConfigError(f"{where} is no parameter; {type(module).__name__} has {[*parameters_of(module)]}")
        if key in self.entries:
            raise ConfigError(f"{where} is given twice")
        self._check_alone(where, parameter)
        self.entries[key] = module, name, parameter, _checked(where, parameter, index)

    def _check_alone(self, where: str, parameter: nn.Parameter) -> None:
        if id(parameter) in self._tied:
            raise ConfigError(f"{where} is tied: its copies on other stages would keep all elements")
        if is_per_replica(parameter):
            raise ConfigError(f"{where} is each replica's own: other elements could stay on each")
        users = self._users[id(parameter)]
        if len(users) > 1:
            raise ConfigError(f"{where} has other names too, {[name for _, name in users]}: register it once")

    def digest(self, *, split: bool) -> str:
        """Hash the selection of parameters that slices split, or of the others, for comparison between ranks."""
        digest = hashlib.sha256()
        for key, (*_, parameter, index) in sorted(self.entries.items(), key=lambda entry: entry[0]):
            if is_split(parameter) is not split:
                continue
            digest.update(repr((key, len(index))).encode())
            digest.update(index.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


def _checked(where: str, parameter: nn.Parameter, index: torch.Tensor) -> torch.Tensor:
    """Return the places as int64, on the parameter's device.

    Raises:
        ConfigError: they are not ascending places in the flattened parameter.
    """
    if parameter.ndim == 0:
        raise ConfigError(f"{where} has one element and no dimension: there are none to choose from")
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int32, torch.int64) or index.ndim != 1:
        what = f"{list(index.shape)} of {index.dtype}" if isinstance(index, torch.Tensor) else type(index).__name__
        raise ConfigError(f"{where}: the index is {what}; allowed is a 1-D tensor of int32 or int64")
    places = unmarked(index).to(parameter.device, torch.int64)
    if len(places) and (int(places[0]) < 0 or int(places[-1]) >= parameter.numel()):
        raise ConfigError(
            f"{where}: the index goes from {int(places[0])} to {int(places[-1])}; allowed are 0 to "
            f"{parameter.numel() - 1}, places in the flattened parameter of shape {list(parameter.shape)}"
        )
    if not bool((places[1:] > places[:-1]).all()):
        raise ConfigError(f"{where}: the index is not in ascending order, each place once")
    return places


def _replace_parameters(stage: StageContext, selection: _ElementSelection, shorter: Sequence[nn.Parameter]) -> None:
    entries = selection.entries
    if entries:
        before = stage.layers.named_parameters()
        pieces = stage.state.export(before, {key: places for key, (*_, places) in entries.items()})
        for (module, name, *_), parameter in zip(entries.values(), shorter):
            parameters_of(module)[name] = parameter
        stage.optimizer.name_parameters()
        stage.state.load(before, stage.layers.named_parameters(), pieces)
    for _, _, old, _ in entries.values():  # other references to the old parameter must not keep its memory
        old.data, old.grad = old.data.new_empty(0), None
    stage.parameters_replaced.publish(None)  # on every rank: stages announce shapes of activations again


def _shorter(old: nn.Parameter, index: torch.Tensor) -> nn.Parameter:
    """Build the parameter that replaces ``old``, with its gradient, attributes and hooks."""
    new = nn.Parameter(select(old, index), requires_grad=old.requires_grad)
    new.grad = None if old.grad is None else select(old.grad, index)
    take_over(new, old)
    return new
