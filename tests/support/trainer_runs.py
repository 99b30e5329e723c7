"""Runs of ``PipelineTrainer`` beside those of transformers' ``Trainer`` and TRL's ``SFTTrainer``, on the same rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.support.words import CHATML, word_tokenizer

OF_TRL = {f"{kind}{name}" for kind in ("", "eval_") for name in ("entropy", "num_tokens", "mean_token_accuracy")}
SPEEDS = ("_runtime", "_per_second", "total_flos")  # of log entries, which no two runs share


@dataclass(frozen=True)
class TrainerRun:
    """One run of a trainer.

    Attributes:
        kind: of model, a ``model_type`` of transformers.
        arguments: beside those that all runs have.
        moves: partitions by the step after which layers move there.
        lora: whether adapters alone are trained; the same fresh ones in every run.
        measures: whether the largest loss of a row's micro-batch is a metric.
        chats: which rows of :func:`chats_of` are trained on, with TRL's arguments; "": rows of token ids.
    """

    kind: str = "llama"
    tied: bool = False
    lora: bool = False
    chats: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    moves: dict[int, list[int]] = field(default_factory=dict)
    num_stages: int | None = None
    dynmo: dict[str, Any] = field(default_factory=lambda: {"interval": 0})
    layers: dict[str, Any] = field(default_factory=dict)
    rows: int = 45
    measures: bool = False


def model_of(run: TrainerRun) -> Any:
    """Build a tiny model, with the same weights in every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        run.kind,
        vocab_size=97,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=run.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config)
    if not run.lora:
        return model
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return adapted


def rows_of(count: int, seed: int = 5) -> list[dict[str, list[int]]]:
    """Make rows of different lengths, with different numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(5, 20, (1,), generator=generator))
        ids = torch.randint(1, 97, (length,), generator=generator).tolist()
        prompt = length // 2 if number % 3 == 0 else 0
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


WORDS = tuple(f"w{number}" for number in range(60))


def tokenizer_of(folder: Path) -> str:
    """Write a tokenizer of words with a template for chats, and return its folder."""
    marks = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant")
    return str(word_tokenizer(folder, template=CHATML, words=("?", *WORDS), marks=marks))


def chats_of(kind: str, count: int, seed: int = 5) -> list[dict[str, Any]]:
    """Make rows of "text", "messages", or "prompt" and completion."""
    draws = Random(seed)

    def words() -> str:
        return " ".join(draws.choice(WORDS) for _ in range(draws.randrange(2, 9)))

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": words()}

    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "text": lambda: {"text": words()},
        "messages": lambda: {"messages": [turn("user"), turn("assistant")] * draws.randrange(1, 3)},
        "prompt": lambda: {"prompt": words() + " ", "completion": words()},
        "prompt messages": lambda: {"prompt": [turn("user")], "completion": [turn("assistant")]},
    }
    return [rows[kind]() for _ in range(count)]


def arguments_of(run: TrainerRun, folder: str) -> Any:
    """Make transformers' arguments, or TRL's."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # accelerate asks for it; the ranks have met already
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "max_steps": 30,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 10,
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    if run.chats:
        from trl import SFTConfig

        settings |= {"bf16": False, "gradient_checkpointing": False}
        return SFTConfig(folder, **settings | run.arguments)
    return TrainingArguments(folder, **settings | run.arguments)


def datasets_of(run: TrainerRun) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make the rows to train on, and those to evaluate."""
    if run.chats:
        return chats_of(run.chats, run.rows), chats_of(run.chats, 11, seed=6)
    return rows_of(run.rows), rows_of(11, seed=6)


def largest(evaluated: Any) -> dict[str, float]:
    """Measure the largest loss; the key says of how many rows."""
    return {f"largest_of_{len(evaluated.losses)}": float(evaluated.losses.max())}


def train_library(run: TrainerRun, folder: str, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
    """Train by transformers' trainer, or TRL's, in this process alone. Return what :func:`train` returns."""
    from transformers import AutoTokenizer, Trainer

    from ds_dynmo.trainer.batches import collate_rows

    train_rows, held = datasets_of(run)
    if run.chats:
        from datasets import Dataset
        from trl import SFTTrainer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(Path(f"{folder}.tokenizer")))
        rows = {"train_dataset": Dataset.from_list(train_rows), "eval_dataset": Dataset.from_list(held)}
        trainer = SFTTrainer(
            model_of(run), arguments_of(run, folder), processing_class=tokenizer, callbacks=[*callbacks], **rows
        )
    else:
        rows = {"train_dataset": train_rows, "eval_dataset": held}
        args = arguments_of(run, folder)
        trainer = Trainer(model_of(run), args, data_collator=collate_rows, callbacks=[*callbacks], **rows)
    trainer.compute_metrics = largest if run.measures else None
    trainer.train()
    return {"logs": list(trainer.state.log_history), **told(trainer, folder)}


def trainer_of(run: TrainerRun, folder: str, callbacks: Sequence[Any] = ()) -> Any:
    """Build the pipeline's trainer of the same model, arguments and rows."""
    from ds_dynmo.trainer import PipelineTrainer

    train_rows, held = datasets_of(run)
    return PipelineTrainer(
        model_of(run),
        arguments_of(run, folder),
        train_dataset=train_rows,
        eval_dataset=held,
        processing_class=tokenizer_of(Path(f"{folder}.tokenizer{os.getpid()}")) if run.chats else None,
        callbacks=callbacks,
        compute_metrics=largest if run.measures else None,
        dynmo=run.dynmo,
        num_stages=run.num_stages,
        layers=run.layers,
    )


def train(run: TrainerRun, folder: str, resume: bool = False, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
    """Train in a pipeline, with the run's moves, and save the model. Return the logs, and where the layers are."""
    from transformers import TrainerCallback

    class Moves(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in run.moves:
                assert trainer.engine.rebalance(run.moves[state.global_step]).moved

    trainer = trainer_of(run, folder, [Moves(), *callbacks])
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(f"{folder}/model")
    return {"logs": list(trainer.state.log_history), "partition": trainer.engine.partition, **told(trainer, folder)}


def told(trainer: Any, folder: str) -> dict[str, Any]:
    """Return what a trainer tells at its end beside its logs."""
    state = trainer.state
    best = (state.best_metric, state.best_global_step, Path(state.best_model_checkpoint or "").name)
    files = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    loss = trainer.evaluate()["eval_loss"]
    first = state.is_world_process_zero
    return {"first": first, "best": best, "step": state.global_step, "checkpoints": files, "loss at the end": loss}


def differences(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return by key the largest relative difference of two runs' logs; entries have to have the same keys."""
    keys = [sorted(entry) for entry in found]
    assert keys == [sorted(name for name in entry if name not in OF_TRL) for entry in expected]
    largest: dict[str, float] = {}
    for ours, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            if not key.endswith(SPEEDS) and key not in OF_TRL:
                difference = abs(ours[key] - value) / max(abs(value), 1e-12)
                largest[key] = max(largest.get(key, 0.0), difference)
    return largest
