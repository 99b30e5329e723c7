#!/usr/bin/env python3
"""Measure embedding and head in slices of the vocabulary beside the whole ones: seconds, and bytes that are held.

    OMP_NUM_THREADS=1 python scripts/vocabulary.py                                  # SmolLM2-135M's sizes
    OMP_NUM_THREADS=1 python scripts/vocabulary.py --hidden-size 640 --vocab-size 262144 --tokens 512 --slices 16

The layers are those of a Hugging Face model with random weights. A pass is forward and backward of one micro-batch: of
the head from hidden states to the mean loss, of the embedding from tokens to hidden states. All arms take turns in each
round; seconds are medians. "Held" is what autograd keeps between a forward and its backward pass beside weights.
``--json FILE`` also writes the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.arms import turns
from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, refusals_of, write_json
from ds_dynmo.cli.hardware import hardware
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import huggingface, language_model_loss
from ds_dynmo.models.huggingface.trial import BuiltLayers
from ds_dynmo.models.stream import Stream

Figures = dict[str, float]  # "head seconds", "head bytes", "embedding seconds", "embedding bytes"
Pass = Callable[[], torch.Tensor]  # the forward pass, to what the backward pass begins with
HEAD = ("tokens", "slices", "head, ms", "of whole", "held, MiB", "of whole", "embedding, ms", "of whole")


class Arm:
    """Embedding and head, whole or in ``slices``, of one model."""

    def __init__(self, model: Any, slices: int | None) -> None:
        self.slices = slices
        specs, count = huggingface.layers(model, vocabulary_slices=slices, verified=False), slices or 1
        device = get_accelerator().current_device_name()
        self._front, self._back = (BuiltLayers(ends).to(device) for ends in (specs[:count], specs[-count:]))

    def measure(self, hidden: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> Figures:
        """Pass through head and embedding once."""
        leaf = hidden.clone().requires_grad_()
        stream = Stream(leaf, labels=labels) if self.slices else Stream(leaf)
        of_head = _measured(lambda: language_model_loss(self._back(stream.pack()), labels), self._back)
        given = (tokens, labels) if self.slices else tokens
        of_embedding = _measured(lambda: Stream.unpack(self._front(given)).hidden.sum(), self._front)
        parts = {"head": of_head, "embedding": of_embedding}
        return {f"{part} {what}": number for part, found in parts.items() for what, number in found.items()}


def _measured(forward: Pass, layers: nn.Module) -> Figures:
    """Return the seconds of a pass, and the bytes of a second one, as counting them takes time."""
    get_accelerator().synchronize()
    began = time.perf_counter()
    forward().backward()
    get_accelerator().synchronize()
    seconds = time.perf_counter() - began
    held: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        end = forward()
    for weight in layers.parameters():
        held.pop(weight.untyped_storage().data_ptr(), None)
    del end
    return {"seconds": seconds, "bytes": sum(held.values())}


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Let all arms take turns, for each number of tokens."""
    torch.manual_seed(0)
    width, vocabulary = arguments.hidden_size, arguments.vocab_size
    config = LlamaConfig(
        hidden_size=width,
        vocab_size=vocabulary,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=max(arguments.tokens),
        tie_word_embeddings=not arguments.untied,
    )
    model = LlamaForCausalLM(config)
    arms = [Arm(model, slices) for slices in (None, *arguments.slices)]
    device, rows = get_accelerator().current_device_name(), []
    for tokens in arguments.tokens:
        hidden = torch.randn(1, tokens, width, device=device)
        numbers, labels = torch.randint(vocabulary, (2, 1, tokens), device=device)
        found: dict[int | None, dict[str, list[float]]] = {arm.slices: defaultdict(list) for arm in arms}
        for number in range(-1, arguments.rounds):  # the first round makes gradients and warms up
            for arm in turns(arms, number):
                for what, figure in arm.measure(hidden, numbers, labels).items():
                    if number >= 0:
                        found[arm.slices][what].append(figure)
        for slices, figures in found.items():
            medians = {what: statistics.median(values) for what, values in figures.items()}
            rows.append({"tokens": tokens, "slices": slices, **medians})
    return rows


def markdown(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Make the lines of a Markdown table, with ratios to the whole matrices at as many tokens."""
    lines: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    whole: dict[str, Any] = {}
    for row in rows:
        whole = row if row["slices"] is None else whole
        cells = [str(row["tokens"]), str(row["slices"] or "whole")]
        for what, unit in (("head seconds", 1e3), ("head bytes", 2**-20), ("embedding seconds", 1e3)):
            cells += [f"{row[what] * unit:.2f}", f"{row[what] / whole[what]:.2f}"]
        lines.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in lines]


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=576, help="default %(default)s")
    parser.add_argument("--vocab-size", type=int, default=49152, help="words, default %(default)s")
    parser.add_argument("--untied", action="store_true", help="head and embedding are two matrices")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048], help="of a micro-batch")
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="beside the whole ones")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each arm, default %(default)s")
    arguments = parser.parse_args(given)
    with refusals_of("vocabulary.py"):
        check_at_least_1(arguments, "hidden_size", "vocab_size", "tokens", "slices", "rounds")
        if max(arguments.slices) > arguments.vocab_size:
            raise ConfigError(
                f"--slices {max(arguments.slices)}: should be at most --vocab-size {arguments.vocab_size}"
            )
    rows = measure(arguments)
    print("\n".join(markdown(rows)))
    write_json(arguments.json, {"machine": hardware(), "arguments": vars(arguments), "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
