#!/usr/bin/env python3
"""Fine-tune the folder of a Hugging Face model in a pipeline, whole or by LoRA, and write one that transformers reads.

    deepspeed --num_gpus 2 examples/finetune.py model text.jsonl finetuned
    deepspeed --num_gpus 2 examples/finetune.py model text.jsonl adapters --lora 8     # for peft

``text.jsonl`` has a JSON line with the key "text" for each document. On a CPU, write DS_ACCELERATOR=cpu
OMP_NUM_THREADS=1 before the command, and make a small model and text by ``scripts/tiny_model.py``. ds-dynmo-train does
the same without a script of your own, and reads more kinds of data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from transformers import AutoTokenizer

import ds_dynmo
from ds_dynmo.models import huggingface, language_model_loss

LENGTH, MICRO_BATCH = 64, 2  # tokens of a sequence, and sequences of a micro-batch

Batch = tuple[torch.Tensor, torch.Tensor]


def configuration(lr: float) -> dict[str, Any]:
    """Make DeepSpeed's configuration. On accelerators add ``"bf16": {"enabled": True}`` and ZeRO-1."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}},
        "dynmo": {"interval": 20},
    }


def micro_batches_of(path: Path, tokenizer: Any) -> list[Batch]:
    """Read all documents, one after the other, as micro-batches of ids and of the token after each."""
    documents = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    ids = [token for document in documents for token in [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]]
    pieces = [ids[start : start + LENGTH + 1] for start in range(0, len(ids) - LENGTH, LENGTH)]
    random.Random(0).shuffle(pieces)
    rows = [torch.tensor(pieces[start : start + MICRO_BATCH]) for start in range(0, len(pieces), MICRO_BATCH)]
    return [(row[:, :-1], row[:, 1:]) for row in rows if len(row) == MICRO_BATCH]


def finetune(args: argparse.Namespace) -> list[float]:
    """Train, save and export. Return the losses. Every rank calls it."""
    adapters = {"r": args.lora} if args.lora else None
    module = PipelineModule(
        layers=huggingface.layers(args.model, peft=adapters),
        num_stages=torch.distributed.get_world_size(),
        loss_fn=language_model_loss,
    )
    engine, *_ = ds_dynmo.initialize(
        model=module, model_parameters=list(module.parameters()), config=configuration(args.lr)
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True, trust_remote_code=False)
    batches = itertools.cycle(micro_batches_of(args.text, tokenizer))
    losses: list[torch.Tensor] = []
    while engine.global_steps < args.steps:
        losses.append(engine.train_batch(batches))  # whoever reads it waits for the last stage
        if engine.global_rank == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps}: loss {float(losses[-1]):.3f}, partition {engine.partition}", flush=True)
    checkpoints = args.checkpoints or Path(f"{args.out}_checkpoints")
    engine.save_checkpoint(str(checkpoints), exclude_frozen_parameters=bool(adapters))
    if engine.global_rank == 0:
        huggingface.export(args.model, checkpoints, args.out, peft=adapters)
        tokenizer.save_pretrained(args.out)
    torch.distributed.barrier()
    return [float(loss) for loss in losses]


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with config.json, safetensors and a tokenizer")
    parser.add_argument("text", type=Path, help="JSON lines")
    parser.add_argument("out", type=Path, help="folder for the model or its adapters")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="default: OUT_checkpoints")
    parser.add_argument("--steps", type=int, default=50, help="default %(default)s")
    parser.add_argument("--lr", type=float, default=1e-3, help="default %(default)s; a whole model wants less")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank alone")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str]) -> None:
    args = parse(given)
    ds_dynmo.set_rank_variables()
    ds_dynmo.end_with_launcher()
    ds_dynmo.skip_shm_operator()
    deepspeed.init_distributed()
    finetune(args)


if __name__ == "__main__":
    main(sys.argv[1:])
