"""Small Hugging Face models, trained in pipelines and beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.models import huggingface, language_model_loss
from ds_dynmo.models.huggingface.configs import transformers
from tests.support import case_runs
from tests.support.case_runs import CASES, EGERIA, CaseRun
from tests.support.configs import Case, config
from tests.support.huggingface_families import library_loss
from tests.support.training import state

LENGTH = 12  # of sequences, in tokens
MICRO_BATCHES = 3
SIZES: dict[str, Any] = {
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
GPT2: dict[str, Any] = {
    **{"model_type": "gpt2", "vocab_size": 260, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": LENGTH},
    **{"bos_token_id": None, "eos_token_id": None},  # and dropout, 0.1 by default
}
TIED = {"tie_word_embeddings": True}
LLAMA = {"model_type": "llama", **SIZES}
MIXTRAL = {
    **{"model_type": "mixtral", **SIZES, "num_local_experts": 4, "sliding_window": 6},
    **{"output_router_logits": True, "router_aux_loss_coef": 0.2},
}
QWEN3 = {"model_type": "qwen3", **SIZES, "head_dim": 8}
GRANITE = {  # computes between embedding and layers, and around the head
    **{"model_type": "granite", **SIZES, **TIED},
    **{"embedding_multiplier": 12.0, "logits_scaling": 8.0},
}
FREEZING = {"untie": True, "case": {"kind": "freezing", "schedule": [[0.3, 1], [0.6, 2]]}}
LORA = {"r": 2, "lora_alpha": 8, "lora_dropout": 0.2, "target_modules": "all-linear"}
QUERY_AND_VALUE = {**LORA, "target_modules": ["q_proj", "v_proj"]}
PARTITIONS = [[0, 4, 7], [0, 2, 7], [0, 6, 7]]  # of three steps, in seven layers

# The "model" sections of runs: of seven layers, but for those in pieces.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"huggingface": MIXTRAL},
    "mixtral tied": {"huggingface": {**MIXTRAL, **TIED}},
    "gpt2": {"huggingface": GPT2},
    "qwen3": {"huggingface": QWEN3},
    "granite in slices": {"huggingface": GRANITE, "vocabulary_slices": 4},
    "mixtral tied in slices": {"huggingface": {**MIXTRAL, **TIED}, "vocabulary_slices": 4},
    "qwen3, egeria": {
        **{"huggingface": {**QWEN3, **TIED}, "untie": True, "vocabulary_slices": 2},
        "case": {"kind": "freezing", "egeria": EGERIA},
    },
    "mixtral, automatic freezing": {
        **{"huggingface": {**MIXTRAL, **TIED}, "untie": True, "vocabulary_slices": 3},
        "case": {"kind": "freezing", "automatic": {"interval": 0.2, "start": 0.2}},
    },
    "gpt2, freezing": {"huggingface": GPT2, **FREEZING},
    "gpt2 pruned": {"huggingface": GPT2, **CASES["pruning"]},
    "mixtral pruned in pieces": {
        **{"huggingface": {**MIXTRAL, **TIED}, "split_blocks": True, "vocabulary_slices": 2},
        **CASES["pruning"],
    },
    "mixtral shared": {"huggingface": MIXTRAL, "expert_parallel": True},
    "mixtral shared in halves": {"huggingface": MIXTRAL, "expert_parallel": True, "split_blocks": True},
    "mixtral shared, eager": {
        "huggingface": {**MIXTRAL, "output_router_logits": False, "experts_implementation": "eager"},
        "expert_parallel": True,
    },
    "llama, LoRA": {"huggingface": LLAMA, "peft": LORA},
    "llama, DoRA": {"huggingface": LLAMA, "peft": {**LORA, "use_dora": True}},
    "llama tied, LoRA in two layers": {
        "huggingface": {**LLAMA, **TIED},
        "peft": {**QUERY_AND_VALUE, "layers_to_transform": [1, 2]},
    },
    "llama, LoRA and a head": {"huggingface": LLAMA, "peft": {**LORA, "modules_to_save": ["lm_head"]}},
    "mistral, LoRA": {"huggingface": {"model_type": "mistral", **SIZES, "sliding_window": 6}, "peft": LORA},
    "gpt2, LoRA and biases": {"huggingface": GPT2, "peft": {"bias": "lora_only", "use_rslora": True}},
    "mixtral, LoRA": {"huggingface": MIXTRAL, "peft": QUERY_AND_VALUE},
    "mixtral shared, LoRA": {"huggingface": MIXTRAL, "peft": QUERY_AND_VALUE, "expert_parallel": True},
}


def case(name: str, *, more: dict[str, Any] | None = None, **settings: Any) -> CaseRun:
    """Return a run of one of :data:`MODELS`; ``more`` are keys of its section, ``settings`` those of the run."""
    section = {**MODELS[name], "sequence_length": LENGTH, "verified": False, **(more or {})}
    replicas = 2 if "expert_parallel" in section else 1
    return CaseRun(section, **{"replicas": replicas, **settings})


def micro_batches(inputs: tuple[str, ...] = (), replica: int = 0) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield inputs and labels.

    Args:
        inputs: what is beside tokens: a mask that leaves the last ones out, or positions of two documents.
    """
    for tokens, labels in case_runs.micro_batches(LENGTH, replica):
        if inputs == ("attention_mask",):
            mask = torch.ones_like(tokens)
            mask[0, -4:] = 0
            yield (tokens, mask), labels.masked_fill(mask == 0, -100)
        elif inputs:
            positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1).contiguous()
            yield (tokens, positions), labels
        else:
            yield tokens, labels


