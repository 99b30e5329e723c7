#!/usr/bin/env python3
"""Measure what re-packing gains and costs.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 8 scripts/repack.py phases --case pruning
    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 scripts/repack.py freezing report.jsonl
    OMP_NUM_THREADS=1 deepspeed --num_gpus 8 scripts/repack.py memory --steps 100
    OMP_NUM_THREADS=1 python scripts/repack.py restart

"phases": emulated layers sleep as long as the case's load model says in each phase of a run of 10,000 iterations.
Balanced batches of every phase are timed on all stages. Then the run goes through the phases once more, on the fewest
stages that the planner finds as fast as the dense model was; ranks that leave do not come back.

"freezing": emulated layers freeze during a run, which re-packs by itself, or with --never balances its layers only.
ds-dynmo-plot draws the report.

"memory": scripts/train.py's model trains on real text, under the memory limit that it just meets as it was built. The
engine gives ranks back by itself, where the model's bytes have fallen.

"restart": a job of real linear layers goes from 4 to 2 stages while it runs, and again by a checkpoint and a new
launch. It shows the seconds from the decision to the end of the next batch, split up.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.arms import say, timed
from benchmarks.emulation import data, make_engine, pipeline_engine, set_loads
from benchmarks.packing import prepare_without_limit, show_memory, train_within_limit
from ds_dynmo.cli.command_line import CommandParser, add_changes, print_table, refusals_of, write_json
from ds_dynmo.cli.startup import begin_rank
from ds_dynmo.config import load_settings
from ds_dynmo.simulation import LOAD_MODELS, Phase
from guard import guarded_group, scratch_folder

FREEZES = ((0, 0), (0.25, 0.25), (0.5, 0.5), (0.75, 0.75))  # from this part of the run on, this part of the layers
LAYERS, WIDTH = 16, 1024  # of the restarted job: linear layers, WIDTH x WIDTH
STAGES, FEWER = 4, 2
PRUNED = "ds_configs/pruning.json"
IN_LITTLE_MEMORY = (  # changes of PRUNED: many layers whose weights, not activations, take the memory
    *("model.layers=24", "model.sequence_length=32"),
    'model.case={"kind": "pruning", "final_sparsity": 0.9, "probe": false}',
    *("optimizer.params.lr=5e-4", "scheduler.params.warmup_max_lr=5e-4", "scheduler.params.warmup_num_steps=15"),
    *("dynmo.balancer=null", "dynmo.profile=null", "dynmo.balance_by=parameters"),
    *("dynmo.initial_partition=parameters", 'dynmo.repack={"enabled": true, "planner": "first_fit"}'),
    "dynmo.memory_limit=109420644",  # replaced by what is measured
)


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=CommandParser)
    phases = kinds.add_parser("phases", description="throughput and ranks over a run; start with deepspeed")
    phases.add_argument("--case", choices=list(LOAD_MODELS), default="pruning", help="default %(default)s")
    phases.add_argument("--layers", type=int, default=32, help="default %(default)s")
    phases.add_argument("--micro-batches", type=int, default=32, help="default %(default)s")
    phases.add_argument("--forward-ms", type=float, default=8.0, help="of a dense layer, default %(default)s")
    phases.add_argument("--phases", type=int, default=8, help="phases of the run, default %(default)s")
    phases.add_argument("--batches", type=int, default=2, help="timed per number of stages, default %(default)s")
    freezing = kinds.add_parser("freezing", description="a run whose layers freeze; start with deepspeed")
    freezing.add_argument("report", help="file to write")
    freezing.add_argument("--never", action="store_true", help="balance layers only, do not re-pack")
    freezing.add_argument("--layers", type=int, default=24, help="default %(default)s")
    freezing.add_argument("--micro-batches", type=int, default=8, help="default %(default)s")
    freezing.add_argument("--forward-ms", type=float, default=8.0, help="of a layer, default %(default)s")
    freezing.add_argument("--steps", type=int, default=60, help="default %(default)s")
    memory = kinds.add_parser("memory", description="ranks of a real run under a memory limit; start with deepspeed")
    memory.add_argument("--deepspeed_config", metavar="JSON", help="default: a change of ds_configs/pruning.json")
    add_changes(memory)
    memory.add_argument("--data", metavar="FILE_OR_FOLDER", help="text (default: Python's standard library)")
    memory.add_argument("--steps", type=int, default=100, help="default %(default)s")
    kinds.add_parser("restart", description="re-packing beside a checkpoint and a new launch")
    worker = kinds.add_parser("worker", description="what restart launches")
    worker.add_argument("--folder", type=Path, required=True)
    worker.add_argument("--resume", action="store_true")
    return parser.parse_args(given)


# -- phases -------------------------------------------------------------------------------------------


def phases(arguments: argparse.Namespace) -> None:
    """Time every phase on all stages, and then on the fewest that are fast enough."""
    load_model, batches = LOAD_MODELS[arguments.case], data()
    stages = torch.distributed.get_world_size()
    block = {"repack": {"max_slowdown": 0.05}, "interval": 0}
    sizes = {"layers": arguments.layers, "micro_batches": arguments.micro_batches}
    engine = make_engine("partition_time", **sizes, interval=0, block=block)
    rows: list[dict[str, Any]] = []

    def shortest_batch() -> float:
        engine.train_batch(batches)
        return min(timed(lambda: engine.train_batch(batches)) for _ in range(arguments.batches))

    def begin(phase: Phase) -> None:
        set_loads(engine, phase, arguments.forward_ms / 1e3)
        engine.model_changed("the loads of another phase")
        engine.train_batch(batches)  # profiled; then layers move

    def on_all_stages(phase: Phase) -> float:
        begin(phase)
        return shortest_batch()

    start_seconds = on_all_stages(Phase.of([1.0] * arguments.layers))
    run = [(phase, on_all_stages(phase)) for phase in load_model.phases(arguments.layers, arguments.phases)]
    for number, (phase, all_seconds) in enumerate(run, 1):
        begin(phase)
        report = engine.repack()
        if engine.released:
            return
        packed_seconds = shortest_batch() if report.new_stages < stages else all_seconds
        over_start, all_over_start = start_seconds / packed_seconds, start_seconds / all_seconds
        rows.append(
            {
                "iterations": phase.iterations,
                "load": sum(phase.forward) / arguments.layers,
                "stages": report.new_stages,
                "over_start": over_start,
                "all_over_start": all_over_start,
                "rank_over_never": (over_start / report.new_stages) / (all_over_start / stages),
                "repack_seconds": report.decide_seconds + report.migrate_seconds + report.world_seconds,
            }
        )
        say(f"phase {number}: {rows[-1]}")
    if torch.distributed.get_rank() == 0:
        show_phases(arguments, stages, rows)


def show_phases(arguments: argparse.Namespace, stages: int, rows: list[dict[str, Any]]) -> None:
    cells = [[f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    print_table([name.replace("_", " ") for name in rows[0]], cells)
    iterations = sum(row["iterations"] for row in rows)
    average = sum(row["iterations"] * row["stages"] for row in rows) / iterations
    kept, on_all = (
        iterations / sum(row["iterations"] / row[key] for row in rows) for key in ("over_start", "all_over_start")
    )
    print(
        f"{arguments.case}: {average:.1f} of {stages} stages on average; throughput {kept:.2f} of the dense start, "
        f"{on_all:.2f} on all stages; per rank {(kept / average) / (on_all / stages):.2f} of never re-packing"
    )
    summary = {"case": arguments.case, "stages": stages, "average_stages": average, "over_start": kept}
    write_json(arguments.json, {**summary, "all_over_start": on_all, "rows": rows})


# -- freezing -----------------------------------------------------------------------------------------


def freezing(arguments: argparse.Namespace) -> None:
    """Train while layers freeze from the first one on, and write the report."""
    repack = {"enabled": not arguments.never, "max_slowdown": 0.1}
    block = {"report": arguments.report, "profile": {}, "log": True, "repack": repack}
    layers, batches = arguments.layers, data()
    engine = make_engine("makespan", layers=layers, micro_batches=arguments.micro_batches, interval=5, block=block)
    frozen = {int(arguments.steps * at): int(layers * share) for at, share in FREEZES}
    for step in range(arguments.steps):
        if step in frozen:
            count = frozen[step]
            works = (0.0,) * count + (1.0,) * (layers - count)
            set_loads(engine, Phase(1, (1.0,) * layers, works, works), arguments.forward_ms / 1e3)
            if count:
                engine.model_changed(f"freezing: first {count} layers")
        engine.train_batch(batches)
        if engine.released:
            return


# -- memory -------------------------------------------------------------------------------------------


def prepared(arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return flags of scripts/train.py, and the configuration that they name with its changes."""
    config, changes = arguments.deepspeed_config, arguments.changes
    if config is None:
        config, changes = PRUNED, [*IN_LITTLE_MEMORY, *changes]
    flags = ["--deepspeed_config", config, "--steps", str(arguments.steps)]
    if arguments.data is not None:
        flags += ["--data", arguments.data]
    return flags, load_settings(Path(config), changes)


