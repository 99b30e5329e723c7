#!/usr/bin/env python3
"""Train a model of your own in a pipeline that re-balances itself: a small GPT whose embedding is tied to its head.

    deepspeed --num_gpus 2 examples/own_model.py --steps 40 --freeze-at 20 --save checkpoints
    deepspeed --num_gpus 3 examples/own_model.py --steps 60 --resume checkpoints          # continue in three stages
    deepspeed --num_gpus 2 examples/own_model.py --steps 60 --freeze-at 20 --repack-at 40  # continue on one rank

On a CPU, write DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 before the command. The data are the bytes of a text: ``--data``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ds_dynmo

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 256, 64, 64, 4, 8
FIRST_BLOCK, HEAD = 2, BLOCKS + 3  # numbers of layers
FROZEN = 4  # blocks that freeze

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dynmo": {"interval": 10},
}


class Positions(nn.Module):
    """Adds a learnt vector for each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.places[: hidden.shape[1]]


class Block(nn.Module):
    """Causal attention, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.queries_keys_values(self.first_norm(hidden)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        queries, keys, values = heads.unbind(2)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).flatten(2))
        return hidden + self.narrow(functional.gelu(self.widen(self.second_norm(hidden))))


def logits(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, embedding.weight) / WIDTH**0.5  # its weights begin with a deviation of 1


def layers() -> list[Any]:
    """List the layers of the model; the first and the last are one matrix, wherever they are."""
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(Positions),
        *(LayerSpec(Block) for _ in range(BLOCKS)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits),
    ]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


class Windows(Dataset[torch.Tensor]):
    """Pieces of a text: the bytes of a sequence, and the one after it."""

    def __init__(self, path: Path) -> None:
        self.text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // LENGTH - 1

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.text[number * LENGTH : (number + 1) * LENGTH + 1]


def micro_batches(windows: Windows, first: int, engine: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this replica's micro-batches from number ``first`` on. One number is always the same micro-batch.

    So a run continues with the data that it has not seen yet, on any number of stages.
    """
    size, replica = engine.train_micro_batch_size_per_gpu(), engine.grid.get_data_parallel_rank()
    for number in itertools.count(first):
        chooser = torch.Generator().manual_seed(1_000_003 * number + replica)
        rows = torch.stack([windows[int(row)] for row in torch.randint(len(windows), (size,), generator=chooser)])
        yield rows[:, :-1], rows[:, 1:]


def train(args: argparse.Namespace) -> list[float]:
    """Train up to ``args.steps``, and return the loss of each step that this rank was part of. Every rank calls it."""
    stages = args.stages or torch.distributed.get_world_size()
    torch.manual_seed(0)
    with torch.no_grad():  # DeepSpeed broadcasts tied weights, and torch would warn of a gradient through that
        module = PipelineModule(layers=layers(), num_stages=stages, loss_fn=loss_fn)
    engine, *_ = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=CONFIG)
    if args.resume:
        path, _ = engine.load_checkpoint(args.resume)
        if path is None:
            raise SystemExit(f"--resume {args.resume}: no checkpoint there")
    batches = micro_batches(Windows(args.data), engine.micro_batches_taken, engine)
    losses: list[torch.Tensor] = []
    while engine.global_steps < args.steps:
        if engine.global_steps == args.freeze_at:
            for number, layer in engine.layers().items():  # those that this rank holds now
                if number < FIRST_BLOCK + FROZEN or number == HEAD:  # a tied layer: in all its uses, or in none
                    layer.requires_grad_(False)
            engine.model_changed(f"froze {FROZEN} blocks")  # decide now, not at the next interval
        if engine.global_steps == args.repack_at:
            engine.repack(args.repack_to)
            if engine.released:
                break  # other ranks have its layers
        loss = engine.train_batch(batches)
        losses.append(loss)  # whoever reads it waits for the last stage
        if engine.global_rank == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps}: loss {float(loss):.3f}, partition {engine.partition}", flush=True)
    if args.save and not engine.released:
        engine.save_checkpoint(args.save)
    return [float(loss) for loss in losses]


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="in total, default %(default)s")
    parser.add_argument("--stages", type=int, help="default: one for each rank; fewer make replicas")
    parser.add_argument("--data", type=Path, default=Path(argparse.__file__), metavar="FILE", help="text to train on")
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint at the end")
    parser.add_argument("--resume", metavar="FOLDER", help="continue from the latest checkpoint there")
    parser.add_argument("--freeze-at", type=int, metavar="STEP", help="freeze the embedding and the first blocks")
    parser.add_argument("--repack-at", type=int, metavar="STEP", help="continue with fewer stages")
    parser.add_argument("--repack-to", type=int, default=1, metavar="STAGES", help="how many, default %(default)s")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str]) -> None:
    args = parse(given)
    ds_dynmo.set_rank_variables()
    ds_dynmo.end_with_launcher()
    ds_dynmo.skip_shm_operator()
    deepspeed.init_distributed()
    train(args)


if __name__ == "__main__":
    main(sys.argv[1:])
