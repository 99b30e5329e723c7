"""Runs for test_trace.py; every function runs on a rank."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.profiling import trace
from ds_dynmo.errors import ConfigError
from tests.distributed.workloads import Case, batches, build, freeze, sleeping_engine


def offsets_of_shifted_clocks(seconds: float) -> tuple[float, float]:
    """Each rank's clock is so far ahead of the one before it; rank 0 is slow now and then to tell its time."""
    rank, calls = torch.distributed.get_rank(), count()
    comm = Communicator(None, torch.device("cpu"), timeout_seconds=30)

    def now() -> float:
        if rank == 0 and next(calls) % 3 == 0:
            time.sleep(0.2)
        return time.perf_counter() + seconds * rank

    return comm.clock_offset(now)


def train_with_shifted_clocks(path: str, seconds: float) -> list[int]:
    """Sleeping layers, of which the last are slow, until some moved; no two ranks' clocks agree."""
    perf_counter, rank = time.perf_counter, torch.distributed.get_rank()
    time.perf_counter = lambda: perf_counter() + seconds * rank
    block = {"interval": 3, "min_improvement": 0.0, "trace": {"path": path, "steps": [2, 4]}}
    engine, data = sleeping_engine(block, [0.003] * 6 + [0.02] * 2, torch.distributed.get_world_size())
    for _ in range(5):
        engine.train_batch(data)
        assert not vars(engine).keys() & {"_exec_schedule", "_go_to"}
    return engine.partition


def train_half_frozen(path: str) -> None:
    """On ranks that were put aside for 0.02 s when they began to record."""
    begin = trace.begin
    trace.begin = lambda clock: (*begin(clock)[:2], 0.01)
    engine, data = sleeping_engine({"interval": 0, "trace": {"path": path, "steps": [2, 2]}}, [0.002] * 4, 2)
    engine.train_batch(data)
    freeze(engine, 2)
    engine.model_changed("half is frozen")
    engine.train_batch(data)


def cannot_write(folder: str) -> tuple[str, int]:
    """What a path says that cannot be written to; steps after a file went away in the middle."""
    trace = {"path": f"{folder}/file/trace.json", "steps": [1, 3]}
    Path(folder, "file").write_text("no folder")
    try:
        build(Case(dynmo={"trace": trace}))
    except ConfigError as error:
        message = str(error)
    path = Path(folder, "lost.json")
    engine = build(Case(dynmo={"interval": 0, "trace": {"path": str(path), "steps": [1, 3]}}))
    data = batches(engine)
    engine.train_batch(data)
    if engine.global_rank == 0:
        path.unlink()
    for _ in range(2):
        engine.train_batch(data)
    return message, engine.global_steps


def instructions_when_not_traced(path: str) -> list[Any]:
    """For each batch, of which the second is profiled and the fourth traced: is it carried out as DeepSpeed does?"""
    maps: list[dict[type, Any]] = []
    engine = build(Case(dynmo={"interval": 0, "trace": {"path": path, "steps": [4, 4]}}))
    data, run = batches(engine), PipelineEngine._exec_schedule

    def watch(self: Any, pipe_schedule: Any) -> None:
        maps.append(dict(self._INSTRUCTION_MAP))
        run(self, pipe_schedule)

    PipelineEngine._exec_schedule = watch
    try:
        for _ in range(5):
            engine.train_batch(data)
    finally:
        PipelineEngine._exec_schedule = run
    return [found == maps[0] for found in maps]
