#!/usr/bin/env python3
"""Compare the seconds of each dynamic case's block with a dense block of the same size, as its load falls.

"pruned_linear" is a single linear layer, 1024 x 1024. Pruned layers are compared in each kernel, and where a vector of
kept values is smaller that is their parameter; "by blocks", squares of 32 are pruned whole. "attention" is the
attention of a dense block alone, without its projections: over dense is its share of the block.

    OMP_NUM_THREADS=1 python scripts/layers.py freezing
    OMP_NUM_THREADS=1 python scripts/layers.py attention sparse_attention --tokens 4096 --hidden-size 64
    OMP_NUM_THREADS=1 python scripts/layers.py --json layers.json

A table per case shows its setting, the block's load signal, forward and backward seconds over the dense block's, and
the bytes of weights, gradients, AdamW's state and buffers over the dense block's. The two are timed in turns in one
run; the table has medians. ``--json FILE`` also writes them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import TiedLayerSpec

from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, print_table, refusals_of, write_json
from ds_dynmo.config import parse_block
from ds_dynmo.models import ModelConfig, model_layers
from ds_dynmo.models.pruning.gradual import prunable_linears
from ds_dynmo.models.pruning.magnitude import select_largest
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear
from ds_dynmo.models.stream import Activations, Stream

SIZES = {"hidden_size": 256, "heads": 4, "sequence_length": 512, "layers": 2, "tied_embedding": False}
WIDTH = 1024  # of the single linear layer
SPARSITIES = (0.0, 0.52, 0.79, 0.9, 0.95, 0.97, 0.99)
SIDE = 32  # of blocks that are pruned whole
KERNELS = {"dense": (1.0, 1), "CSR": (0.0, 1), "by blocks": (0.0, SIDE)}  # csr_from and block_size
PRUNED = {
    f"{sparsity:.0%} pruned, {kernel}": (sparsity, *setting)
    for sparsity in SPARSITIES
    for kernel, setting in KERNELS.items()
}
EXITS = {"method": "calm", "threshold": 1.0}


def layer_of(index: int = 1, **case: Any) -> tuple[torch.nn.Module, Callable[[Activations], Activations]]:
    """Build layer ``index`` of a model with this case; return it and its forward function."""
    spec = model_layers(parse_block(ModelConfig, {**SIZES, **case}, "model"))[index]
    layer = spec.build()
    return layer, partial(spec.forward_fn, layer) if isinstance(spec, TiedLayerSpec) else layer


def block_of(**case: Any) -> torch.nn.Module:
    return layer_of(**case)[0]


def compress(linears: list[PrunableLinear]) -> None:
    """Make vectors of weights that are smaller so, as the engine does."""
    for linear in linears:
        if linear.would_shrink(linear.kept):
            linear.compress()


def pruned(sparsity: float, csr_from: float, side: int) -> torch.nn.Module:
    """Build a block whose smallest weights, or squares of them, are pruned."""
    block = block_of(pruning={"csr_from": csr_from, "block_size": side})
    linears = {1: prunable_linears(block)}
    keep = round(sum(linear.size for linear in linears[1]) / side**2 * (1 - sparsity))
    selection = select_largest(linears, keep, num_layers=2, sum_over_stages=torch.clone)
    for linear, mask in zip(linears[1], selection.masks(1, linears[1]), strict=True):
        linear.prune(mask)
    compress(linears[1])
    return block


class PrunedLinear(torch.nn.Module):
    """A linear layer with a share of its weights, or of squares of them, pruned at random positions."""

    width = WIDTH

    def __init__(self, sparsity: float, csr_from: float = 1.0, side: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        self.linear = PrunableLinear(weight, csr_from, side)
        if sparsity:
            keep = torch.rand(WIDTH // side, WIDTH // side, generator=generator) >= sparsity
            self.linear.prune(keep.repeat_interleave(side, 0).repeat_interleave(side, 1))
            compress([self.linear])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(hidden)
        return result

    def load_signal(self) -> float:
        return self.linear.kept / self.linear.size


class SomeLeft(torch.nn.Module):
    """A layer that a share of the tokens reaches; the others, at random positions, have left before."""

    carries = "exits"

    def __init__(self, share: float, index: int) -> None:
        super().__init__()
        self.share = share
        self.layer, self.run = layer_of(index, early_exit=EXITS)

    def forward(self, given: Activations) -> Activations:
        stream = Stream.unpack(given)
        assert stream.exited is not None
        generator = torch.Generator().manual_seed(1)
        places = torch.randperm(stream.exited.numel(), generator=generator)
        left = places >= round(self.share * stream.exited.numel())
        return self.run(replace(stream, exited=left.long().view_as(stream.exited)).pack())

    def load_signal(self) -> float:
        signal: float = self.layer.load_signal()  # type: ignore[operator]
        return signal


class AttentionAlone(torch.nn.Module):
    """Dense causal attention of the hidden states among themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = SIZES["heads"]
        self.unused = torch.nn.Parameter(torch.zeros(1))  # a layer that trains

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        states = hidden.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        return F.scaled_dot_product_attention(states, states, states, is_causal=True).transpose(1, 2)

    def load_signal(self) -> float:
        return 1.0


