#!/usr/bin/env python3
"""What it costs to run a block's backward pass in two parts: both, over the pass in one.

    OMP_NUM_THREADS=1 python scripts/split_passes.py                             # widths 256 and 512, 512 tokens
    OMP_NUM_THREADS=1 python scripts/split_passes.py --hidden-size 1024 --sequence-length 128 --batch 8
    OMP_NUM_THREADS=1 python scripts/split_passes.py --experts 8                 # a mixture of experts

One process, no pipeline. Two copies of the block run in turns, one in one part and one in two; shown are medians.
"forward", "backward": of the split pass over the other's. "weights": the share of the second part in both. "held":
between the parts. It fails where gradients differ by a bit. ``--json FILE`` writes the figures too.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, print_table, refusals_of, write_json
from ds_dynmo.config import parse_block
from ds_dynmo.engine.pipeline.weight_gradients import WeightGradients
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig, model_layers
from ds_dynmo.models.stream import Stream

HEADS = 4
WARM_UP = 3  # pairs before those that count


def block_of(hidden_size: int, sequence_length: int, experts: int) -> nn.Module:
    """Build the first block of a model; ``experts`` 0: its feed-forward part is dense."""
    sizes = {"hidden_size": hidden_size, "heads": HEADS, "sequence_length": sequence_length, "layers": 2}
    case: dict[str, Any] = {"moe": {"experts": experts}} if experts else {}
    block: nn.Module = model_layers(parse_block(ModelConfig, {**sizes, **case}, "model"))[1].build()
    return block


def clocked(run: Callable[[], Any]) -> tuple[float, Any]:
    """Time ``run`` in seconds, and give its result."""
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


class Passes:
    """A copy of a block, and its passes over micro-batches.

    Attributes:
        held_bytes: between the two parts of the latest pass.
    """

    def __init__(self, block: nn.Module, shape: tuple[int, int, int], *, split: bool) -> None:
        self.block, self._shape, self._split = copy.deepcopy(block), shape, split
        self.gradients, self.held_bytes = WeightGradients(), 0
        self.gradients.observe = self._note

    def run(self, seed: int) -> list[float]:
        """Run a micro-batch; seconds of its forward pass, and of its backward pass or the two parts of that."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(self._shape, generator=generator).requires_grad_()
        gradient = torch.randn(self._shape, generator=generator)
        auxiliary = torch.zeros(1) if getattr(self.block, "carries", "hidden") == "auxiliary" else None
        given = Stream(hidden, auxiliary).pack()
        with self.gradients.forward_pass(split=self._split):
            forward, made = clocked(lambda: Stream.unpack(self.block(given)).hidden)
        if not self._split:
            return [forward, clocked(lambda: made.backward(gradient))[0]]
        self.held_bytes = 0
        with self.gradients.first_part():
            first, _ = clocked(lambda: made.backward(gradient))
        return [forward, first, clocked(self._second_part)[0]]

    def _second_part(self) -> None:
        for root in self.gradients.second_part().roots():
            root.backward()

    def _note(self, compute: Callable[[], torch.Tensor], held_bytes: int) -> Callable[[], torch.Tensor]:
        self.held_bytes += held_bytes
        return compute


def measure(hidden_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both kinds of passes in turns."""
    block = block_of(hidden_size, arguments.sequence_length, arguments.experts)
    shape = arguments.batch, arguments.sequence_length, hidden_size
    whole, split = (Passes(block, shape, split=kind) for kind in (False, True))
    rows = []
    with split.gradients.splitting(split.block.modules()):
        for seed in range(WARM_UP + arguments.pairs):
            seconds = {passes: passes.run(seed) for passes in ((whole, split) if seed % 2 else (split, whole))}
            rows.append((seconds[whole], seconds[split]))
    rows = rows[WARM_UP:]
    ratios = [(first + second) / backward for (_, backward), (_, first, second) in rows]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "hidden_size": hidden_size,
        "backward_milliseconds": 1e3 * statistics.median(backward for (_, backward), _ in rows),
        "both_parts_over_backward": middle,
        "quartiles": [low, high],
        "forward_over_forward": statistics.median(after / before for (before, _), (after, _, _) in rows),
        "share_of_weights": statistics.median(second / (first + second) for _, (_, first, second) in rows),
        "held_bytes": split.held_bytes,
        "same_gradients": gradients_of(whole.block) == gradients_of(split.block),
    }


def gradients_of(block: nn.Module) -> list[bytes | None]:
    """Read every parameter's gradient, bit by bit."""
    every = [parameter.grad for parameter in block.parameters()]
    return [None if gradient is None else gradient.numpy().tobytes() for gradient in every]


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--hidden-size", type=int, nargs="+", default=[256, 512], help="default: 256 512")
    parser.add_argument("--sequence-length", type=int, default=512, help="default %(default)s")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch, default %(default)s")
    parser.add_argument("--experts", type=int, default=0, help="of the feed-forward part, default: it is dense")
    parser.add_argument("--pairs", type=int, default=60, help="of passes, default %(default)s")
    arguments = parser.parse_args(given)
    with refusals_of("split_passes.py"):
        check_at_least_1(arguments, "sequence_length", "batch")
        if arguments.pairs < 2:
            raise ConfigError(f"--pairs {arguments.pairs}: should be at least 2")
        torch.set_num_threads(1)
        rows = [measure(hidden_size, arguments) for hidden_size in arguments.hidden_size]
    cells = [
        (
            row["hidden_size"],
            f"{row['backward_milliseconds']:.2f}",
            f"{row['both_parts_over_backward']:.3f} ({row['quartiles'][0]:.3f} to {row['quartiles'][1]:.3f})",
            f"{row['forward_over_forward']:.3f}",
            f"{row['share_of_weights']:.2f}",
            f"{row['held_bytes'] / 2**20:.1f}",
        )
        for row in rows
    ]
    print_table(("hidden size", "backward ms", "backward", "forward", "weights", "held MiB"), cells)
    write_json(arguments.json, rows)
    if not all(row["same_gradients"] for row in rows):
        raise SystemExit("split_passes.py: gradients differ")


if __name__ == "__main__":
    main(sys.argv[1:])
