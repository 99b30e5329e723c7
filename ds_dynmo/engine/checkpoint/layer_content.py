"""What a layer is now beyond its weights: how it was changed since it was built. Taken out, and put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

from ds_dynmo.engine.checkpoint.origin import LayerOrigin, digest, plain_attributes
from ds_dynmo.errors import CheckpointError

Extras = dict[str, Any]
_EXTRAS = {"parameters", "aliases", "buffers", "non_persistent", "attributes", "changed", "weights"}


@dataclass(frozen=True)
class LoadedLayer:
    """A layer as its files say it was.

    Attributes:
        state: its ``state_dict``.
        extras: what :func:`extras_of` took out of it; None in a checkpoint of stock DeepSpeed's.
    """

    state: dict[str, Any]
    extras: Extras | None


def extras_of(module: nn.Module, origin: LayerOrigin, *, weights: bool) -> Extras:
    """What DeepSpeed's file of a layer lacks. ``weights``: DeepSpeed writes no file of this layer, so all of it."""
    named = dict(module.named_parameters())
    first_name = {id(parameter): name for name, parameter in named.items()}
    return {
        "parameters": {
            name: {
                "shape": list(parameter.shape),
                "dtype": parameter.dtype,
                "requires_grad": parameter.requires_grad,
                "changed": origin.trainable.get(name) != parameter.requires_grad,
                "split": is_model_parallel_parameter(parameter),  # over slices: clipping counts them all
            }
            for name, parameter in named.items()
        },
        "aliases": {
            name: first_name[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name not in named
        },
        "buffers": {path: _buffers(sub) for path, sub in module.named_modules()},
        "non_persistent": {path: sorted(sub._non_persistent_buffers_set) for path, sub in module.named_modules()},
        "attributes": {path: dict(plain_attributes(sub)) for path, sub in module.named_modules()},
        "changed": {
            path: changed_attributes(sub, origin.attributes.get(path, {})) for path, sub in module.named_modules()
        },
        "weights": module.state_dict() if weights else None,
    }


def _buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if buffer is None else buffer.detach() for name, buffer in module._buffers.items()}


def changed_attributes(module: nn.Module, built: dict[str, str]) -> list[str]:
    """Plain attributes that are not what they were when the layer was built."""
    return [name for name, value in plain_attributes(module) if digest(value) != built.get(name)]


def check_state(loaded: LoadedLayer, origin: LayerOrigin, *, strict: bool, frozen_excluded: bool, path: str) -> None:
    """Refuse a layer's files where they do not fit the layer.

    Raises:
        CheckpointError: with what was found and what was expected.
    """
    state, extras = loaded.state, loaded.extras
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, expected the state_dict of a layer")
    if extras is not None and not (isinstance(extras, dict) and extras.keys() >= _EXTRAS):
        raise CheckpointError(f"{path}: the file of ours beside it lacks some of {sorted(_EXTRAS)}")
    if extras is None:
        expected: dict[str, Any] = origin.state
    else:
        expected = {name: about["shape"] for name, about in extras["parameters"].items()}
        unknown = {name.rpartition(".")[0] for name in expected} - origin.attributes.keys()
        if unknown:
            raise CheckpointError(f"{path}: the layer has no submodule {sorted(unknown)}")
    missing = [
        name
        for name in expected
        if name not in state and not (frozen_excluded and extras and not extras["parameters"][name]["requires_grad"])
    ]
    unexpected = [name for name in state if name not in expected] if extras is None else []
    if strict and (missing or unexpected):
        raise CheckpointError(f"{path}: lacks {missing} and has {unexpected}, which the layer does not")
    for name, shape in expected.items():
        value = state.get(name)
        if isinstance(value, torch.Tensor) and shape is not None and list(value.shape) != shape:
            raise CheckpointError(f"{path}: {name} has shape {list(value.shape)}, expected {shape}")


def install(module: nn.Module, loaded: LoadedLayer, origin: LayerOrigin, *, strict: bool) -> None:
    """Make ``module`` what its files say. Parameters keep their identity where shape and dtype allow it."""
    extras = loaded.extras or _as_built(module, loaded.state, origin)
    subs = dict(module.named_modules())
    for name, about in extras["parameters"].items():
        _install_parameter(subs, name, about, built=origin.trainable.get(name))
    for name, owner in extras["aliases"].items():
        _assign(subs, name, module.get_parameter(owner))
    if strict:
        known = extras["parameters"].keys() | extras["aliases"].keys()
        for name in [name for name, _ in module.named_parameters(remove_duplicate=False) if name not in known]:
            _assign(subs, name, None)
    buffers = {path for path in extras["buffers"] if path in subs}
    skipped = {f"{path}.{name}".lstrip(".") for path in buffers for name in extras["buffers"][path]}
    module.load_state_dict({n: v for n, v in loaded.state.items() if n not in skipped}, strict=False)
    for path in buffers:
        sub, saved = subs[path], extras["buffers"][path]
        sub._buffers = dict(saved) if strict else {**sub._buffers, **saved}
        sub._non_persistent_buffers_set = set(extras["non_persistent"][path])
    for path in extras["attributes"].keys() & subs.keys():
        changed = {*extras["changed"][path], *changed_attributes(subs[path], origin.attributes.get(path, {}))}
        for name, value in extras["attributes"][path].items():
            if name in changed:
                subs[path].__dict__[name] = value


def _as_built(module: nn.Module, state: dict[str, Any], origin: LayerOrigin) -> Extras:
    """A checkpoint of DeepSpeed's says nothing but weights: shapes are as built, the rest stays as it is."""
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    return {
        "parameters": {
            name: {"shape": shape, "dtype": dtypes.get(name, getattr(state.get(name), "dtype", None)), "changed": False}
            for name, shape in origin.shapes.items()
        },
        "aliases": {
            name: name for name, _ in module.named_parameters(remove_duplicate=False) if name not in origin.shapes
        },
        "buffers": {},
        "attributes": {},
    }


def _install_parameter(subs: dict[str, nn.Module], name: str, about: dict[str, Any], built: bool | None) -> None:
    path, _, leaf = name.rpartition(".")
    present = subs[path]._parameters.get(leaf)
    parameter = present
    if present is None or list(present.shape) != about["shape"] or present.dtype != about["dtype"]:
        device = next((p.device for sub in subs.values() for p in sub.parameters()), torch.device("cpu"))
        parameter = nn.Parameter(torch.zeros(about["shape"], dtype=about["dtype"], device=device), requires_grad=False)
        parameter.requires_grad_(about.get("requires_grad", True) if present is None else present.requires_grad)
        if present is not None:
            vars(parameter).update(vars(present))
        if about.get("split"):
            parameter.model_parallel = True  # type: ignore[attr-defined]
        _assign(subs, name, parameter)
    assert parameter is not None
    if "requires_grad" in about and (about["changed"] or parameter.requires_grad != built):
        parameter.requires_grad_(about["requires_grad"])
        if not about["requires_grad"]:
            parameter.grad = None


def _assign(subs: dict[str, nn.Module], name: str, parameter: nn.Parameter | None) -> None:
    path, _, leaf = name.rpartition(".")
    sub = subs[path]
    sub._buffers.pop(leaf, None)
    vars(sub).pop(leaf, None)
    sub._parameters[leaf] = parameter
