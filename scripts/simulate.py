#!/usr/bin/env python3
"""What rebalancing brings at any scale, simulated from the paper's load formulas or from a recorded run.

    python scripts/simulate.py                                     # the paper's settings, beside its figures
    python scripts/simulate.py --case pruning --stages 8 --micro-batches 16
    python scripts/simulate.py --case moe --interval 10 --link-gbps 50
    python scripts/simulate.py --report run.jsonl --stages 4       # load signals that scripts/train.py recorded
    python scripts/simulate.py --repack                            # fewer stages as a model is pruned

Speedups are over the best static partition of the same dynamic model, of uniform, by parameters and balanced by the
loads of the first iteration, where every balancer starts; and over the dense model. "full" is the time
that the busiest stage works, as under a schedule almost without bubbles of its own, which is the paper's; "1F1B" is
DeepSpeed's schedule, links included.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_dynmo.errors import ConfigError, PartitionError
from simulation.loads import CASES, Case, Phase, recorded_phases
from simulation.paper import AVERAGE_GPUS, PAPER
from simulation.repacking import repack_rows, sustained_stages
from simulation.runs import ARMS, STATIC, STATICS, Outcome, Setting, compare
from simulation.statics import label


@dataclass(frozen=True)
class Recorded:
    """The load signals of a run, as a case."""

    recorded: tuple[Phase, ...]
    name: str = "recorded"
    interval: int = 1
    announces: bool = True
    stages: int = 2
    replicas: int = 1

    @property
    def layers(self) -> int:
        return len(self.recorded[0].forward)

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        return list(self.recorded)


def rows_of(case: Case, setting: Setting, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per balancer."""
    arms = [arm for arm in ARMS if arm in (*STATICS, "dense", *arguments.balancers)]
    outcomes = compare(case, setting, arms, count=arguments.phases, seeds=arguments.seeds)
    return [row(case.name, arm, outcomes, setting) for arm in arms]


def row(case: str, arm: str, outcomes: dict[str, Outcome], setting: Setting) -> dict[str, Any]:
    own, uniform, dense = outcomes[arm], outcomes[STATIC], outcomes["dense"]
    statics = [outcomes[name] for name in STATICS]
    best = min(statics, key=lambda one: one.full_seconds)
    best_1f1b = min(statics, key=lambda one: one.schedule_seconds)
    return {
        "case": case,
        "balancer": arm,
        "tokens_per_second": setting.tokens / own.full_seconds,
        "tokens_per_second_1f1b": setting.tokens / own.schedule_seconds,
        "speedup_over_static": best.full_seconds / own.full_seconds,
        "speedup_over_static_1f1b": best_1f1b.schedule_seconds / own.schedule_seconds,
        "speedup_over_static_at_end": best.last_seconds / own.last_seconds,
        "speedup_over_uniform": uniform.full_seconds / own.full_seconds,
        "speedup_over_uniform_at_end": uniform.last_seconds / own.last_seconds,
        "speedup_over_dense": dense.full_seconds / own.full_seconds,
        "speedup_over_dense_1f1b": dense.schedule_seconds / own.schedule_seconds,
        "bubble_ratio": own.full_bubble,
        "bubble_ratio_1f1b": own.schedule_bubble,
        "imbalance": own.imbalance,
        "overhead_migrate": own.move_seconds / own.full_seconds,
        "moves": own.moves,
    }


def print_case(rows: Sequence[dict[str, Any]], setting: Setting) -> None:
    scale = f"{setting.layers} layers, {setting.stages} stages x {setting.replicas} replicas"
    print(f"\n{rows[0]['case']}: {scale}, {setting.micro_batches} micro-batches, interval {setting.interval}")
    print(f"{'':<22}{'--- full ---':^36}{'--- 1F1B ---':^36}")
    heads = ("best static", "over dense", "bubble")
    print(f"{'balancer':<22}" + "".join(f"{head:>12}" for head in heads * 2) + f"{'imbalance':>12}{'moves':>7}")
    for one in rows:
        figures = [
            one[f"{name}{kind}"]
            for kind in ("", "_1f1b")
            for name in ("speedup_over_static", "speedup_over_dense", "bubble_ratio")
        ]
        print(
            f"{label(one['balancer']):<22}"
            + "".join(f"{figure:>12.2f}" for figure in figures)
            + f"{one['imbalance']:>12.2f}{one['moves']:>7}"
        )


