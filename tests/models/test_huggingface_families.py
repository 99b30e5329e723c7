"""Families of causal language models with every feature: their layers compute what transformers' models do.

Layers are verified when they are made: losses and gradients are compared with transformers', with padding too.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import TiedLayerSpec
from torch import nn

from ds_dynmo.errors import ConfigError
from ds_dynmo.models import PruningConfig, huggingface, language_model_loss
from ds_dynmo.models.huggingface.configs import experts_key, families
from ds_dynmo.models.huggingface.outline import outline_of
from ds_dynmo.models.huggingface.trial import BuiltLayers, random_model
from ds_dynmo.models.pruning.kernels import dense
from ds_dynmo.models.pruning.prunable_layer import prunable_linears
from tests.support.huggingface_families import (
    MASK,
    OF_ALL,
    batch,
    compare_with_pefts,
    library_loss,
    logits_of,
    nightly,
    prune,
    tables,
    tiny_values,
    try_family,
)

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "huggingface.md"
TIED = {"tie_word_embeddings": True}
NO_DROPOUT = {f"{name}_pdrop": 0.0 for name in ("embd", "resid", "attn")}
EXPERTS = ("router loss", "load signals", "expert parallel")


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        why: it is here.
        changes: to its tiny config.
        more: checks that it passes beside those of all families.
        lacks: checks that it does not pass, and features that it cannot have.
    """

    why: str
    changes: dict[str, Any] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


