"""Measure from what sparsity on CSR, or block by block, is faster than a dense product, on the machine at hand.

The result is one of :data:`SPARSITIES` per shape of a weight, dtype and size of blocks. It is kept in the file
``csr_from.json`` in the user's cache folder: ``ds_dynmo`` in ``XDG_CACHE_HOME``, or in ``~/.cache``.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.models.pruning.blocks import blocks
from ds_dynmo.models.pruning.kernels import CSR, DENSE, Kernel, Shape, can_csr, compressed_linear
from ds_dynmo.models.pruning.magnitude import Linears, Sum
from ds_dynmo.models.pruning.sparse_linear import PrunableLinear

__all__ = ["SPARSITIES", "agree_on_csr", "cache_file", "csr_is_faster_from"]

SPARSITIES = (0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 1.0)  # at 1.0 no product is left: never
TOKENS = 256  # of a measured pass
PASSES = 5  # of each kernel, in turns; the fastest counts: what else the machine does only slows them

Measure = Callable[[Shape, torch.dtype, torch.device, int], float]


def agree_on_csr(linears: Linears, *, num_layers: int, sum_over_world: Sum, measure: Measure | None = None) -> None:
    """Set ``measured_csr_from`` of all linear layers that lack it and ``csr_from``: alike for alike shapes. Collective.

    Of what ranks measured the highest counts, and replaces what each has in its cache: a second run finds it. Nothing
    is measured if no rank has such a layer.

    Args:
        linears: of this stage, by layer number.
        num_layers: of the model.
        sum_over_world: adds a CPU float64 tensor over all ranks.
        measure: :func:`csr_is_faster_from`, or what stands in for it.
    """
    sizes = torch.zeros(num_layers, 2, dtype=torch.float64)
    for layer, members in linears.items():
        unknown = any(linear.csr_from is None and linear.measured_csr_from is None for linear in members)
        sizes[layer] = torch.tensor([len(members) * unknown, 1.0])
    sizes = sum_over_world(sizes)
    most = int((sizes[:, 0] / sizes[:, 1].clamp(min=1)).max())
    if not most:
        return
    table = torch.zeros(num_layers, most, 3 + len(SPARSITIES), dtype=torch.float64)
    for layer, members in linears.items():
        for row, linear in zip(table[layer], members):
            row[:3] = torch.tensor([1.0, *linear.shape])
            row[3 + SPARSITIES.index(_found(linear, measure or csr_is_faster_from))] = 1.0
    chosen = _highest(sum_over_world(table))
    for linear in (linear for members in linears.values() for linear in members):
        if linear.csr_from is None and linear.measured_csr_from is None:
            agreed = linear.measured_csr_from = chosen[linear.shape]
            if measure is None:
                _remember(_key(linear.shape, linear.weight.dtype, linear.weight.device, linear.block_size), agreed)


def _found(linear: PrunableLinear, measure: Measure) -> float:
    if linear.csr_from is not None:
        return SPARSITIES[0]  # counts for none: it is not measured
    if linear.measured_csr_from is not None:
        return linear.measured_csr_from
    return measure(linear.shape, linear.weight.dtype, linear.weight.device, linear.block_size)


def _highest(table: torch.Tensor) -> dict[Shape, float]:
    """Read, per shape, the highest sparsity that a rank found."""
    chosen: dict[Shape, float] = {}
    for ranks, outputs, inputs, *votes in table.flatten(0, 1).tolist():
        if ranks:
            shape = int(outputs / ranks), int(inputs / ranks)
            highest = max(sparsity for sparsity, vote in zip(SPARSITIES, votes) if vote)
            chosen[shape] = max(chosen.get(shape, 0.0), highest)
    return chosen


def csr_is_faster_from(shape: Shape, dtype: torch.dtype, device: torch.device, block_size: int = 1) -> float:
    """Look up or measure from which of :data:`SPARSITIES` on CSR is faster than dense, forward and backward.

    Args:
        shape: of the weight, ``(outputs, inputs)``.
        block_size: above 1: from where on a product block by block is faster.
    """
    if block_size == 1 and not can_csr(dtype, device):
        return SPARSITIES[-1]
    key = _key(shape, dtype, device, block_size)
    known = _read().get(key)
    if known not in SPARSITIES:
        known = _measure(shape, dtype, device, block_size)
        _write(key, known)
    return float(known)


def _measure(shape: Shape, dtype: torch.dtype, device: torch.device, block_size: int) -> float:
    """Bisect: the sparser the weight, the faster its kept values alone."""

    def is_faster(sparsity: float) -> bool:
        return _sparse_is_faster(shape, sparsity, dtype, device, block_size)

    return SPARSITIES[bisect_left(SPARSITIES[:-1], True, key=is_faster)]


def _sparse_is_faster(shape: Shape, sparsity: float, dtype: torch.dtype, device: torch.device, block_size: int) -> bool:
    outputs, inputs = shape
    sparse = CSR if block_size == 1 else blocks(block_size)
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(outputs // block_size, inputs // block_size, generator=generator) >= sparsity
    keep = keep.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)
    index = keep.flatten().nonzero().squeeze(1).int().to(device)
    hidden = torch.randn(TOKENS, inputs, generator=generator).to(device, dtype).requires_grad_()
    values = torch.randn(len(index), generator=generator).to(device, dtype).requires_grad_()

    def seconds(kernel: Kernel) -> float:
        _synchronize(device)
        began = time.perf_counter()
        outcome = compressed_linear(hidden, values, index, shape, kernel)
        torch.autograd.grad(outcome, (hidden, values), outcome.detach())
        _synchronize(device)
        return time.perf_counter() - began

    passes = [(seconds(sparse), seconds(DENSE)) for _ in range(PASSES + 1)][1:]  # the first warms up
    fastest, dense = map(min, zip(*passes))
    return fastest < dense


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


# -- the cache ----------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Give the path of the file that keeps what was measured."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "ds_dynmo" / "csr_from.json"


def _key(shape: Shape, dtype: torch.dtype, device: torch.device, block_size: int) -> str:
    name = _cpu_name() if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    outputs, inputs = shape
    by_blocks = f"; blocks of {block_size}" if block_size > 1 else ""
    threads = torch.get_num_threads()
    return f"{name}; torch {torch.__version__}; {threads} threads; {outputs} x {inputs}; {dtype}{by_blocks}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _read() -> dict[str, Any]:
    """Read the cache; a file that cannot be read holds nothing."""
    try:
        content = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remember(key: str, sparsity: float) -> None:
    """Correct an entry, if there is one: what other ranks found is higher."""
    if _read().get(key, sparsity) != sparsity:
        _write(key, sparsity)


def _write(key: str, sparsity: float) -> None:
    """Add an entry by replacing the file, one process at a time; where that is not possible nothing is kept."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
                json.dump({**_read(), key: sparsity}, file, indent=2, sort_keys=True)
            os.replace(file.name, path)
        finally:
            os.close(folder)  # and with it the lock
    except OSError:
        pass
