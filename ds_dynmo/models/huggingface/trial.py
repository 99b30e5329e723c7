"""A tiny model of transformers with random weights, its layers in one module, and batches to try them with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_dynmo.models.huggingface.configs import transformers
from ds_dynmo.models.huggingface.outline import outline_of
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.stream import Activations

__all__ = ["DOCUMENT", "BuiltLayers", "MultipliedDropout", "random_model", "trial_batches"]

BATCH, LENGTH = 2, 19
DOCUMENT = 7  # tokens of the first document of a packed sequence
NOISE = 0.05  # added to initial weights, which are so small that errors would not be seen


def random_model(values: dict[str, Any], implementation: str) -> Any:
    """Build a transformers model in training mode, with random weights, the same each time."""
    library = transformers()
    config = type(library.AutoConfig.for_model(values["model_type"])).from_dict(values)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = library.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=implementation
        ).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(NOISE * torch.randn_like(parameter))
    return model


def trial_batches(vocabulary: int, inputs: tuple[str, ...]) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield tokens and what is beside them: padded left and right, or packed, where ``inputs`` say so.

    Every token of a tiny vocabulary is among them: some have a meaning for transformers.
    """
    mixed = torch.randperm(BATCH * LENGTH, generator=generator_for("verification"))
    tokens = mixed.remainder(vocabulary).view(BATCH, LENGTH)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    ones = torch.ones_like(tokens)
    right, left, packed = ones.clone(), ones.clone(), positions.clone()
    right[0, -4:], left[1, :5] = 0, 0
    packed[:, DOCUMENT:] -= DOCUMENT
    packed[1, 2 * DOCUMENT :] -= DOCUMENT
    shifted = (left.cumsum(-1) - 1).clamp(min=0)
    if not inputs:
        yield tokens, {}
    elif set(inputs) == {"position_ids"}:
        yield tokens, {"position_ids": packed}
        yield tokens, {"position_ids": positions}
    else:
        for mask, place in ((ones, positions), (right, positions), (left, shifted)):
            both = {"attention_mask": mask, "position_ids": place}
            yield tokens, {name: both[name] for name in inputs}


class MultipliedDropout(TorchFunctionMode):
    """Makes dropout a multiplication in the body, in training or not: halves draw other random numbers than a layer."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return args[0] * (1 - kwargs["p"])
        return func(*args, **(kwargs or {}))


class BuiltLayers(nn.Module):
    """All layers, one after the other, as a ``PipelineModule`` of one stage has them."""

    def __init__(self, specs: list[LayerSpec]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self._tied: dict[str, nn.Module] = {}
        self._functions: list[Callable[[Activations], Activations]] = []
        for spec in specs:
            key = spec.key if isinstance(spec, TiedLayerSpec) else None
            layer = self._tied.get(key) if key is not None else None
            if layer is None:
                layer = spec.build()
                self.layers.append(layer)
            if key is not None:
                self._tied[key] = layer
            function = getattr(spec, "forward_fn", None)
            self._functions.append(layer if function is None else partial(function, layer))

    def forward(self, activations: Activations) -> Activations:
        for function in self._functions:
            activations = function(activations)
        return activations

    def separate(self) -> None:
        """Let each layer find its arguments by itself, as if it were on a stage of its own.

        What one layer writes into an argument the next does not see then, though in transformers' model it does.
        """
        for layer in self.layers:
            if hasattr(layer, "stubbed"):
                layer.stubbed = copy.deepcopy(layer.stubbed)

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Group the parameters by their part of the model, of which slices of the vocabulary are rows.

        A part is a layer, all slices of the embedding or of the head, or both halves of a decoder layer.
        """
        found: dict[str, list[nn.Parameter]] = {}
        part, block = -1, None
        for layer in self.layers:
            before, block = block, getattr(layer, "block", None)
            is_second_half = block is not None and block == before
            part += getattr(layer, "rows", range(1)).start == 0 and not is_second_half
            for name, parameter in layer.named_parameters():
                found.setdefault(f"{part}.{name}", []).append(parameter)
        return found

    def named_weights(self, model: Any) -> dict[str, nn.Parameter]:
        """Collect the parameters of all layers by their names in transformers' ``model``; its vocabulary is whole."""
        paths = outline_of(model, "the model").paths
        return {
            f"{paths[int(part)]}.{name.removeprefix('part.')}": parameter
            for (part, _, name), (parameter,) in ((name.partition("."), found) for name, found in self.parts().items())
        }