def print_beside_the_paper(rows: Sequence[dict[str, Any]]) -> None:
    print("\nBeside the paper: its schedule is almost without bubbles of its own ('full'), its static is uniform\n")
    heads = (
        *("case", "speedup over", "paper", "best", "at end", "ideal", "over best static", "at end", "bubble before"),
        *("paper's", "after", "paper's"),
    )
    widths = (18, 14, 14, 7, 8, 7, 18, 8, 15, 18, 7, 8)
    print("".join(f"{head:<{width}}" for head, width in zip(heads, widths)))
    for case, published in PAPER.items():
        own = {one["balancer"]: one for one in rows if one["case"] == case}
        if not own:
            continue
        key = "speedup_over_dense" if published.over == "dense" else "speedup_over_uniform"
        dynamic = [one for arm, one in own.items() if arm not in (*STATICS, "dense", "oracle")]
        best = max(dynamic, key=lambda one: float(one[key])) if dynamic else own[STATIC]
        figures = (
            case,
            published.over,
            published.speedup,
            f"{best[key]:.2f}",
            f"{best['speedup_over_uniform_at_end']:.2f}" if published.over != "dense" else "",
            f"{own['oracle'][key]:.2f}" if "oracle" in own else "",
            f"{best['speedup_over_static']:.2f}",
            f"{best['speedup_over_static_at_end']:.2f}",
            f"{own[STATIC]['bubble_ratio']:.0%}",
            published.bubble_before,
            f"{best['bubble_ratio']:.0%}",
            published.bubble_after,
        )
        print("".join(f"{figure:<{width}}" for figure, width in zip(figures, widths)))
    print()
    for case, published in PAPER.items():
        if any(one["case"] == case for one in rows):
            print(f"{case}: {published.why}.")


def print_repacking(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Pruning on fewer and fewer stages of one replica."""
    rows = repack_rows(arguments.layers or 48, (8, 6, 4, 2), seeds=arguments.seeds)
    print("\npruning, re-packed from 8 stages (partition by time, full)\n")
    print(f"{'sparsity':<10}{'stages':>7}{'tokens/s':>12}{'per rank':>12}{'over 8 dense':>14}")
    for one in rows:
        print(
            f"{one['sparsity']:<10.1%}{one['stages']:>7}{one['tokens_per_second']:>12,.0f}"
            f"{one['tokens_per_second_per_rank']:>12,.0f}{one['over_dense']:>14.2f}"
        )
    average = sustained_stages(rows)
    print(
        f"\nfewest stages that sustain the dense throughput, average of the run: {average:.1f} (paper: {AVERAGE_GPUS})"
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all; may be repeated")
    parser.add_argument("--report", type=Path, metavar="FILE", help="a report of scripts/train.py in place of cases")
    parser.add_argument("--layers", type=int, help="default: the paper's for the case")
    parser.add_argument("--stages", type=int, help="default: the paper's, 24 or 16")
    parser.add_argument("--replicas", type=int, help="default: the paper's, 30 or 8")
    parser.add_argument("--micro-batches", type=int, help="of one replica, default: 4 for each stage")
    parser.add_argument("--interval", type=int, help="iterations between rebalances, default: the paper's")
    parser.add_argument("--link-gbps", type=float, default=200, help="between stages, default %(default)s")
    parser.add_argument("--balancers", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--phases", type=int, default=20, help="of a run, or iterations simulated, default %(default)s")
    parser.add_argument("--seeds", type=int, default=8, help="runs per figure, default %(default)s")
    parser.add_argument("--repack", action="store_true", help="the table of re-packing instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    arguments = parser.parse_args()
    try:
        check(arguments)
        rows = print_repacking(arguments) if arguments.repack else print_cases(arguments)
    except (ConfigError, PartitionError) as error:
        parser.error(str(error))
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": printable(arguments), "rows": rows}, indent=2) + "\n")


def check(arguments: argparse.Namespace) -> None:
    """Refuse what is no number of anything.

    Raises:
        ConfigError: naming the option and its value.
    """
    for option in ("layers", "stages", "replicas", "micro_batches", "interval", "link_gbps", "phases", "seeds"):
        value = getattr(arguments, option)
        if value is not None and value <= 0:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: should be greater than 0")


def print_cases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    cases: list[Case]
    if arguments.report:
        cases = [Recorded(tuple(recorded_phases(arguments.report)))]
    else:
        cases = [CASES[name] for name in arguments.case or CASES]
    rows = []
    for case in cases:
        setting = Setting.of(
            case,
            layers=arguments.layers,
            stages=arguments.stages,
            replicas=arguments.replicas,
            micro_batches=arguments.micro_batches,
            interval=arguments.interval,
            link_bytes_per_second=arguments.link_gbps / 8 * 1e9,
        )
        rows.append((rows_of(case, setting, arguments), setting))
        print_case(*rows[-1])
    flat = [one for of_case, _ in rows for one in of_case]
    print_beside_the_paper(flat)
    return [{**one, "setting": asdict(setting)} for of_case, setting in rows for one in of_case]


def printable(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


if __name__ == "__main__":
    main()
