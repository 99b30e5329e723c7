"""Try a family of causal language models: the layers of a tiny model of its default config beside transformers'."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.errors import ConfigError
from ds_dynmo.models import huggingface
from ds_dynmo.models.exporting import weights_file
from ds_dynmo.models.huggingface.adapter import source_of
from ds_dynmo.models.huggingface.configs import transformers
from ds_dynmo.models.huggingface.tiny import tiny_config
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model, trial_batches
from ds_dynmo.models.pruning.prunable_layer import prunable_linears

SIZES: dict[str, Any] = {  # of models in which an average is one
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    **{"vocab_size": 300, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
}
MASK = ("attention_mask", "position_ids")
OF_ALL = ("equal", "eager", "padding", "packing", "fresh", "files")
CHECKS = (*OF_ALL, "flex", "router loss", "load signals", "expert parallel")  # the last ones of some families

# What the default config of a family lacks, or every config of a trained model overrides.
COMPLETED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "glm4_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
}


@dataclass
class Outcome:
    """What was found about a family.

    Attributes:
        refusal: the message of the refusal; empty: it works.
        passed: the checks that it passed.
        failed: why it did not pass the others.
    """

    kind: str
    refusal: str = ""
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def tables(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the page's tables: what works, what some families lack, and what is refused."""
    working = [one for one in outcomes if not one.refusal]
    marks = [
        (one.kind, *("yes" if check in one.passed else "no" if check in one.failed else "" for check in CHECKS))
        for one in working
    ]
    lacking = [(one.kind, check, why) for one in working for check, why in one.failed.items()]
    refused = [(one.kind, one.refusal) for one in outcomes if one.refusal]
    return [
        *_table(("family", *CHECKS), marks),
        *_table(("family", "no", "why"), lacking),
        *_table(("refused", "why"), refused),
    ]


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"
        for row in (header, ("---",) * len(header), *rows)
    ]


def try_family(kind: str, *, flex: bool = False, **changes: Any) -> Outcome:
    """Try all that a family supports. FlexAttention takes longest, the first time."""
    found = Outcome(kind)
    try:
        values = tiny_values(kind, **changes)
        model = random_model(values, "eager")
        try:
            specs = huggingface.layers(model)
        except ConfigError as error:
            if "output_router_logits" not in str(error):
                raise
            found.failed["router loss"] = _reason(error)
            model.config.output_router_logits = values["output_router_logits"] = False
            specs = huggingface.layers(model)
    except ConfigError as error:
        found.refusal = _reason(error)
        return found
    found.passed.append("equal")
    checks: dict[str, Callable[[], Any]] = {
        "eager": lambda: huggingface.layers(model, attn_implementation="eager"),
        "padding": lambda: huggingface.layers(model, inputs=MASK),
        "packing": lambda: huggingface.layers(model, inputs=("position_ids",)),
        "fresh": lambda: huggingface.layers(model.config),
        "files": lambda: compare_files(model),
    }
    if specs[0].module_args[2] is not None:
        found.passed.append("router loss")
    if any(hasattr(spec.typename, "load_signal") for spec in specs):
        found.passed.append("load signals")
        checks["expert parallel"] = lambda: huggingface.layers(model, expert_parallel=True)
    if flex and model._supports_flex_attn:
        checks["flex"] = lambda: compare_forward(random_model(values, "flex_attention"))
    for check, run in checks.items():
        try:
            run()
            found.passed.append(check)
        except Exception as error:
            found.failed[check] = _reason(error)
    return found


def _reason(error: Exception) -> str:
    """Shorten a message to what it says of the family."""
    if not isinstance(error, ConfigError):
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    said = str(error).partition(": ")[2]
    for known in ("more than its declared parts: ", "the layers of a tiny model fail: ", "ConfigError: "):
        said = said.partition(known)[2] or said
    return said.partition(": logits of a tiny model")[0].partition("; verified=False")[0]


