"""DeepSpeed's ``PipelineModule``: its layer list, and which range of it a stage holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

from ds_dynmo.torch_private import children_of

HOLDS_LAYERS = frozenset(  # attributes of a PipelineModule that hold its layers
    ("_layer_specs", "forward_funcs", "fwd_map", "tied_modules", "tied_comms", "tied_weight_attrs")
)


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
    bare, bounds = module.forward_funcs, (module._local_start, module._local_stop)
    functions = list(bare)
    numbers = [number for run in runs for number in run]
    for wrap in wrappers:
        functions = [wrap(number, function) for number, function in zip(numbers, functions, strict=True)]
    shown, begin = [], 0
    for run in runs:
        shown.append((functions[begin : begin + len(run)], run))
        begin += len(run)
    checkpointable: list[Any] = []

    def show(place: int) -> None:
        module.forward_funcs, run = shown[place]
        if len(shown) > 1:
            module._local_start, module._local_stop = run.start, run.stop
            module.is_checkpointable_results = checkpointable[place]

    try:
        if len(shown) > 1:
            begin = 0
            for run in runs:
                module.forward_funcs = bare[begin : begin + len(run)]
                module.is_checkpointable_results_interval = None  # or those of the other run would count
                module._precompute_checkpointable_values()
                checkpointable.append(module.is_checkpointable_results)
                begin += len(run)
        yield show
    finally:
        module.forward_funcs = bare
        if len(shown) > 1:
            module._local_start, module._local_stop = bounds
            module.is_checkpointable_results_interval = None


def layer_specs(module: Any) -> list[Any]:
    """Return what the user gave for each layer of the model: a LayerSpec, a module or a function."""
    specs: list[Any] = module._layer_specs
    return specs


def layers_of_stage(module: Any) -> Sequence[int]:
    """Return the numbers of the layers that this stage holds: those placed here, else those it was built with."""
    layers: Sequence[int] = vars(module).get("dynmo_layers", range(module._local_start, module._local_stop))
    return layers


def place_layers(module: Any, layers: Sequence[int]) -> None:
    """Note which layers a stage holds now: of two chunks ``PipelineModule`` has the bounds of one at a time."""
    module.dynmo_layers = tuple(layers)


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
