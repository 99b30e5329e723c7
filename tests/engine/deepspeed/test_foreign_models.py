"""Models of other libraries, cut into layers by their users, move."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import nn

import ds_dynmo
from tests.support.configs import Case, config
from tests.support.harness import run_each
from tests.support.training import check_moves_changed_nothing, outcome_of, train_and_move
from tests.support.under_schedules import check_as_under_1f1b

pytestmark = pytest.mark.ranks


def alexnet() -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]], list[list[int]]]:
    """Return torchvision's AlexNet as DeepSpeedExamples cuts it: modules and a function, which share one ReLU."""
    relu = nn.ReLU()
    features = [nn.Conv2d(1, 4, 3, padding=1), relu, nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), relu]
    classifier = [nn.Dropout(0.3), nn.Linear(24, 16), relu, nn.Linear(16, 5)]
    layers = [*features, nn.AdaptiveAvgPool2d(2), lambda x: torch.flatten(x, 1), *classifier]
    generator = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(2, 1, 8, 8, generator=generator), torch.randint(0, 5, (2,), generator=generator))
        for _ in range(20)
    ]
    return layers, data, [[0, 2, 11], [0, 9, 11], [0, 4, 11]]


class Decoder(nn.Module):
    """One of transformers' decoder layers, with the inputs that its model would pass. All share one rotary part."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        output = self.layer(hidden, position_embeddings=self.rotary(hidden, positions))
        return output[0] if isinstance(output, tuple) else output


def lora() -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]], list[list[int]]]:
    """Return a Llama of transformers with adapters of peft, whose base is frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=13, num_key_value_heads=2))
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1))
    inner = adapted.base_model.model.model
    decoders = [Decoder(layer, inner.rotary_emb) for layer in inner.layers]
    layers = [inner.embed_tokens, *decoders, inner.norm, adapted.base_model.model.lm_head]
    tokens = torch.randint(0, 13, (20, 2, 6), generator=torch.Generator().manual_seed(4))
    return layers, [(batch[:, :-1], batch[:, 1:]) for batch in tokens], [[0, 2, 7], [0, 5, 7], [0, 3, 7]]


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1))


def train(which: str, moves: bool) -> dict[str, Any]:
    """Train with a move after every batch, or without moves."""
    torch.manual_seed(0)
    layers, data, partitions = {"alexnet": alexnet, "lora": lora}[which]()
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    trainable = [p for p in module.parameters() if p.requires_grad]
    engine = ds_dynmo.initialize(model=module, model_parameters=trainable, config=config(Case()))[0]
    return outcome_of(engine, train_and_move(engine, itertools.cycle(data), partitions if moves else [], 4))


LORA = pytest.param("lora", marks=pytest.mark.nightly)  # whose imports take each rank seconds


@pytest.mark.parametrize("which", ["alexnet", LORA])
def test_a_move_at_every_step_changes_nothing(which: str) -> None:
    if which == "lora":
        pytest.importorskip("peft")
    still, moved = run_each(2, train, (which, False), (which, True))
    check_moves_changed_nothing(still, moved)


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["alexnet", "lora"])
def test_they_train_under_our_schedules(which: str) -> None:
    if which == "lora":
        pytest.importorskip("peft")
    check_as_under_1f1b(2, train, which, True)