def tiny_values(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny config of a family, by its default config."""
    return copy.deepcopy({**_tiny_values(kind), **changes})


@cache
def _tiny_values(kind: str) -> dict[str, Any]:
    config = transformers().AutoConfig.for_model(kind, **COMPLETED.get(kind, {}))
    if hasattr(config, "router_aux_loss_coef"):
        config.output_router_logits = True
    source = source_of(config, 0)
    try:
        return tiny_config(source.config, source.blocks)
    except ValueError:
        huggingface.layers(config)
        raise


def nightly(*values: Any) -> Any:
    """Return a parameter set of the nightly form."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def often(names: Sequence[Any], quick: Sequence[Any]) -> list[Any]:
    """Return parameters, of which all but the ``quick`` ones are of the nightly form."""
    assert all(name in names for name in quick)
    return [name if name in quick else nightly(name) for name in names]


def batch(vocabulary: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, of which some do not count."""
    tokens, _ = next(trial_batches(vocabulary, ()))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[0, :4] = -100
    return tokens, labels


def logits_of(outputs: Any) -> torch.Tensor:
    """Return the logits of layers, without a router loss."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def prune(layers: BuiltLayers, every: int) -> None:
    """Prune the smaller part of each linear layer; every so many becomes a vector, 0: none."""
    for number, linear in enumerate(prunable_linears(layers)):
        magnitudes = linear.weight.detach().float().abs()
        linear.prune(magnitudes >= magnitudes.flatten().quantile(0.7))
        if every and number % every == 0:
            linear.compress()


def library_loss(model: Any, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of transformers' model, which takes unshifted labels itself; with that of its routers."""
    loss = F.cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten())
    if getattr(outputs, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * outputs.aux_loss
    return loss


def compare_gradients(layers: BuiltLayers, model: Any, *, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Compare the gradients, and what trains, with those of transformers' model.

    Raises:
        AssertionError: they differ.
    """
    own, reference = layers.named_weights(model), dict(model.named_parameters())
    assert own.keys() == reference.keys()
    for name, parameter in reference.items():
        found, expected, say = own[name].grad, parameter.grad, partial("{}: {}".format, name)
        assert own[name].requires_grad == parameter.requires_grad, name
        assert (found is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=say)


def compare_with_pefts(model: Any, layers: BuiltLayers) -> None:
    """Compare logits and gradients with those of peft's model.

    Raises:
        AssertionError: they differ.
    """
    tokens, _ = batch(model.config.vocab_size)
    torch.manual_seed(1)  # of dropout
    expected = model(input_ids=tokens, use_cache=False).logits
    torch.manual_seed(1)
    found = layers.train()(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    expected.square().mean().backward(), found.square().mean().backward()
    compare_gradients(layers, model.get_base_model(), rtol=1e-4)


@torch.no_grad()
def compare_forward(model: Any) -> None:
    """Compare logits with transformers' in evaluation: torch has no backward pass of FlexAttention on CPUs.

    Raises:
        AssertionError: they differ.
    """
    implementation = model.config._attn_implementation
    specs = huggingface.layers(model.eval(), attn_implementation=implementation, verified=False)
    tokens, _ = batch(model.config.vocab_size)
    with torch.compiler.set_stance("force_eager"):  # compiling takes long, and has crashed
        found, expected = BuiltLayers(specs).eval()(tokens), model(tokens, use_cache=False).logits
    torch.testing.assert_close(logits_of(found), expected)


def compare_files(model: Any) -> None:
    """Read a folder that transformers wrote, export it again, and let transformers read that.

    Raises:
        AssertionError: weights or names of tensors differ.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, checkpoint, out = (Path(name) / part for part in ("folder", "checkpoint", "out"))
        model.save_pretrained(folder, max_shard_size="1MB")
        built = BuiltLayers(huggingface.layers(folder))
        weights = built.named_weights(model)
        for path, parameter in model.named_parameters():
            assert torch.equal(weights[path], parameter), path
        write_checkpoint(built, checkpoint)
        huggingface.export(folder, checkpoint, out)
        again, info = transformers().AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), info
        for path, tensor in again.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[path]), path
        assert _names(out) == _names(folder), _names(out) ^ _names(folder)


def write_checkpoint(built: BuiltLayers, folder: Path) -> None:
    """Write the layer files of a DeepSpeed checkpoint."""
    folder.mkdir(parents=True)
    for number, layer in enumerate(built.layers):
        torch.save(layer.state_dict(), folder / weights_file(number))


def _names(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names