# By model_type, and what else.
FAMILIES = {
    "gemma2": Family("scaled embedding, soft caps, norms after both parts, layers of two kinds, tied"),
    "gpt2": Family("learned positions, transposed weights, biases, dropout, attention returns two values, tied"),
    "mixtral": Family("experts that files have one by one, router loss", more=EXPERTS),
    "cohere": Family("scaled logits, attention beside the feed-forward part, tied", lacks=("halves",)),
    "deepseek_v3": Family("layers with and without experts, latent attention", more=EXPERTS[1:]),
    "exaone4": Family("norms after, positions in some layers"),
    "gemma": Family("scaled embedding that is a module, tied"),
    "gemma3_text": Family("scaled embedding, two rotaries, tied"),
    "glm4": Family("norms of other names"),
    "gpt_neox": Family("other names, dropout before the layers", {"hidden_dropout": 0.2}, lacks=("halves",)),
    "gpt_neox serial": Family("dropout of a part's result", {"hidden_dropout": 0.2, "use_parallel_residual": False}),
    "gpt_oss": Family("eager attention alone, experts with biases", more=EXPERTS, lacks=("packing",)),
    "granite": Family(
        "factors on logits, embedding and both parts",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    ),
    "llama": Family("padding among the words, tied", {**TIED, "pad_token_id": 2}),
    "mixtral sliding": Family("one expert per token", {"sliding_window": 6, "num_experts_per_tok": 1}, more=EXPERTS),
    "olmo": Family("norms without weights"),
    "olmo2": Family("norms after both parts, none before"),
    "phi": Family("bias of the head, which refuses a tie", lacks=("halves",)),
    "qwen2": Family("biases of attention, tied", TIED),
    "qwen2 sliding": Family(
        "sliding attention in some layers",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2_moe": Family("shared experts, router loss, tied", TIED, more=EXPERTS),
    "qwen3": Family("untied", {"tie_word_embeddings": False}),
    "smollm3": Family("layers without positions, tied", TIED),
    "starcoder2": Family("norms of other names, tied", TIED),
}
OFTEN = ("gemma2", "gpt2", "mixtral")  # they differ most
ALSO_OFTEN = {("slices", "granite"), ("slices", "phi")}  # computes between embedding and layers; head with a bias
DTYPES = (torch.float32, torch.bfloat16)  # the families that are tried often in the second


def values_of(name: str, **changes: Any) -> dict[str, Any]:
    return tiny_values(name.partition(" ")[0], **FAMILIES[name].changes, **changes)


def inputs_of(name: str) -> tuple[str, ...]:
    return MASK if name != "gpt2" else ()


# -- features ---------------------------------------------------------------------------------------------------------


def whole(name: str, folder: Path) -> None:
    """Padded, packed, fresh, and in files; and with experts that replicas share."""
    found = try_family(name.partition(" ")[0], **FAMILIES[name].changes)
    assert not found.refusal
    assert set(found.passed) == {*OF_ALL, *FAMILIES[name].more} - {*FAMILIES[name].lacks}, found.failed


def slices(name: str, folder: Path) -> None:
    """Of the vocabulary, in which the loss is the library's cross entropy."""
    specs = huggingface.layers(values_of(name), vocabulary_slices=4, inputs=inputs_of(name))
    tied = [spec.key for spec in specs if isinstance(spec, TiedLayerSpec)]
    assert len(tied) == (8 if FAMILIES[name].why.endswith(" tied") else 0)
    every = name not in OFTEN
    for is_tied in (True, False) if every and name != "phi" else (bool(tied),):
        for count in (1, 4, 16):
            compare_slices(name, count, is_tied, torch.float32)
            if every or count == 4:
                compare_slices(name, count, is_tied, torch.bfloat16)


def compare_slices(name: str, count: int, tied: bool, dtype: torch.dtype) -> None:
    """Compare loss and gradients in slices with transformers'.

    Gradients to a share of the model's largest: in exact arithmetic that of a bias of keys is zero.
    """
    model, (tokens, labels) = random_model({**values_of(name), "tie_word_embeddings": tied}, "eager"), batch()
    specs = huggingface.layers(model, vocabulary_slices=count, attn_implementation="eager", verified=False)
    layers = BuiltLayers(specs).to(dtype)
    for weight in model.parameters():  # a bf16 model of the library keeps frequencies in fp32
        weight.data = weight.data.to(dtype)
    torch.manual_seed(0)  # of dropout
    found = layers((tokens, labels))
    assert logits_of(found).dtype == torch.float32
    loss = language_model_loss(found, labels)
    torch.manual_seed(0)
    expected = library_loss(model, model(tokens, use_cache=False), labels)
    loss.backward()
    expected.backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2**-6
    of_gradients = 2 * tolerance  # those of hidden states are sums of as many parts as slices, each of them rounded
    torch.testing.assert_close(loss, expected, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=0.0)
    paths, largest = outline_of(model, name).paths, max(one.grad.abs().max() for one in model.parameters())
    for part, weights in layers.parts().items():
        number, _, own = part.partition(".")
        wanted = model.get_parameter(f"{paths[int(number)]}.{own.removeprefix('part.')}").grad
        off = (torch.cat([one.grad for one in weights]) - wanted).abs().max()
        assert off <= of_gradients * largest, (count, tied, dtype, part, off / largest)
        if dtype == torch.float32 and int(number) in (0, len(paths) - 1):
            assert off <= tolerance * wanted.abs().max(), (count, tied, part, off / wanted.abs().max())


def trained(layers: BuiltLayers) -> dict[str, torch.Tensor]:
    """Return logits, loss, and gradients by their names in the model: dense, with zeros where it is pruned."""
    tokens, labels = batch()
    torch.manual_seed(0)  # of dropout
    found = layers(tokens)
    loss = language_model_loss(found, labels)
    loss.backward()
    results = {"logits": logits_of(found), "loss": loss}
    linears = {id(linear.weight): linear for linear in prunable_linears(layers)}
    for name, (parameter, *_) in layers.parts().items():
        gradient, linear = parameter.grad, linears.get(id(parameter))
        assert gradient is not None, name
        if linear is not None and linear.is_compressed and linear.index is not None:
            gradient = dense(gradient, linear.index, linear.shape)
        elif linear is not None and linear.mask is not None:
            gradient = gradient * linear.mask
        results[name] = gradient
    return results


def check_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Check that two results of :func:`trained` are equal to the bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def halves(name: str, folder: Path) -> None:
    """Fresh halves equal whole layers to the bit."""
    values = values_of(name, **(NO_DROPOUT if name == "gpt2" else {}))
    specs = huggingface.layers(values_of(name), split_blocks=True, inputs=inputs_of(name))
    numbers = [spec.module_args[2] for spec in specs if getattr(spec.typename, "is_block", False)]
    assert numbers == [block for block in range(max(numbers) + 1) for _ in range(2)]
    if "dropout" in FAMILIES[name].why and name != "gpt2":
        return  # halves draw other numbers
    for dtype in DTYPES if name not in OFTEN else DTYPES[1:]:
        both = (
            BuiltLayers(huggingface.layers(values, split_blocks=split, verified=False, seed=3)).to(dtype)
            for split in (False, True)
        )
        check_equal(*map(trained, both))


def pruned(name: str, folder: Path) -> None:
    """Before anything is pruned, as layers that cannot be; then vectors as weights with zeros. To the bit."""
    huggingface.layers(values_of(name), inputs=inputs_of(name), pruning=PruningConfig())
    make = partial(huggingface.layers, values_of(name), verified=False, seed=3)
    for dtype in DTYPES if name not in OFTEN else DTYPES[1:]:
        plain, prunable, zeros, vectors = (
            BuiltLayers(make(pruning=case)).to(dtype) for case in (None, *[PruningConfig()] * 3)
        )
        prune(zeros, every=0), prune(vectors, every=1)
        check_equal(trained(plain), trained(prunable))
        check_equal(trained(zeros), trained(vectors))


def ends_of(layers: BuiltLayers) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the weights of embedding and head."""
    return layers.layers[0].get_parameter("part.weight"), layers.layers[-1].get_parameter("part.weight")


def untied(name: str, folder: Path) -> None:
    """It begins as the tied one, from memory, from a folder, and fresh. Its two gradients add up to the one."""
    no_dropout = {key: 0.0 for key in values_of(name) if "drop" in key}
    values = {**values_of(name), **no_dropout, **TIED}
    model, (tokens, labels) = random_model(values, "eager"), batch()
    model.save_pretrained(folder)
    expected = model(tokens, use_cache=False).logits
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    for given in (model, folder):
        specs = huggingface.layers(given, untie=True, attn_implementation="eager")
        assert not any(isinstance(spec, TiedLayerSpec) for spec in specs)
        layers = BuiltLayers(specs).train()
        logits, (embedding, head) = logits_of(layers(tokens)), ends_of(layers)
        assert torch.equal(logits, expected) and torch.equal(embedding, head)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        both = model.get_input_embeddings().weight.grad
        assert embedding.grad is not None and head.grad is not None and embedding.data_ptr() != head.data_ptr()
        assert (embedding.grad + head.grad - both).abs().max() <= 1e-6 * both.abs().max()
    assert model.config.tie_word_embeddings and model.get_output_embeddings().weight.grad is both
    if name != "phi":  # whose head cannot be a tied layer
        fresh = [huggingface.layers(values, seed=3, untie=untie, verified=False) for untie in (False, True)]
        assert torch.equal(*(logits_of(BuiltLayers(specs).eval()(tokens)) for specs in fresh))
    embedding, head = ends_of(BuiltLayers(huggingface.layers(values, seed=3, untie=True, verified=False)))
    assert torch.equal(embedding, head) and embedding.std() > 0


# Names of linear layers by which peft takes weights of experts too, and heads.
EXPERTS_TOO = ("lm_head", "gate", "gate_proj", "up_proj", "down_proj")


def adapters(name: str, folder: Path) -> None:
    compare_adapters(values_of(name))


def compare_adapters(values: dict[str, Any]) -> None:
    """Compare a tiny model, with adapters on all linear layers outside of experts, with peft's."""
    peft = pytest.importorskip("peft")
    model = random_model({**values, "output_router_logits": False}, "eager")
    linear = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, transformers.pytorch_utils.Conv1D))]
    left_out = EXPERTS_TOO if experts_key(model.config) else ("lm_head", "embed_out")
    names = {name.rpartition(".")[2] for name in linear}.difference(left_out)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=sorted(names), r=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    compare_with_pefts(model, BuiltLayers(huggingface.layers(model, attn_implementation="eager", verified=False)))


