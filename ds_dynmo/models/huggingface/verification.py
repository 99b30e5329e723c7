"""Compare a family's layers with the library's model, on a tiny model with random weights.

The declared parts of a model do not say what else its ``forward`` does: scale embeddings or logits, hand values from
layer to layer. So it is tried, with the config's own settings, before anything is built: a model whose layers give
other logits is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.huggingface.configs import transformers
from ds_dynmo.models.huggingface.source import Source, outline_of
from ds_dynmo.models.huggingface.tiny import tiny_config
from ds_dynmo.models.seeding import generator_for
from ds_dynmo.models.stream import Activations

__all__ = ["BuiltLayers", "find_surroundings", "random_model", "trial_batches", "verify"]

BATCH, LENGTH = 2, 19
TOLERANCE = 1e-5  # of the largest logit: the same operations in the same order differ by nothing
NOISE = 0.05  # added to initial weights, which are so small that errors would not be seen

# Makes the layers of a model of the library's, given its inputs, attention, and has_entry and has_exit of a Source.
MakeSpecs = Callable[[Any, tuple[str, ...], str, bool, bool], list[LayerSpec]]


def find_surroundings(source: Source, place: str) -> Source:
    """Find out what the library's model computes beside its parts, by calling it around stand-ins.

    Raises:
        ConfigError: it cannot be called so.
    """
    width = source.skeleton.get_input_embeddings().weight.shape[1]
    hidden, logits = torch.ones(1, 2, width), torch.ones(1, 2, source.config.vocab_size)
    seen: list[torch.Tensor] = []

    def head(given: torch.Tensor) -> torch.Tensor:
        seen.append(given)
        return logits

    try:
        with torch.random.fork_rng(devices=[]):
            around = source.around(0, trains=True).train()
            entered, exited = around.enter(hidden, {}), around.logits(hidden, head)
    except Exception as error:  # what the library's models raise is not known
        kind = source.config.model_type
        raise ConfigError(f"{place}: model_type {kind} cannot be run in parts: {_said(error)}") from error
    plain_head = exited is logits and len(seen) == 1 and seen[0].data_ptr() == hidden.data_ptr()
    positions_are_a_layer = source.outline.first_block > 1
    return replace(source, has_entry=entered is not hidden and not positions_are_a_layer, has_exit=not plain_head)


def verify(source: Source, place: str, make_specs: MakeSpecs) -> None:
    """Refuse a model whose layers give other logits than the library's model.

    Args:
        make_specs: makes the layers of another model as those of ``source`` are made.

    Raises:
        ConfigError: with the difference, or because no tiny model can be made.
    """
    config = source.config
    kind, implementation = config.model_type, config._attn_implementation
    try:
        tiny = json.dumps(tiny_config(config), sort_keys=True)
        said = _compare(tiny, implementation, source.inputs, source.has_entry, source.has_exit, make_specs)
    except Exception as error:  # the library raises many kinds for sizes that do not fit
        raise ConfigError(
            f"{place}: model_type {kind} cannot be verified: no tiny model can be made of its config: {_said(error)}; "
            "verified=False trusts the parts that transformers declares"
        ) from error
    if said:
        raise ConfigError(
            f"{place}: model_type {kind} with {implementation} attention is more than its declared parts: {said}"
        )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=32)
def _compare(
    tiny: str, implementation: str, inputs: tuple[str, ...], has_entry: bool, has_exit: bool, make_specs: MakeSpecs
) -> str:
    """Say how a tiny model and its layers differ; empty: not at all."""
    model = random_model(json.loads(tiny), implementation)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            layers = BuiltLayers(make_specs(model, inputs, implementation, has_entry, has_exit)).train()
            for tokens, beside in trial_batches(model.config.vocab_size, inputs):
                expected = model(tokens, use_cache=False, **beside)
                found = layers((tokens, *beside.values()) if beside else tokens)
                said = _difference(expected, found, beside.get("attention_mask"), model)
                if said:
                    return said
        except Exception as error:  # what the library's models raise is not known
            return f"the layers of a tiny model fail: {_said(error)}"
    return ""


def _difference(expected: Any, found: Activations, mask: torch.Tensor | None, model: Any) -> str:
    logits, auxiliary = found if isinstance(found, tuple) else (found, None)
    counts = slice(None) if mask is None else mask.bool()
    scale = expected.logits[counts].abs().max().item()
    off = (expected.logits - logits)[counts].abs().max().item()
    if not off <= TOLERANCE * scale:
        return f"the logits of a tiny model differ by {off:.3g}, the largest is {scale:.3g}"
    aux_loss = getattr(expected, "aux_loss", None)
    if auxiliary is None or not isinstance(aux_loss, torch.Tensor):
        return ""
    wanted = (model.config.router_aux_loss_coef * aux_loss).item()
    if not abs(auxiliary.item() - wanted) <= TOLERANCE * abs(wanted):
        return f"the router loss of a tiny model is {auxiliary.item():.6g}, the library's {wanted:.6g}"
    return ""


def random_model(values: dict[str, Any], implementation: str) -> Any:
    """Build a model of the library's in training mode, with random weights, the same each time."""
    library = transformers()
    config = type(library.AutoConfig.for_model(values["model_type"])).from_dict(values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=implementation
        ).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(NOISE * torch.randn_like(parameter))
    return model


def trial_batches(vocabulary: int, inputs: tuple[str, ...]) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield tokens and what is beside them: padded left and right, or packed, where ``inputs`` say so."""
    tokens = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=generator_for("verification"))
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    ones = torch.ones_like(tokens)
    right, left, packed = ones.clone(), ones.clone(), positions.clone()
    right[0, -4:], left[1, :5] = 0, 0
    packed[:, 7:] -= 7
    packed[1, 13:] -= 6
    shifted = (left.cumsum(-1) - 1).clamp(min=0)
    if not inputs:
        yield tokens, {}
    elif set(inputs) == {"position_ids"}:
        yield tokens, {"position_ids": positions}
        yield tokens, {"position_ids": packed}
    else:
        for mask, place in ((ones, positions), (right, positions), (left, shifted)):
            both = {"attention_mask": mask, "position_ids": place}
            yield tokens, {name: both[name] for name in inputs}


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

    def named_weights(self, model: Any) -> dict[str, nn.Parameter]:
        """Collect the parameters of all layers by their names in the library's ``model``."""
        return {
            f"{path}.{name.removeprefix('part.')}": parameter
            for path, layer in zip(outline_of(model, "the model").paths, self.layers)
            for name, parameter in layer.named_parameters()
        }
