#!/usr/bin/env python3
"""Fine-tune a folder of a Hugging Face model, as a script for transformers' Trainer does, in a pipeline.

    deepspeed --num_gpus 2 examples/trainer.py model text.jsonl out

``text.jsonl`` has a JSON line with the key "text" for each document; ``out/model`` gets what transformers reads. On a
CPU, write DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 before the command, and make a small model and text by
``scripts/tiny_model.py``. What was changed for the pipeline is a diff in docs/convert.md.
"""

from __future__ import annotations

import argparse
import sys

from datasets import load_dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from ds_dynmo.trainer import PipelineTrainer


def train(folder: str, text: str, out: str, resume: bool = False) -> PipelineTrainer:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = load_dataset("json", data_files=text, split="train")
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns="text")
    held = rows.train_test_split(test_size=0.05, seed=0)
    trainer = PipelineTrainer(
        model=folder,
        args=TrainingArguments(
            output_dir=out,
            max_steps=40,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            learning_rate=1e-3,
            warmup_steps=4,
            weight_decay=0.01,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            save_total_limit=1,
        ),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=held["train"],
        eval_dataset=held["test"],
        processing_class=tokenizer,
        dynmo={"interval": 20},
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{out}/model")
    return trainer


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with config.json, safetensors and a tokenizer")
    parser.add_argument("text", help="JSON lines")
    parser.add_argument("out", help="folder for checkpoints and the model")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # of DeepSpeed's launcher
    given = parser.parse_args(arguments)
    train(given.folder, given.text, given.out, given.resume)


if __name__ == "__main__":
    main(sys.argv[1:])