FEATURES = {one.__name__: one for one in (whole, slices, halves, pruned, untied, adapters)}


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        (feature, name) if name in OFTEN or (feature, name) in ALSO_OFTEN else nightly(feature, name)
        for feature in FEATURES
        for name in FAMILIES
        if feature not in FAMILIES[name].lacks
    ],
)
def test_a_family_equals_the_librarys(feature: str, name: str, tmp_path: Path) -> None:
    FEATURES[feature](name, tmp_path)


# -- all families -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_what_the_page_says_of_families_holds() -> None:
    """Takes minutes. Later versions of transformers have more families."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = tables([try_family(kind, flex=True) for kind in families()])
    said = [line for line in PAGE.read_text().partition("\nNothing is there")[2].splitlines() if line.startswith("|")]
    assert len(said) > 87 and not [line for line in said if line not in found]


@pytest.mark.nightly
def test_halves_are_refused_in_the_families_that_the_page_names() -> None:
    refused = set()
    for kind in families():
        try:
            huggingface.layers(tiny_values(kind), split_blocks=True)
        except ConfigError as error:
            if "split_blocks" in str(error):
                refused.add(kind)
    parallel = {"cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "phi", "gptj", "codegen", "gpt_neox"}
    assert refused == parallel | {"minimax", "beam", "doge", "longcat_flash"}


@pytest.mark.nightly
def test_at_least_60_families_take_adapters() -> None:
    working = []
    for kind in families():
        try:
            values = {**tiny_values(kind), "output_router_logits": False}
            huggingface.layers(random_model(values, "eager"), attn_implementation="eager")
        except Exception:  # a family that does not work; transformers raises many kinds
            continue
        compare_adapters(values)
        working.append(kind)
    assert len(working) >= 60
