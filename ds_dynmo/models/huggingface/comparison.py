"""Compare layers with transformers' model: logits, loss, gradients, in training and evaluation, with dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ds_dynmo.models.gpt import language_model_loss
from ds_dynmo.models.huggingface.trial import DOCUMENT, BuiltLayers, trial_batches
from ds_dynmo.models.stream import Activations

__all__ = ["compare", "compare_documents", "compare_parameters", "compare_slices", "compare_tied"]

Beside = dict[str, torch.Tensor]

TOLERANCE = 1e-5  # of the largest value: the same operations in the same order differ by nothing
ROUNDING = 1e-6  # of the model's largest gradient: some gradients are zero but for rounding
SEED = 0  # of dropout


def compare(model: Any, layers: BuiltLayers, inputs: tuple[str, ...], *, gradients: bool = True) -> str:
    """Describe how ``layers`` differ from transformers' ``model``, whose weights they have; empty: not at all.

    Draws random numbers from torch's generator of the CPU.

    Args:
        inputs: what batches have beside tokens.
        gradients: compare them too.
    """
    said = compare_parameters(model, layers)
    if said:
        return said
    for tokens, beside in trial_batches(model.config.vocab_size, inputs):
        said = _compare_training(model, layers, tokens, beside, gradients=gradients)
        said = said or _compare_evaluation(model, layers, tokens, beside)
        if said:
            return said
    return ""


def compare_parameters(model: Any, layers: BuiltLayers) -> str:
    """Name the parameters that layers and model do not both have, or do not both train; empty: all are alike."""
    weights, parameters = layers.named_weights(model), dict(model.named_parameters())
    apart = sorted({*weights} ^ {*parameters})
    if apart:
        return f"layers of a tiny model do not have each parameter once: {', '.join(apart[:3])}"
    apart = [name for name, one in parameters.items() if one.requires_grad != weights[name].requires_grad]
    return f"layers of a tiny model do not train what transformers trains: {', '.join(apart[:3])}" if apart else ""


def _compare_training(model: Any, layers: BuiltLayers, tokens: torch.Tensor, beside: Beside, *, gradients: bool) -> str:
    mask = beside.get("attention_mask")
    labels = tokens if mask is None else tokens.masked_fill(mask == 0, -100)
    torch.default_generator.manual_seed(SEED)
    expected = model.train()(tokens, labels=labels, use_cache=False, **beside)
    torch.default_generator.manual_seed(SEED)
    found = layers.train()(_batch(tokens, beside))
    said = _compare_logits(expected.logits, _logits(found), mask)
    if said:
        return said
    loss = language_model_loss(found, F.pad(labels[:, 1:], (0, 1), value=-100))
    if not abs(loss - expected.loss) <= TOLERANCE * abs(expected.loss):
        return f"the loss of a tiny model is {loss:.7g}, transformers' {expected.loss:.7g}"
    return _compare_gradients(model, layers, expected.loss, loss) if gradients else ""


def _compare_evaluation(model: Any, layers: BuiltLayers, tokens: torch.Tensor, beside: Beside) -> str:
    with torch.no_grad():
        expected = model.eval()(tokens, use_cache=False, **beside)
        found = layers.eval()(_batch(tokens, beside))
    said = _compare_logits(expected.logits, _logits(found), beside.get("attention_mask"))
    return said and f"in evaluation, {said}"


def _compare_logits(expected: torch.Tensor, found: torch.Tensor, mask: torch.Tensor | None) -> str:
    counts = slice(None) if mask is None else mask.bool()
    scale, off = expected[counts].abs().max(), (expected - found)[counts].abs().max()
    if not off <= TOLERANCE * scale:
        return f"the logits of a tiny model differ by {off:.3g}, the largest is {scale:.3g}"
    return ""


def _compare_gradients(model: Any, layers: BuiltLayers, expected: torch.Tensor, found: torch.Tensor) -> str:
    weights = layers.named_weights(model)
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    wanted = torch.autograd.grad(expected, list(parameters.values()), materialize_grads=True)
    made = torch.autograd.grad(found, [weights[name] for name in parameters], materialize_grads=True)
    largest = max(gradient.abs().max() for gradient in wanted)
    for name, own, gradient in zip(parameters, made, wanted):
        scale, off = gradient.abs().max(), (own - gradient).abs().max()
        if not off <= TOLERANCE * scale + ROUNDING * largest:
            return f"the gradient of {name} of a tiny model differs by {off:.3g}, the largest is {scale:.3g}"
    return ""


def compare_slices(whole: BuiltLayers, sliced: BuiltLayers, inputs: tuple[str, ...], vocabulary: int) -> str:
    """Describe how layers whose vocabulary is in slices differ from ``whole`` ones; empty: not at all."""
    for tokens, beside in trial_batches(vocabulary, inputs):
        mask = beside.get("attention_mask")
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        labels = labels if mask is None else labels.masked_fill(mask == 0, -100)
        given = tokens, *beside.values()
        torch.default_generator.manual_seed(SEED)
        expected = language_model_loss(whole.train()(given if beside else tokens), labels)
        torch.default_generator.manual_seed(SEED)
        found = language_model_loss(sliced.train()((*given, labels)), labels)
        if not abs(found - expected) <= TOLERANCE * abs(expected):
            return f"with vocabulary_slices the loss of a tiny model is {found:.7g}, {expected:.7g} without"
        wanted, made = (_gradients_of_parts(*one) for one in ((whole, expected), (sliced, found)))
        largest = max(gradient.abs().max() for gradient in wanted.values())
        for name, gradient in wanted.items():
            scale, off = gradient.abs().max(), (made[name] - gradient).abs().max()
            if not off <= TOLERANCE * scale + ROUNDING * largest:
                return f"with vocabulary_slices the gradient of {name} differs by {off:.3g}, the largest is {scale:.3g}"
    return ""


def _gradients_of_parts(layers: BuiltLayers, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = {name: found for name, found in layers.parts().items() if found[0].requires_grad}
    gradients = iter(
        torch.autograd.grad(loss, [one for found in parts.values() for one in found], materialize_grads=True)
    )
    return {name: torch.cat([next(gradients) for _ in found]) for name, found in parts.items()}


def compare_tied(model: Any, tied: Any) -> str:
    """Describe how transformers' ``model`` differs from ``tied``, whose weights it gets; empty: not at all.

    Embedding and head are one weight in ``tied``, whose gradient is then the sum of those of the two in ``model``.
    """
    model.load_state_dict(tied.state_dict())
    tokens, _ = next(trial_batches(model.config.vocab_size, ()))
    outputs = []
    for one in (tied, model):
        torch.default_generator.manual_seed(SEED)
        outputs.append(one.train()(tokens, labels=tokens, use_cache=False))
    expected, found = outputs
    if said := _compare_logits(expected.logits, found.logits, None):
        return said
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    (wanted,) = torch.autograd.grad(expected.loss, [tied.get_input_embeddings().weight])
    scale, off = wanted.abs().max(), (sum(torch.autograd.grad(found.loss, ends)) - wanted).abs().max()
    if not off <= TOLERANCE * scale:
        return f"the gradients of embedding and head of a tiny model differ by {off:.3g}, the largest is {scale:.3g}"
    return ""


def compare_documents(layers: BuiltLayers, vocabulary: int) -> str:
    """Describe how much the first document changes the logits of those packed behind it; empty: not at all."""
    tokens, beside = next(trial_batches(vocabulary, ("position_ids",)))
    others = tokens.clone()
    others[:, :DOCUMENT] = (others[:, :DOCUMENT] + 1) % vocabulary
    with torch.no_grad():
        logits, changed = (_logits(layers.eval()(_batch(one, beside)))[:, DOCUMENT:] for one in (tokens, others))
    scale, off = logits.abs().max(), (logits - changed).abs().max()
    if not off <= TOLERANCE * scale:
        return (
            f"packed documents see each other, as in transformers: logits of a tiny model differ by {off:.3g}, the "
            f"largest is {scale:.3g}"
        )
    return ""


def _batch(tokens: torch.Tensor, beside: Beside) -> Activations:
    return (tokens, *beside.values()) if beside else tokens


def _logits(found: Activations) -> torch.Tensor:
    return found[0] if isinstance(found, tuple) else found
