#!/usr/bin/env python3
"""What a block of each dynamic case costs, against the dense block of the same size, as its load falls.

"pruned_linear" is one linear layer alone, 1024 x 1024 for 512 tokens.

    OMP_NUM_THREADS=1 python scripts/layers.py freezing
    OMP_NUM_THREADS=1 python scripts/layers.py --json layers.json

Per case a table: its setting, the block's load signal, and seconds of forward and backward over the dense block's.
The two are timed in turns in one run; medians are shown. ``--json FILE`` writes them too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.config import parse_block
from ds_dynmo.models import ModelConfig, model_layers
from ds_dynmo.models.pruning.gradual import prunable_linears
from ds_dynmo.models.pruning.magnitude import select_largest
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear
from ds_dynmo.models.stream import Activations, Stream

Setting = tuple[str, Callable[[argparse.Namespace], torch.nn.Module]]


def model_of(arguments: argparse.Namespace, **case: Any) -> ModelConfig:
    sizes = {"hidden_size": arguments.hidden_size, "heads": arguments.heads, "sequence_length": arguments.sequence}
    return parse_block(ModelConfig, {**sizes, "layers": 2, "tied_embedding": False, **case}, "model")


def block_of(arguments: argparse.Namespace, **case: Any) -> torch.nn.Module:
    """The first block of a model with this case."""
    block: torch.nn.Module = model_layers(model_of(arguments, **case))[1].build()
    return block


def freezing() -> Iterator[Setting]:
    yield "trained", block_of
    yield "frozen", lambda arguments: block_of(arguments).requires_grad_(False)


def moe() -> Iterator[Setting]:
    def setting(**keys: Any) -> Setting:
        name = ", ".join(f"{key} {value}" for key, value in keys.items())
        return name, lambda arguments: block_of(arguments, moe={"experts": 8, **keys})

    yield from (setting(top_k=top_k) for top_k in (8, 4, 2, 1))
    yield from (setting(top_k=2, capacity_factor=factor) for factor in (0.75, 0.5, 0.25))
    yield from (setting(top_k=2, routing=routing) for routing in ("sbase", "bias"))


def pruned(arguments: argparse.Namespace, *, sparsity: float) -> torch.nn.Module:
    """A block of which the smallest weights are pruned."""
    block = block_of(arguments, pruning={})
    linears = {1: prunable_linears(block)}
    keep = round(sum(linear.weight.numel() for linear in linears[1]) * (1 - sparsity))
    selection = select_largest(linears, keep, num_layers=2, sum_over_stages=torch.clone)
    for linear, mask in zip(linears[1], selection.masks(1, linears[1]), strict=True):
        linear.prune(mask)
    return block


def pruning() -> Iterator[Setting]:
    for sparsity in (0.52, 0.79, 0.9, 0.95, 0.99):
        yield f"{sparsity:.0%} pruned", partial(pruned, sparsity=sparsity)


class PrunedLinear(torch.nn.Module):
    """A linear layer of which a share of the weights, at random places, is pruned."""

    def __init__(self, size: int, sparsity: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.linear = PrunableLinear(torch.nn.Parameter(torch.randn(size, size, generator=generator) / size**0.5))
        if sparsity:
            self.linear.prune(torch.rand(size, size, generator=generator) >= sparsity)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(hidden)
        return result

    def load_signal(self) -> float:
        return self.linear.kept / self.linear.weight.numel()


def pruned_alone(arguments: argparse.Namespace, *, sparsity: float) -> torch.nn.Module:
    return PrunedLinear(arguments.hidden_size, sparsity)


def pruned_linear() -> Iterator[Setting]:
    for sparsity in (0.52, 0.79, 0.9, 0.95, 0.99):
        yield f"{sparsity:.0%} pruned", partial(pruned_alone, sparsity=sparsity)


def sparse_attention() -> Iterator[Setting]:
    for buckets in (2, 4, 8, 16, 32):
        sparse = {"kind": "hash", "buckets": buckets}
        yield f"hash, {buckets} buckets", partial(block_of, sparse_attention=sparse)
    for keep in (1.0, 0.7, 0.5, 0.3, 0.1):
        kept = {"kind": "qk", "keep_queries": keep, "keep_keys": keep}
        yield f"qk, {keep:.0%} kept", partial(block_of, sparse_attention=kept)


def mod() -> Iterator[Setting]:
    for capacity in (1.0, 0.5, 0.25, 0.125):
        mod = {"capacity": capacity, "every": 1}
        yield f"capacity {capacity:g}", partial(block_of, mod=mod)


class SomeLeft(torch.nn.Module):
    """A layer to which a share of the tokens comes; the others, at random places, have left before."""

    def __init__(self, block: torch.nn.Module, layer: Callable[[Activations], Activations], share: float) -> None:
        super().__init__()
        self.block, self.layer, self.share = block, layer, share
        self.carries = "exits"

    def forward(self, given: Activations) -> Activations:
        stream = Stream.unpack(given)
        assert stream.exited is not None
        generator = torch.Generator().manual_seed(1)
        places = torch.randperm(stream.exited.numel(), generator=generator)
        left = places >= round(self.share * stream.exited.numel())
        return self.layer(replace(stream, exited=left.long().view_as(stream.exited)).pack())

    def load_signal(self) -> float:
        signal: float = self.block.load_signal()  # type: ignore[operator]
        return signal


def early_exit() -> Iterator[Setting]:
    exits = {"method": "calm", "threshold": 1.0}

    def second_block(arguments: argparse.Namespace, share: float) -> torch.nn.Module:
        block = model_layers(model_of(arguments, early_exit=exits))[3].build()
        return SomeLeft(block, block, share)

    def exit_of_all(arguments: argparse.Namespace) -> torch.nn.Module:
        spec = model_layers(model_of(arguments, early_exit=exits))[2]
        head = spec.build()
        return SomeLeft(head, partial(spec.forward_fn, head), 1.0)

    for share in (1.0, 0.75, 0.5, 0.25, 0.1, 0.0):
        yield f"{share:.0%} of tokens remain", partial(second_block, share=share)
    yield "an exit, all tokens", exit_of_all


CASES: dict[str, Callable[[], Iterator[Setting]]] = {
    "freezing": freezing,
    "moe": moe,
    "pruning": pruning,
    "pruned_linear": pruned_linear,
    "sparse_attention": sparse_attention,
    "mod": mod,
    "early_exit": early_exit,
}


def dense_of(arguments: argparse.Namespace, case: str) -> torch.nn.Module:
    """What a case is compared with."""
    return PrunedLinear(arguments.hidden_size, 0.0) if case == "pruned_linear" else block_of(arguments)


def activations(arguments: argparse.Namespace, block: torch.nn.Module, seed: int) -> Activations:
    """What the block before would send."""
    generator = torch.Generator().manual_seed(seed)
    shape = (arguments.batch, arguments.sequence)
    hidden = torch.randn(*shape, arguments.hidden_size, generator=generator)
    hidden.requires_grad_(any(parameter.requires_grad for parameter in block.parameters()))
    carries = getattr(block, "carries", "hidden")
    if carries == "hidden":
        return hidden
    auxiliary = torch.zeros(1, requires_grad=hidden.requires_grad)
    if carries == "auxiliary":
        return Stream(hidden, auxiliary).pack()
    tokens = torch.randint(0, 256, shape, generator=generator)
    return Stream(hidden, auxiliary, tokens, torch.zeros_like(tokens)).pack()


def seconds(arguments: argparse.Namespace, block: torch.nn.Module, seed: int) -> float:
    """Of one forward and backward pass."""
    given = activations(arguments, block, seed)
    began = time.perf_counter()
    made = Stream.unpack(block(given))
    if made.hidden.requires_grad:
        total = made.hidden.square().mean()
        (total if made.auxiliary is None else total + made.auxiliary.sum()).backward()
    return time.perf_counter() - began


def table(arguments: argparse.Namespace, case: str) -> list[dict[str, Any]]:
    rows = []
    if case == "pruned_linear":
        arguments = argparse.Namespace(**{**vars(arguments), "hidden_size": 1024, "sequence": 512, "batch": 1})
    for setting, make in CASES[case]():
        dense, block = dense_of(arguments, case), make(arguments)
        pairs = [
            (seconds(arguments, block, seed), seconds(arguments, dense, seed)) for seed in range(arguments.pairs + 2)
        ][2:]
        rows.append(
            {
                "case": case,
                "setting": setting,
                "load_signal": float(block.load_signal()),  # type: ignore[operator]
                "milliseconds": 1e3 * statistics.median(mine for mine, _ in pairs),
                "over_dense": statistics.median(mine / dense for mine, dense in pairs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--hidden-size", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a sequence, default %(default)s")
    parser.add_argument("--batch", type=int, default=1, help="sequences, default %(default)s")
    parser.add_argument("--pairs", type=int, default=15, help="of measurements, default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for case in arguments.cases or CASES for row in table(arguments, case)]
    print(f"{'case':<18}{'setting':<28}{'load signal':>12}{'ms':>10}{'over dense':>12}")
    for row in rows:
        print(
            f"{row['case']:<18}{row['setting']:<28}{row['load_signal']:>12.3f}{row['milliseconds']:>10.2f}"
            f"{row['over_dense']:>12.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
