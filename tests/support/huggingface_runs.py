"""Small Hugging Face models, trained in pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.models import language_model_loss
from tests.support.case_runs import CaseRun
from tests.support.configs import Case, config

LENGTH = 12  # of sequences, in tokens
MICRO_BATCHES = 3
GPT2 = {
    **{"model_type": "gpt2", "vocab_size": 260, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": LENGTH},
    **{"bos_token_id": None, "eos_token_id": None},  # and dropout, 0.1 by default
}
SIZES = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTRAL = {
    **{"model_type": "mixtral", **SIZES, "num_local_experts": 4, "sliding_window": 6},
    **{"output_router_logits": True, "router_aux_loss_coef": 0.2},
}
# All have seven layers.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "mixtral tied": {**MIXTRAL, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
    "granite": {  # computes between embedding and layers, and around the head
        **{"model_type": "granite", **SIZES, "tie_word_embeddings": True},
        **{"embedding_multiplier": 12.0, "logits_scaling": 8.0},
    },
}


def case(name: str, *, stages: int = 2, replicas: int = 1, precision: str = "fp32", interval: int = 0) -> CaseRun:
    block = {"huggingface": MODELS[name], "sequence_length": LENGTH, "verified": False}
    return CaseRun(block, stages, replicas, precision, interval)


def engine_of(specs: list[Any], **options: Any) -> Any:
    """Build an engine of two stages; ``options`` are those of ``PipelineModule``."""
    module = PipelineModule(
        layers=specs, num_stages=2, loss_fn=language_model_loss, partition_method="uniform", **options
    )
    settings = config(Case(clip=0.0, micro_batches=MICRO_BATCHES))
    return ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]


def train_at(engine: Any, data: Iterator[Any], partitions: list[list[int]]) -> list[float]:
    """Train one step at each partition, and return the losses."""
    losses = []
    for partition in partitions:
        engine.rebalance(partition)
        losses.append(engine.train_batch(data).item())
    return losses
