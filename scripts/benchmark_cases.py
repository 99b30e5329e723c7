#!/usr/bin/env python3
"""Each dynamic case on real text, three ways in turns: DynMo on, switched off, and the dense model of the same size.

    OMP_NUM_THREADS=1 python scripts/benchmark_cases.py freezing --steps 200
    OMP_NUM_THREADS=1 python scripts/benchmark_cases.py moe mod --steps 100 --json cases.json

"Off" is the same dynamic model under the partition it starts at: the baseline. Its losses have to be those of "on", to
the bit in fp32, and a difference is an error. The table shows tokens per second, losses, and what profiling, deciding
and moving cost of the run. The runs go through scripts/train.py, one after the other; medians over ``--repeat``.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "ds_configs"
SIZES = ("layers", "hidden_size", "heads", "sequence_length", "mlp_ratio", "tied_embedding", "seed", "vocab_size")
WAYS = ("on", "off", "dense")


def settings_for(case: str, way: str) -> dict[str, Any]:
    """The case's configuration; "off" is the same model without moves, "dense" one of its size that never changes."""
    settings: dict[str, Any] = json.loads((CONFIGS / f"{case}.json").read_text())
    if way != "on":
        settings["dynmo"] = {**settings["dynmo"], "enabled": False}
    if way == "dense":
        settings["model"] = {key: value for key, value in settings["model"].items() if key in SIZES}
    return settings


def train(arguments: argparse.Namespace, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run of scripts/train.py: its last record, and what it reported of every decision."""
    config, report = folder / "config.json", folder / "report.jsonl"
    config.write_text(json.dumps(settings))
    launch = ["deepspeed", "--num_gpus", str(arguments.stages), "--master_port", str(free_port())]
    command = [*launch, str(ROOT / "scripts" / "train.py")]
    command += ["--deepspeed_config", str(config), "--steps", str(arguments.steps), "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    records = [json.loads(line) for line in report.read_text().splitlines()]
    decisions = [record for record in records if record["kind"] == "rebalance"]
    end: dict[str, Any] = records[-1]
    parts = {
        part: sum(record[f"{part}_seconds"] for record in decisions) / end["train_seconds"]
        for part in ("profile", "decide", "migrate")
    }
    moved = sum(record["layers_moved"] > 0 for record in decisions)
    return {**end, "decisions": len(decisions), "moves": moved, "shares": parts, "share": sum(parts.values())}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(arguments: argparse.Namespace, case: str) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(arguments.repeat):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                runs[way].append(train(arguments, settings_for(case, way), Path(folder)))
            print(f"{case}, {way}: {runs[way][-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr, flush=True)
    on, off = runs["on"][0], runs["off"][0]
    if on["validation_losses"] != off["validation_losses"]:
        losses = {way: runs[way][0]["validation_losses"] for way in ("on", "off")}
        raise SystemExit(f"{case}: validation losses differ: {losses}")
    return [
        {
            "case": case,
            "dynmo": way,
            "tokens_per_second": statistics.median(run["tokens_per_second"] for run in runs[way]),
            "over_off": statistics.median(
                run["tokens_per_second"] / base["tokens_per_second"] for run, base in zip(runs[way], runs["off"])
            ),
            "share_of_run": statistics.median(run["share"] for run in runs[way]),
            **{key: runs[way][0][key] for key in ("validation_losses", "partition", "decisions", "moves", "shares")},
        }
        for way in WAYS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem != "gpt")
    parser.add_argument("cases", nargs="+", choices=found)
    parser.add_argument("--steps", type=int, default=200, help="of each run, default %(default)s")
    parser.add_argument("--stages", type=int, default=2, help="of the pipeline, default %(default)s")
    parser.add_argument("--repeat", type=int, default=1, help="how often each run is made, default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        rows += measure(arguments, case)
        if arguments.json:  # after each case: later ones may fail
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    head = ("case", "dynmo", "tokens/s", "over off", "valid. loss", "moves", "share", "partition")
    print("{:<18}{:<7}{:>10}{:>10}{:>13}{:>7}{:>8}  {}".format(*head))
    for row in rows:
        print(
            f"{row['case']:<18}{row['dynmo']:<7}{row['tokens_per_second']:>10,.0f}{row['over_off']:>10.2f}"
            f"{row['validation_losses'][-1][1]:>13.3f}{row['moves']:>7}{row['share_of_run']:>8.2%}  {row['partition']}"
        )


if __name__ == "__main__":
    main()
