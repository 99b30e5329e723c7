"""Padded and packed batches of a Hugging Face model: what is beside the tokens crosses the stages unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.models import huggingface, language_model_loss
from ds_dynmo.models.huggingface.trial import BuiltLayers
from tests.distributed.harness import run
from tests.distributed.support.configs import Case, config
from tests.distributed.test_huggingface import MIXTRAL, MODELS

transformers = pytest.importorskip("transformers")
LENGTH, MICRO_BATCHES = 12, 3
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


def train(name: str, partitions: list[list[int]]) -> list[float]:
    """Train one step at each partition, and return the losses."""
    specs = huggingface.layers(CONFIGS[name], inputs=INPUTS[name], verified=False)
    module = PipelineModule(layers=specs, num_stages=2, loss_fn=language_model_loss, partition_method="uniform")
    settings = {**config(Case(clip=0.0, dynmo=None)), "dynmo": {"interval": 0}}
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    data, losses = micro_batches(name), []
    for partition in partitions:
        engine.rebalance(partition)
        losses.append(engine.train_batch(data).item())
    return losses


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


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3", marks=pytest.mark.fuzz)])
def test_training_equals_that_of_the_librarys_model(name: str) -> None:
    moved = run(2, train, name, PARTITIONS)
    assert moved[0] == run(2, train, name, [PARTITIONS[0]] * 3)[0]
    settings = dict(CONFIGS[name])
    library_config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(library_config, attn_implementation="sdpa").train()
    fresh = BuiltLayers(huggingface.layers(CONFIGS[name], verified=False)).named_weights(model)
    model.load_state_dict({path: parameter.detach() for path, parameter in fresh.items()})
    assert moved[0] == pytest.approx(library_losses(name, model), rel=1e-5)