def module_of(specs: list[Any], **options: Any) -> PipelineModule:
    """Build a pipeline of two stages."""
    return PipelineModule(
        layers=specs, num_stages=2, loss_fn=language_model_loss, partition_method="uniform", **options
    )


def engine_of(module: PipelineModule) -> Any:
    settings = config(Case(clip=0.0, micro_batches=MICRO_BATCHES))
    return ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]


def train_at(engine: Any, data: Iterator[Any], partitions: list[list[int]]) -> list[float]:
    """Train one step at each partition, and return the losses."""
    losses = []
    for partition in partitions:
        engine.rebalance(partition)
        assert engine.partition == partition
        losses.append(engine.train_batch(data).item())
    return losses


def fine_tune(
    folder: str, checkpoint: str, partitions: list[list[int]], inputs: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Train the model in ``folder`` one step at each partition, and save a checkpoint, if it has a name."""
    engine = engine_of(module_of(huggingface.layers(folder, inputs=inputs, verified=False)))
    losses = train_at(engine, micro_batches(inputs), partitions)
    if checkpoint:
        engine.save_checkpoint(checkpoint)
    return {"losses": losses, "state": state(engine), "replica": 0}


# -- transformers' model, in one process ------------------------------------------------------------------------------


def library_model(values: dict[str, Any], folder: Path) -> Any:
    """Build a model of transformers, and save it in ``folder``."""
    values = dict(values)
    implementation = values.pop("experts_implementation", None)
    library = transformers()
    torch.manual_seed(3)
    model = library.AutoModelForCausalLM.from_config(
        library.AutoConfig.for_model(**values), experts_implementation=implementation
    ).train()
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def train_library(model: Any, inputs: tuple[str, ...] = (), replicas: int = 1) -> list[float]:
    """Train a model for three steps, as :func:`fine_tune` does, on what all replicas get; return the losses."""
    data = zip(*(micro_batches(inputs, replica) for replica in range(replicas)))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.03)
    losses = []
    for _ in PARTITIONS:
        losses.append(0.0)
        for _ in range(MICRO_BATCHES):
            for given, labels in next(data):
                tokens, *beside = given if inputs else (given,)
                outputs = model(tokens, use_cache=False, **dict(zip(inputs, beside)))
                loss = library_loss(model, outputs, labels) / MICRO_BATCHES / replicas
                loss.backward()
                losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_exported(model: Any, out: Path) -> None:
    """Check that the exported weights are those of ``model``."""
    exported = transformers().AutoModelForCausalLM.from_pretrained(out)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(exported.get_parameter(name), parameter, rtol=1e-3, atol=1e-4)
