"""Padded and packed batches of a Hugging Face model: what is beside the tokens crosses the stages unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_dynmo.errors import ConfigError
from ds_dynmo.models import huggingface, local_layers
from ds_dynmo.models.huggingface import verification
from ds_dynmo.models.huggingface.modules import DecoderLayer
from ds_dynmo.models.huggingface.trial import BuiltLayers
from tests.support.harness import run
from tests.support.huggingface_families import tiny_values
from tests.support.huggingface_runs import LENGTH, MICRO_BATCHES, MIXTRAL, MODELS, engine_of, train_at

pytestmark = pytest.mark.ranks

transformers = pytest.importorskip("transformers")
PARTITIONS = [[0, 4, 7], [0, 2, 7], [0, 6, 7]]
INPUTS = {"mixtral": ("attention_mask",), "qwen3": ("position_ids",)}
CONFIGS = {"mixtral": MIXTRAL, "qwen3": MODELS["qwen3"]}


def micro_batches(name: str) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Yield tokens with a mask that leaves the last ones out, or with positions of two documents; and labels."""
    generator = torch.Generator().manual_seed(4)
    while True:
        tokens = torch.randint(0, 260, (2, LENGTH), generator=generator)
        if name == "mixtral":
            beside = torch.ones_like(tokens)
            beside[0, -4:] = 0
            labels = tokens.roll(-1, 1).masked_fill(beside == 0, -100)
        else:
            beside = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1).contiguous()
            labels = tokens.roll(-1, 1)
        yield (tokens, beside), labels


def built(name: str, **options: Any) -> Any:
    return engine_of(huggingface.layers(CONFIGS[name], inputs=INPUTS[name], verified=False), **options)


def train(name: str, partitions: list[list[int]]) -> list[float]:
    return train_at(built(name), micro_batches(name), partitions)


def library_losses(name: str, model: Any) -> list[float]:
    data, losses = micro_batches(name), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for _ in PARTITIONS:
        total = 0.0
        for _ in range(MICRO_BATCHES):
            (tokens, beside), labels = next(data)
            outputs = model(tokens, use_cache=False, **{INPUTS[name][0]: beside})
            loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
            if getattr(outputs, "aux_loss", None) is not None:
                loss = loss + model.config.router_aux_loss_coef * outputs.aux_loss
            (loss / MICRO_BATCHES).backward()
            total += loss.item() / MICRO_BATCHES
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3", marks=pytest.mark.nightly)])
def test_training_equals_that_of_the_librarys_model(name: str) -> None:
    moved = run(2, train, name, PARTITIONS)
    assert moved[0] == run(2, train, name, [PARTITIONS[0]] * 3)[0]
    settings = dict(CONFIGS[name])
    library_config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(library_config, attn_implementation="sdpa").train()
    fresh = BuiltLayers(huggingface.layers(CONFIGS[name], verified=False)).named_weights(model)
    model.load_state_dict({path: parameter.detach() for path, parameter in fresh.items()})
    assert moved[0] == pytest.approx(library_losses(name, model), rel=1e-5)


def count_runs(partitions: list[list[int]], checkpoint_interval: int) -> list[tuple[int, bool]]:
    """Count the runs of transformers' ``forward`` in a step at each partition; and do layers share what runs it?"""
    engine = built("qwen3", activation_checkpoint_interval=checkpoint_interval)
    stubbed = engine.module._layer_specs[0].module_args[0].stubbed
    runs, run, data, found = [0], stubbed._run, micro_batches("qwen3"), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return run(*args, **kwargs)

    stubbed._run = counted
    for partition in partitions:
        engine.rebalance(partition)
        runs[0] = 0
        engine.train_batch(data)
        decoder_layers = [layer for _, layer in local_layers(engine.module) if isinstance(layer, DecoderLayer)]
        found.append((runs[0], all(layer.stubbed is stubbed for layer in decoder_layers)))
    return found


@pytest.mark.parametrize("checkpoint_interval", [0, 1])
def test_arguments_are_made_once_per_stage_and_micro_batch(checkpoint_interval: int) -> None:
    """Also for layers that came from another stage.

    Where layers run again in the backward pass, the first stage has had another micro-batch in the meantime.
    """
    first, last = run(2, count_runs, PARTITIONS, checkpoint_interval)
    assert first == [(MICRO_BATCHES * (1 + checkpoint_interval), True)] * 3
    assert last == [(MICRO_BATCHES, True), (MICRO_BATCHES, True), (0, True)]  # the last time, it has the head alone


def refusals() -> tuple[int, list[str]]:
    """Count this rank's comparisons for three models, and say how each of them is refused."""
    compared, compare, said = [0], verification._compare, []

    def counted(*args: Any) -> Any:
        compared[0] += 1
        return compare(*args)

    verification._compare = counted
    minimax = tiny_values("minimax")
    for values, inputs in ((minimax, ()), (minimax, ("position_ids",)), (CONFIGS["qwen3"], ())):
        try:
            huggingface.layers(values, inputs=inputs)
            said.append("")
        except ConfigError as error:
            said.append(f"{type(error).__name__}: {error}")
    return compared[0], said


def test_one_rank_verifies_a_model_and_all_hear_of_it() -> None:
    found = run(3, refusals)
    assert sum(count for count, _ in found) == 3
    accepted, refused, other = found[0][1]
    assert accepted == other == "" and refused.startswith("PackingError: ") and "packed documents see each" in refused
    assert all(said == found[0][1] for _, said in found)
