"""What DeepSpeed's ``PipelineModule`` keeps of the layer list that it was made of."""

from __future__ import annotations

from typing import Any

from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

HOLDS_LAYERS = frozenset(  # attributes of a PipelineModule that hold its layers
    ("_layer_specs", "forward_funcs", "fwd_map", "tied_modules", "tied_comms", "tied_weight_attrs")
)


def layer_specs(module: Any) -> list[Any]:
    """What the user gave for each layer of the model: a LayerSpec, a module or a function."""
    specs: list[Any] = module._layer_specs
    return specs


def own_layers(module: Any) -> range:
    """The numbers of the layers that this stage holds."""
    return range(module._local_start, module._local_stop)


def has_deepspeeds_experts(module: nn.Module) -> bool:
    """Has it experts of ``deepspeed.moe``?"""
    return any(isinstance(part, MoE | Experts) for part in module.modules())


def is_split(parameter: nn.Parameter) -> bool:
    """Does every tensor-parallel slice hold another part of it?"""
    return bool(is_model_parallel_parameter(parameter))