def memory(arguments: argparse.Namespace) -> None:
    """Train within the memory that the dense model needs, and show the ranks at work."""
    with refusals_of("repack.py memory"):
        flags, settings = prepared(arguments)
        unlimited = prepare_without_limit(flags, settings)
    begin_rank()
    found = train_within_limit(flags, unlimited, settings)
    if found is not None:
        show_memory(found)
        write_json(arguments.json, found)


# -- restart ------------------------------------------------------------------------------------------


def restart(arguments: argparse.Namespace) -> None:
    """Launch the job twice: to re-pack and save, and to resume from its checkpoint."""
    with scratch_folder() as folder:
        launch(folder, STAGES)
        began = time.time()
        launch(folder, FEWER, "--resume")
        records = [json.loads(line) for line in (folder / "records").read_text().splitlines()]
    found = {name: value for record in records for name, value in record.items()}
    found["launch, import, initialize"] = found.pop("ready") - began
    print("re-packed while running, from 4 to 2 stages, and by a checkpoint and a new launch; seconds:")
    print_table(("part", ""), [(name, f"{value:.3f}") for name, value in found.items()])
    write_json(arguments.json, found)


def launch(folder: Path, stages: int, *more: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = ["worker", "--folder", str(folder), *more]
    command = ["deepspeed", "--num_gpus", str(stages), "--master_port", str(port), __file__, *own]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with guarded_group(job):
        printed, errors = job.communicate()
    if job.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{printed[-2000:]}\n{errors[-2000:]}")


def worker(arguments: argparse.Namespace) -> None:
    """Run a rank of the job. Weight and AdamW's state are 12 bytes per parameter."""
    engine = pipeline_engine(
        [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)],
        micro_batches=8,
        dynmo={"interval": 0, "log": False},
        gradient_clipping=1.0,
    )
    batch = torch.ones(1, WIDTH), torch.zeros(1, WIDTH)
    train = partial(engine.train_batch, iter(lambda: batch, None))
    save = str(arguments.folder / "saved")
    first_rank = torch.distributed.get_rank() == 0
    if arguments.resume:
        found = {
            "ready": time.time(),
            "load": timed(lambda: engine.load_checkpoint(save)),
            "next batch after the launch": timed(train),
        }
        write(arguments.folder, found, first_rank)
        return
    for _ in range(4):
        train()
    saved = {"save": timed(lambda: engine.save_checkpoint(save))}
    report = engine.repack(FEWER)
    if engine.released:
        return
    parts = {"decide": report.decide_seconds, "migrate": report.migrate_seconds, "world": report.world_seconds}
    write(arguments.folder, {**parts, "next batch": timed(train), **saved}, first_rank)


def write(folder: Path, record: dict[str, float], is_asked: bool) -> None:
    if is_asked:
        with (folder / "records").open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def main(given: list[str]) -> None:
    arguments = parse(given)
    if arguments.kind == "restart":
        restart(arguments)
        return
    if arguments.kind == "memory":
        memory(arguments)
        return
    begin_rank()
    {"phases": phases, "freezing": freezing, "worker": worker}[arguments.kind](arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
