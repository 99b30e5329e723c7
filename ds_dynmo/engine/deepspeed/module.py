"""DeepSpeed's ``PipelineModule``: its layer list, and which range of it a stage holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

from ds_dynmo.torch_private import children_of

HOLDS_LAYERS = frozenset(  # attributes of a PipelineModule that hold its layers
    ("_layer_specs", "forward_funcs", "fwd_map", "tied_modules", "tied_comms", "tied_weight_attrs")
)
DEFAULT_BASE_SEED: int = inspect.signature(PipelineModule.__init__).parameters["base_seed"].default


LayerWrapper = Callable[[int, Callable[[Any], Any]], Callable[[Any], Any]]


@contextmanager
def runs_shown(module: Any, runs: Sequence[range], wrappers: Sequence[LayerWrapper]) -> Iterator[Callable[[int], None]]:
    """Let a PipelineModule run some of a stage's layers at a time; restore it afterwards.

    Args:
        runs: the numbers of all layers of the stage, in runs of consecutive layers.
        wrappers: each gets a layer's number and its function, and returns the function to call; the innermost first.

    Yields:
        A function that shows the run at a place.
    """
    attributes = vars(module)  # torch's own way to set one looks for parameters, and costs more than a small layer
    names = ["forward_funcs"]
    if len(runs) > 1:
        names += ["_local_start", "_local_stop", "is_checkpointable_results", "is_checkpointable_results_interval"]
    before = {name: attributes[name] for name in names}
    functions = list(module.forward_funcs)
    numbers = [number for run in runs for number in run]
    for wrap in wrappers:
        functions = [wrap(number, function) for number, function in zip(numbers, functions, strict=True)]
    shown: list[dict[str, Any]] = []
    try:
        begin = 0
        for run in runs:
            own = slice(begin, begin + len(run))
            shown.append({"forward_funcs": functions[own]})
            if len(runs) > 1:
                module.forward_funcs = before["forward_funcs"][own]
                module.is_checkpointable_results_interval = None  # or those of the other run would count
                module._precompute_checkpointable_values()
                shown[-1] |= {
                    "_local_start": run.start,
                    "_local_stop": run.stop,
                    "is_checkpointable_results": module.is_checkpointable_results,
                }
            begin += len(run)
        yield lambda place: attributes.update(shown[place])
    finally:
        attributes.update(before)


def layer_specs(module: Any) -> list[Any]:
    """Return what the user gave for each layer of the model: a LayerSpec, a module or a function."""
    specs: list[Any] = module._layer_specs
    return specs


_RUNS = "_ds_dynmo_runs"  # our attribute of a PipelineModule


def set_runs(module: Any, runs: Sequence[range]) -> None:
    """Record the runs of layers that this stage holds; DeepSpeed's bounds are those of the first, or the shown one."""
    setattr(module, _RUNS, tuple(runs))
    module._set_bounds(start=runs[0].start, stop=runs[0].stop)


def layers_of_stage(module: Any) -> list[int]:
    """Return the numbers of the layers that this stage holds."""
    bounds = range(module._local_start, module._local_stop)
    return [number for run in vars(module).get(_RUNS, (bounds,)) for number in run]


def modules_of(module: Any, layers: Iterable[int]) -> Iterator[tuple[int, nn.Module]]:
    """Iterate over ``(layer number, layer)`` of ``layers``, which this stage holds; plain functions are left out.

    Each use of a tied layer comes with the module that they share.
    """
    for layer in layers:
        spec = layer_specs(module)[layer]
        child = children_of(module).get(str(layer))
        if child is not None:
            yield layer, child
        elif isinstance(spec, TiedLayerSpec):
            yield layer, module.tied_modules[spec.key]


def has_deepspeeds_experts(module: nn.Module) -> bool:
    """Return whether a module has experts of ``deepspeed.moe``."""
    return any(isinstance(part, MoE | Experts) for part in module.modules())


def is_split(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is split over the tensor-parallel slices."""
    return bool(is_model_parallel_parameter(parameter))
