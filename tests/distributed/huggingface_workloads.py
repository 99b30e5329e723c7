"""Runs for test_huggingface.py; every function runs on a rank."""

from __future__ import annotations

from typing import Any

from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.models import huggingface, language_model_loss
from tests.distributed import workloads
from tests.distributed.case_workloads import EGERIA, batches

SIZES = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 12,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTRAL = {
    **{"model_type": "mixtral", **SIZES, "num_local_experts": 4, "sliding_window": 6},
    **{"output_router_logits": True, "router_aux_loss_coef": 0.2},
}
GPT2 = {
    **{"model_type": "gpt2", "vocab_size": 260, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 12},
    **{"bos_token_id": None, "eos_token_id": None},  # and dropout, 0.1 by default
}
# All have seven layers.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "mixtral tied": {**MIXTRAL, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
}
UNTIED_GPT2 = {**GPT2, "tie_word_embeddings": False}
FREEZING: dict[str, dict[str, Any]] = {
    "gpt2": {"huggingface": UNTIED_GPT2, "freezing": {"schedule": [[0.3, 1], [0.6, 2]]}},
    "mixtral automatic": {"huggingface": MIXTRAL, "freezing": {"automatic": {"interval": 0.2, "start": 0.2}}},
    "qwen3 egeria": {"huggingface": MODELS["qwen3"], "freezing": {"egeria": EGERIA}},
}


class Length:
    """What ``batches`` asks a model for."""

    sequence_length = 12


def fine_tune(folder: str, checkpoint: str, partitions: list[list[int]]) -> list[float]:
    """Train what is in ``folder``, one step at each partition; the losses. Leaves a checkpoint."""
    specs = huggingface.layers(folder)
    module = PipelineModule(layers=specs, num_stages=2, loss_fn=language_model_loss, partition_method="uniform")
    settings = {**workloads.config(workloads.Case(clip=0.0, dynmo=None)), "dynmo": {"interval": 0}}
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]
    data, losses = batches(engine, Length()), []  # type: ignore[arg-type]
    for partition in partitions:
        engine.rebalance(partition)
        losses.append(engine.train_batch(data).item())
    engine.save_checkpoint(checkpoint)
    return losses
