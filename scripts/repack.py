#!/usr/bin/env python3
"""What re-packing brings and costs.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 8 scripts/repack.py phases --case pruning
    OMP_NUM_THREADS=1 python scripts/repack.py restart

"phases": emulated layers sleep as long as the case's load model says in each phase of a run of 10,000 iterations. In
every phase batches are timed on all stages, balanced; then on as many as the planner finds enough to be as fast as the
dense model was; then the parked ranks are taken back for the next phase. So both are measured side by side.

"restart": a job of real linear layers goes from 4 to 2 stages while it runs, and again by a checkpoint and a new
launch; seconds from the decision to the end of the next batch, split up, and the memory of a parked process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.arms import quietly, say, timed
from benchmarks.emulation import data, make_engine, pipeline_engine, set_loads
from guard import guarded_group, scratch_folder
from simulation.loads import CASES, Phase
from startup import init_distributed

FEWER = 2  # stages, after a restart


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    kinds = parser.add_subparsers(dest="kind", required=True)
    phases = kinds.add_parser("phases", help="throughput and ranks over a run; start with deepspeed")
    phases.add_argument("--case", choices=list(CASES), default="pruning", help="default %(default)s")
    phases.add_argument("--layers", type=int, default=32, help="default %(default)s")
    phases.add_argument("--micro-batches", type=int, default=32, help="default %(default)s")
    phases.add_argument("--forward-ms", type=float, default=8.0, help="of a dense layer, default %(default)s")
    phases.add_argument("--phases", type=int, default=8, help="of a run, default %(default)s")
    phases.add_argument("--batches", type=int, default=2, help="timed on each number of stages, default %(default)s")
    phases.add_argument("--max-slowdown", type=float, default=0.05, help="default %(default)s")
    phases.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    restart = kinds.add_parser("restart", help="re-packing beside a checkpoint and a new launch")
    worker = kinds.add_parser("worker", help="what restart launches")
    for one in (restart, worker):
        one.add_argument("--layers", type=int, default=16, help="default %(default)s")
        one.add_argument("--width", type=int, default=1024, help="of a layer, width x width, default %(default)s")
    restart.add_argument("--stages", type=int, default=4, help="default %(default)s")
    worker.add_argument("--folder", type=Path, required=True)
    worker.add_argument("--resume", action="store_true")
    return parser.parse_args(given)


# -- phases -------------------------------------------------------------------------------------------


def phases(arguments: argparse.Namespace) -> None:
    case, batches = CASES[arguments.case], data()
    stages = torch.distributed.get_world_size()
    sizes = {"layers": arguments.layers, "micro_batches": arguments.micro_batches, "interval": 0}
    block = {"repack": {"release": "park", "max_slowdown": arguments.max_slowdown}, "interval": 0, "log": False}
    engine = quietly(lambda: make_engine("partition_time", **sizes, block=block))
    forward_seconds = arguments.forward_ms / 1e3
    rows: list[dict[str, Any]] = []
    dense = Phase.of([1.0] * arguments.layers)
    for number, phase in enumerate([dense, *case.phases(arguments.layers, arguments.phases, seed=0)]):
        set_loads(engine, phase, forward_seconds)
        engine.model_changed("the loads of another phase")
        engine.train_batch(batches)  # is profiled; then layers move
        engine.train_batch(batches)
        all_seconds = min(timed(lambda: engine.train_batch(batches)) for _ in range(arguments.batches))
        if number == 0:
            first_seconds = all_seconds
            continue
        report = engine.repack()
        packed_seconds = all_seconds
        if not engine.released and report.new_stages < report.old_stages:
            engine.train_batch(batches)
            packed_seconds = min(timed(lambda: engine.train_batch(batches)) for _ in range(arguments.batches))
        rows.append(
            {
                "iterations": phase.iterations,
                "load": sum(phase.forward) / arguments.layers,
                "stages": report.new_stages,
                "over_start": first_seconds / packed_seconds,
                "all_over_start": first_seconds / all_seconds,
                "repack_seconds": report.decide_seconds + report.migrate_seconds + report.world_seconds,
            }
        )
        if engine.released:
            assert engine.wait_for_recall()
        elif report.new_stages < report.old_stages:
            engine.repack(stages)
        say(f"phase {number}: {rows[-1]}")
    if torch.distributed.get_rank() == 0:
        show_phases(arguments, stages, rows)
    engine.dismiss_parked()


def show_phases(arguments: argparse.Namespace, stages: int, rows: list[dict[str, Any]]) -> None:
    print(f"{'iterations':>10}{'load':>8}{'stages':>8}{'packed':>9}{'on all':>9}{'a rank':>9}{'s':>7}")
    for row in rows:
        row["rank_over_never"] = (row["over_start"] / row["stages"]) / (row["all_over_start"] / stages)
        print(
            f"{row['iterations']:>10}{row['load']:>8.2f}{row['stages']:>8}{row['over_start']:>9.2f}"
            f"{row['all_over_start']:>9.2f}{row['rank_over_never']:>9.2f}{row['repack_seconds']:>7.2f}"
        )
    iterations = sum(row["iterations"] for row in rows)
    average = sum(row["iterations"] * row["stages"] for row in rows) / iterations
    kept = iterations / sum(row["iterations"] / row["over_start"] for row in rows)
    on_all = iterations / sum(row["iterations"] / row["all_over_start"] for row in rows)
    print(
        f"{arguments.case}: {average:.1f} of {stages} stages on average; throughput {kept:.2f} of the dense start, "
        f"{on_all:.2f} on all stages; per rank {(kept / average) / (on_all / stages):.2f} of never re-packing"
    )
    if arguments.json:
        summary = {"case": arguments.case, "stages": stages, "average_stages": average, "over_start": kept}
        arguments.json.write_text(json.dumps({**summary, "all_over_start": on_all, "rows": rows}, indent=2) + "\n")


# -- restart ------------------------------------------------------------------------------------------


def restart(arguments: argparse.Namespace) -> None:
    with scratch_folder() as folder:
        launch(arguments, folder, arguments.stages)
        began = time.time()
        launch(arguments, folder, FEWER, "--resume")
        records = [json.loads(line) for line in (folder / "records").read_text().splitlines()]
    found = {name: value for record in records for name, value in record.items()}
    print(f"re-packed while running, {arguments.stages} -> {FEWER} stages, s:")
    for name in ("decide", "migrate", "world", "next batch"):
        print(f"  {name:<28}{found[name]:>8.3f}")
    print("by a checkpoint and a new launch, s:")
    print(f"  {'save':<28}{found['save']:>8.3f}")
    print(f"  {'launch, import, initialize':<28}{found['ready'] - began:>8.3f}")
    print(f"  {'load':<28}{found['load']:>8.3f}")
    print(f"  {'next batch':<28}{found['first batch']:>8.3f}")
    print(f"resident memory of a parked process: {found['before']:,.0f} MiB before, {found['parked']:,.0f} MiB parked")


def launch(arguments: argparse.Namespace, folder: Path, stages: int, *more: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = ["worker", "--folder", str(folder), "--layers", str(arguments.layers), "--width", str(arguments.width), *more]
    command = ["deepspeed", "--num_gpus", str(stages), "--master_port", str(port), __file__, *own]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with guarded_group(job):
        printed, errors = job.communicate()
    if job.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{printed[-2000:]}\n{errors[-2000:]}")


def worker(arguments: argparse.Namespace) -> None:
    engine, batches = linear_engine(arguments.layers, arguments.width), ones(arguments.width)
    save = arguments.folder / "saved"
    if arguments.resume:
        ready = time.time()
        load_seconds = timed(lambda: engine.load_checkpoint(str(save)))
        note(
            arguments, {"ready": ready, "load": load_seconds, "first batch": timed(lambda: engine.train_batch(batches))}
        )
        return
    for _ in range(4):
        engine.train_batch(batches)
    note(arguments, {"save": timed(lambda: engine.save_checkpoint(str(save)))})
    before = resident_mib()
    report = engine.repack(FEWER)
    if engine.released:
        if report.released_ranks[0] == int(os.environ["RANK"]):
            write(arguments, {"before": before, "parked": resident_mib()})
        engine.wait_for_recall()
        return
    parts = {"decide": report.decide_seconds, "migrate": report.migrate_seconds, "world": report.world_seconds}
    note(arguments, {**parts, "next batch": timed(lambda: engine.train_batch(batches))})
    engine.dismiss_parked()


def linear_engine(layers: int, width: int) -> Any:
    """Real layers, with AdamW's state: 12 bytes a parameter beside its gradient."""
    return pipeline_engine(
        [LayerSpec(nn.Linear, width, width) for _ in range(layers)],
        micro_batches=8,
        dynmo={"interval": 0, "log": False, "repack": {"release": "park"}},
        gradient_clipping=1.0,
    )


def ones(width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.ones(1, width), torch.zeros(1, width)


def resident_mib() -> float:
    """Of this process, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def note(arguments: argparse.Namespace, record: dict[str, float]) -> None:
    if torch.distributed.get_rank() == 0:
        write(arguments, record)


def write(arguments: argparse.Namespace, record: dict[str, float]) -> None:
    with (arguments.folder / "records").open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def main(given: list[str]) -> None:
    arguments = parse(given)
    if arguments.kind == "restart":
        restart(arguments)
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_distributed()
    (phases if arguments.kind == "phases" else worker)(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