ROUTINGS: list[dict[str, Any]] = [
    *({"top_k": top_k} for top_k in (8, 4, 2, 1)),
    *({"top_k": 2, "capacity_factor": factor} for factor in (0.75, 0.5, 0.25)),
    *({"top_k": 2, "routing": routing} for routing in ("sbase", "bias")),
]
CASES: dict[str, dict[str, Callable[[], torch.nn.Module]]] = {  # by case and setting, a function that builds the layer
    "attention": {"dense": AttentionAlone},
    "freezing": {"trained": block_of, "frozen": lambda: block_of().requires_grad_(False)},
    "moe": {
        ", ".join(f"{key} {value}" for key, value in keys.items()): partial(block_of, moe={"experts": 8, **keys})
        for keys in ROUTINGS
    },
    "pruning": {name: partial(pruned, *setting) for name, setting in PRUNED.items()},
    "pruned_linear": {name: partial(PrunedLinear, *setting) for name, setting in PRUNED.items()},
    "sparse_attention": {
        **{
            f"hash, {buckets} buckets": partial(block_of, sparse_attention={"kind": "hash", "buckets": buckets})
            for buckets in (2, 4, 8, 16, 32)
        },
        **{
            f"qk, {keep:.0%} kept": partial(
                block_of, sparse_attention={"kind": "qk", "keep_queries": keep, "keep_keys": keep}
            )
            for keep in (1.0, 0.7, 0.5, 0.3, 0.1)
        },
    },
    "mod": {
        f"capacity {capacity:g}": partial(block_of, mod={"capacity": capacity, "every": 1})
        for capacity in (1.0, 0.5, 0.25, 0.125)
    },
    "early_exit": {  # the model's second block, and the exit before it
        **{
            f"{share:.0%} of tokens remain": partial(SomeLeft, share, index=3)
            for share in (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
        },
        "an exit, all tokens": partial(SomeLeft, 1.0, index=2),
    },
}


def activations(layer: torch.nn.Module, seed: int) -> Activations:
    """Make the activations that the layer before would send."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(
        1, SIZES["sequence_length"], getattr(layer, "width", SIZES["hidden_size"]), generator=generator
    )
    hidden.requires_grad_(any(parameter.requires_grad for parameter in layer.parameters()))
    carries = getattr(layer, "carries", "hidden")
    if carries == "hidden":
        return hidden
    auxiliary = torch.zeros(1, requires_grad=hidden.requires_grad)
    if carries == "auxiliary":
        return Stream(hidden, auxiliary).pack()
    tokens = torch.randint(0, 256, (1, SIZES["sequence_length"]), generator=generator)
    return Stream(hidden, auxiliary, tokens, torch.zeros_like(tokens)).pack()


def seconds(layer: torch.nn.Module, seed: int) -> float:
    """Time one forward and backward pass."""
    given = activations(layer, seed)
    began = time.perf_counter()
    made = Stream.unpack(layer(given))
    if made.hidden.requires_grad:
        total = made.hidden.square().mean()
        (total if made.auxiliary is None else total + made.auxiliary.sum()).backward()
    return time.perf_counter() - began


def held_bytes(layer: torch.nn.Module) -> int:
    """Count the bytes of weights, gradients, AdamW's state and buffers."""
    if not [*layer.parameters()]:
        return 0
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.zero_grad()
    seconds(layer, 0)
    optimizer.step()
    trained = [parameter for parameter in layer.parameters() if parameter.grad is not None]
    moments = [held for state in optimizer.state.values() for held in state.values() if held.dim()]
    tensors = [*layer.parameters(), *layer.buffers(), *moments, *(parameter.grad for parameter in trained)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def measure(case: str, setting: str, pairs: int) -> dict[str, Any]:
    """Time a layer beside the dense one, in turns; the first two pairs warm up."""
    layer, dense = CASES[case][setting](), PrunedLinear(0.0) if case == "pruned_linear" else block_of()
    both = [(seconds(layer, seed), seconds(dense, seed)) for seed in range(pairs + 2)][2:]
    return {
        "case": case,
        "setting": setting,
        "load_signal": float(layer.load_signal()),  # type: ignore[operator]
        "milliseconds": 1e3 * statistics.median(own for own, _ in both),
        "over_dense": statistics.median(own / other for own, other in both),
        "bytes_over_dense": held_bytes(layer) / held_bytes(dense),
    }


def main(given: list[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--tokens", type=int, default=512, help="of the sequence, default %(default)s")
    parser.add_argument("--hidden-size", type=int, default=256, help="default %(default)s")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of measurements, default %(default)s")
    arguments = parser.parse_args(given)
    with refusals_of("layers.py"):
        check_at_least_1(arguments, "tokens", "hidden_size", "pairs")
        SIZES.update(sequence_length=arguments.tokens, hidden_size=arguments.hidden_size)
        block_of()  # refuses sizes that make no block
    torch.set_num_threads(1)
    rows = [measure(case, setting, arguments.pairs) for case in arguments.cases or CASES for setting in CASES[case]]
    cells = [
        (
            row["case"],
            row["setting"],
            *(f"{row[key]:.3f}" for key in ("load_signal", "milliseconds", "over_dense", "bytes_over_dense")),
        )
        for row in rows
    ]
    print_table(("case", "setting", "load signal", "ms", "over dense", "bytes over dense"), cells)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
