"""Save and restore what a layer is beyond its weights: how it was changed since it was built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_dynmo.engine.comm.replicas import is_per_replica
from ds_dynmo.engine.deepspeed.module import is_split
from ds_dynmo.engine.save.initial_model import (
    IsShared,
    LayerOrigin,
    aliases_of,
    never_shared,
    plain_attributes,
)
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.layer_record import take_over
from ds_dynmo.engine.state.optimizer_state import OptimizerState, tensors_in
from ds_dynmo.engine.state.pieces import PER_PARAMETER, StatePieces
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files.checkpoints import REPLICA_OWN
from ds_dynmo.files.digests import digest
from ds_dynmo.torch_private import buffers_of, non_persistent_of, parameters_of, set_buffers
from ds_dynmo.unmarked import unmarked

Extras = dict[str, Any]
Shapes = dict[str, list[int]]
_EXTRAS = {"parameters", "aliases", "buffers", "non_persistent", "retyped", "attributes", "changed", "weights"}
_TRAINABLE_CHANGED = "changed"  # of a parameter: whether ``requires_grad`` differs from when the layer was built
_CHANGED_ATTRIBUTES = "changed"  # of the layer: per submodule, the attributes that differ from then


@dataclass(frozen=True)
class LoadedLayer:
    """A layer as it was saved.

    Attributes:
        state: its ``state_dict``.
        extras: what :func:`extras_of` found; None in a checkpoint of stock DeepSpeed.
    """

    state: dict[str, Any]
    extras: Extras | None


def extras_of(
    module: nn.Module,
    origin: LayerOrigin,
    *,
    weights: bool,
    all_buffers: bool = True,
    is_shared: IsShared = never_shared,
) -> Extras:
    """Find what the file of a layer's weights lacks.

    Args:
        weights: include the weights: DeepSpeed writes no file of this layer.
        all_buffers: True: save every buffer, because DeepSpeed saves only replica 0's. False: replace a buffer that the
            weights file has by its shape, unless it shares memory.
        is_shared: says which values do not belong to the layer alone. They are not saved.
    """
    named = dict(module.named_parameters())
    attributes = {path: dict(plain_attributes(sub, is_shared)) for path, sub in module.named_modules()}
    in_weights = set[int]() if all_buffers else _in_weights_alone(module, attributes)
    found: Extras = {
        "parameters": {
            name: {
                "shape": list(parameter.shape),
                "requires_grad": parameter.requires_grad,
                _TRAINABLE_CHANGED: origin.trainable.get(name) != parameter.requires_grad,
                "split": is_split(parameter),  # over tensor-parallel slices: clipping counts all of them
            }
            for name, parameter in named.items()
        },
        "aliases": aliases_of(module),
        "buffers": {path: _buffers(sub, in_weights) for path, sub in module.named_modules()},
        "non_persistent": {path: sorted(non_persistent_of(sub)) for path, sub in module.named_modules()},
        "retyped": [
            *(name for name, parameter in named.items() if parameter.dtype != origin.dtype(name)),
            *(name for name, buffer in module.named_buffers() if buffer.dtype != origin.dtypes.get(name)),
        ],
        "attributes": attributes,
        _CHANGED_ATTRIBUTES: {
            path: changed_attributes(sub, origin.attributes.get(path, {}), is_shared)
            for path, sub in module.named_modules()
        },
        "weights": dict(module.state_dict()) if weights else None,
    }
    return compact(found)  # type: ignore[no-any-return]


def _buffers(module: nn.Module, in_weights: Container[int]) -> dict[str, torch.Tensor | list[int] | None]:
    """Collect the buffers of a module; of those that the file of the weights has, the shapes."""
    found: dict[str, torch.Tensor | list[int] | None] = dict.fromkeys(buffers_of(module))
    for name, buffer in buffers_of(module).items():
        if buffer is not None:
            found[name] = list(buffer.shape) if id(buffer) in in_weights else unmarked(buffer)
    return found


def _in_weights_alone(module: nn.Module, attributes: Any) -> set[int]:
    """Find by ``id`` the buffers in the ``state_dict`` that share no memory: two files would split shared memory."""
    buffers = [buffer for sub in module.modules() for buffer in buffers_of(sub).values() if buffer is not None]
    uses = Counter(_memory(tensor) for tensor in [*buffers, *tensors_in(attributes)])
    state = module.state_dict(keep_vars=True)
    return {id(b) for name, b in module.named_buffers() if state.get(name) is b and uses[_memory(b)] == 1}


def _memory(tensor: torch.Tensor) -> int:
    """Return a key of the memory of a tensor. An empty or a sparse one is taken to share none."""
    data = unmarked(tensor)
    strided = data.layout == torch.strided and data.numel() > 0
    return data.untyped_storage().data_ptr() if strided else -id(tensor)


def changed_attributes(module: nn.Module, built: dict[str, str], is_shared: IsShared = never_shared) -> list[str]:
    """Find the plain attributes that differ from when the layer was built."""
    return [name for name, value in plain_attributes(module, is_shared) if digest(value) != built.get(name)]


def present_shapes(module: nn.Module) -> Shapes:
    """List the present shapes of a layer's parameters and buffers."""
    return {name: list(tensor.shape) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def digests_of_frozen(module: nn.Module) -> dict[str, str]:
    """Hash the frozen weights of a layer, by name, except those of each replica's own."""
    named = module.named_parameters()
    return {name: digest(unmarked(p)) for name, p in named if not p.requires_grad and not is_per_replica(p)}


def check_left_out(module: nn.Module, left_out: Mapping[str, str], path: str) -> None:
    """Refuse a layer in which frozen weights that would stay differ from those that were left out of a file.

    Args:
        left_out: digests of the latter, by name.

    Raises:
        CheckpointError: naming a weight.
    """
    present = dict(module.named_parameters())
    for name, saved in left_out.items():
        if name not in present or digest(unmarked(present[name])) != saved:
            raise CheckpointError(
                f"{path}: lacks {name}, which was frozen and left out, and the one that would stay has other values or "
                "another dtype: build the model from the same weights, in the same precision, as when it was saved"
            )


def check_state(
    loaded: LoadedLayer,
    origin: LayerOrigin,
    present: Shapes,
    *,
    strict: bool,
    frozen_excluded: bool,
    path: str,
) -> None:
    """Refuse files that do not fit the layer.

    Args:
        present: the layer's :func:`present_shapes`, from the rank that has it.

    Raises:
        CheckpointError: with what was found and what was expected.
    """
    state, extras = loaded.state, loaded.extras
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, expected the state_dict of a layer")
    if extras is not None and not (isinstance(extras, dict) and extras.keys() >= _EXTRAS):
        raise CheckpointError(f"{path}: ds_dynmo's file of this layer lacks some of {sorted(_EXTRAS)}")
    if extras is None:
        kept = {name: shape for name, shape in present.items() if name in state and name not in origin.shapes}
        expected: dict[str, Any] = {**origin.state, **kept}
    else:
        expected = {name: about["shape"] for name, about in extras["parameters"].items()}
        unknown = {name.rpartition(".")[0] for name in [*expected, *extras["aliases"]]} - origin.attributes.keys()
        if unknown:
            raise CheckpointError(f"{path}: the layer has no submodule {sorted(unknown)}")
        expected |= _shapes_in_weights(extras)
    parameters: dict[str, Any] = extras["parameters"] if extras is not None else origin.shapes
    frozen = {name for name, about in parameters.items() if not about["requires_grad"]} if extras is not None else set()
    missing = [name for name in expected if name not in state and not (frozen_excluded and name in frozen)]
    unexpected = [name for name in state if name not in expected] if extras is None else []
    if strict and (missing or unexpected):
        raise CheckpointError(f"{path}: lacks {missing}, and has {unexpected}, which the layer lacks")
    for name, shape in expected.items():
        value = state.get(name)
        if shape is not None and value is not None and not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, expected a tensor of shape {shape}")
        if isinstance(value, torch.Tensor) and shape is not None and list(value.shape) != shape:
            raise CheckpointError(f"{path}: {name} has shape {list(value.shape)}, expected {shape}")
    for name in parameters.keys() - state.keys():
        if present.get(name) != expected[name]:
            raise CheckpointError(
                f"{path}: lacks {name}, which had shape {expected[name]}; the one that would stay has "
                f"{present.get(name)}"
            )


def _shapes_in_weights(extras: Extras) -> Shapes:
    """List the shapes of the buffers that the file of the weights has."""
    return {
        _join(path, name): buffer
        for path, buffers in extras["buffers"].items()
        for name, buffer in buffers.items()
        if isinstance(buffer, list)
    }


def install(
    module: nn.Module,
    loaded: LoadedLayer,
    origin: LayerOrigin,
    device: torch.device,
    *,
    strict: bool,
    is_shared: IsShared = never_shared,
) -> None:
    """Make ``module`` what was saved. Parameters stay the same objects where shape and dtype allow it."""
    extras = loaded.extras or _as_built(module, origin)
    subs = dict(module.named_modules())

    def dtype(name: str, saved: torch.dtype) -> torch.dtype:
        """Take the precision of this engine, unless the saved dtype was set at run time or is no float."""
        here = origin.dtype(name)
        follows = name not in extras["retyped"] and saved.is_floating_point and here.is_floating_point
        return here if follows else saved

    def buffer_of(name: str, saved: torch.Tensor | list[int] | None) -> torch.Tensor | None:
        buffer = loaded.state[name].to(device, copy=True) if isinstance(saved, list) else saved
        return None if buffer is None else buffer.to(dtype(name, buffer.dtype))

    for name, about in extras["parameters"].items():
        if name in loaded.state:
            _make_room(subs, name, about, dtype(name, loaded.state[name].dtype), device)
        _set_trainable(subs, name, about, built=origin.trainable.get(name))
    for name, owner in extras["aliases"].items():
        _assign(subs, name, module.get_parameter(owner))
    if strict:
        known = extras["parameters"].keys() | extras["aliases"].keys()
        for name in [name for name, _ in module.named_parameters(remove_duplicate=False) if name not in known]:
            _assign(subs, name, None)
    buffers = {path for path in extras["buffers"] if path in subs}
    skipped = {_join(path, name) for path in buffers for name in extras["buffers"][path]}
    module.load_state_dict({n: v for n, v in loaded.state.items() if n not in skipped}, strict=False)
    for path in buffers:
        saved = {
            name: _marked_as(buffers_of(subs[path]).get(name), buffer_of(_join(path, name), buffer))
            for name, buffer in extras["buffers"][path].items()
            if not isinstance(buffer, list) or _join(path, name) in loaded.state
        }
        kept = {} if strict else buffers_of(subs[path])
        set_buffers(subs[path], {**kept, **saved}, set(extras["non_persistent"][path]))
    for path in extras["attributes"].keys() & subs.keys():
        present = changed_attributes(subs[path], origin.attributes.get(path, {}), is_shared)
        changed = {*extras[_CHANGED_ATTRIBUTES][path], *present}
        for name, value in extras["attributes"][path].items():
            here = vars(subs[path]).get(name)
            if name in changed and not is_shared(here):
                subs[path].__dict__[name] = _marked_as(here, value)


def _marked_as(present: Any, value: Any) -> Any:
    """Set the program's attributes of a tensor on the one that replaces it: a checkpoint does not have them."""
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        vars(value).update(vars(present))
    return value


def _as_built(module: nn.Module, origin: LayerOrigin) -> Extras:
    """Make the extras that a checkpoint of stock DeepSpeed lacks: shapes are as built, the rest stays."""
    return {
        "parameters": {name: {"shape": shape} for name, shape in origin.shapes.items()},
        "aliases": {
            name: name for name, _ in module.named_parameters(remove_duplicate=False) if name not in origin.shapes
        },
        "buffers": {},
        "retyped": [],
        "attributes": {},
    }


def _make_room(
    subs: dict[str, nn.Module], name: str, about: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Set a parameter of the saved shape and ``dtype`` in the layer; keep the present one if it has them."""
    path, _, leaf = name.rpartition(".")
    present = parameters_of(subs[path]).get(leaf)
    if present is not None and list(present.shape) == about["shape"] and present.dtype == dtype:
        return
    parameter = nn.Parameter(torch.zeros(about["shape"], dtype=dtype, device=device), requires_grad=False)
    parameter.requires_grad = about.get("requires_grad", True) if present is None else present.requires_grad
    if present is not None:
        take_over(parameter, present)
    if about.get("split"):
        parameter.model_parallel = True  # type: ignore[attr-defined]
    _assign(subs, name, parameter)


def _set_trainable(subs: dict[str, nn.Module], name: str, about: dict[str, Any], built: bool | None) -> None:
    path, _, leaf = name.rpartition(".")
    parameter = parameters_of(subs[path])[leaf]
    assert parameter is not None
    if "requires_grad" in about and (about[_TRAINABLE_CHANGED] or parameter.requires_grad != built):
        parameter.requires_grad = about["requires_grad"]
        if not about["requires_grad"]:
            parameter.grad = None


def _assign(subs: dict[str, nn.Module], name: str, parameter: nn.Parameter | None) -> None:
    path, _, leaf = name.rpartition(".")
    sub = subs[path]
    buffers_of(sub).pop(leaf, None)
    vars(sub).pop(leaf, None)
    parameters_of(sub)[leaf] = parameter


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def compact(value: Any) -> Any:
    """Copy all tensors in ``value`` that are parts of larger storages, and leave out what is set on tensors.

    ``torch.save`` writes the whole storage of a tensor: of a weight, or of a view of one, that is the flat buffer of a
    stage. A tensor that occurs twice stays one tensor.
    """
    return _compact(value, {})


def _compact(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            data = unmarked(value)
            is_part = data.layout == torch.strided and data.untyped_storage().nbytes() > data.nbytes
            copies[id(value)] = data.clone() if is_part else data
        return copies[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_compact(item, copies) for item in value)
    if type(value) is dict:
        return {key: _compact(item, copies) for key, item in value.items()}
    return value


# -- parameters that differ between replicas ----------------------------------------------------------


def add_per_replica(extras: Extras, module: nn.Module, state: OptimizerState) -> Extras:
    """Add weights and optimizer state of per-replica parameters to the ``extras`` of a layer.

    State in flat shards is not added: DeepSpeed's file of the rank has it.
    """
    parameters = {name: parameter for name, parameter in module.named_parameters() if is_per_replica(parameter)}
    content = {
        name: {"weight": unmarked(p), "state": state.state_of(p) if state.storage == PER_PARAMETER else {}}
        for name, p in parameters.items()
    }
    return {**extras, REPLICA_OWN: compact(content)} if parameters else extras


def replica_weights(layer: LoadedLayer) -> LoadedLayer:
    """Replace weights of another replica, as DeepSpeed's file has them, by this replica's."""
    weights = {name: content["weight"] for name, content in _per_replica_content(layer)}
    return LoadedLayer({**layer.state, **weights}, layer.extras) if weights else layer


def replica_optimizer_state(layer: int, loaded: LoadedLayer, pieces: StatePieces) -> None:
    """Replace state of another replica, kept per parameter, by this replica's.

    Args:
        layer: the number of the layer that was ``loaded``.
    """
    for name, content in _per_replica_content(loaded):
        key = ParamKey(layer, name)
        pieces.elements.pop(key, None)
        pieces.values.pop(key, None)
        if content["state"]:
            pieces.put(key, content["state"], content["weight"].shape)


def _per_replica_content(layer: LoadedLayer) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from (layer.extras or {}).get(REPLICA_OWN, {}).items()
