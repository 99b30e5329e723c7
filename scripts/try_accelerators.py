#!/usr/bin/env python3
"""Try everything that needs accelerators on those of this machine, and say what held.

    bash scripts/try_accelerators.sh                          # sets up first; takes the better part of an hour
    bash scripts/try_accelerators.sh --quick                  # short sizes, a few minutes; seconds are not judged
    bash scripts/try_accelerators.sh --only schedules --only memory

Steps: tests, quickstart, schedules, migration, overhead, memory. A step that fails, or takes longer than its limit,
does not stop the others. FOLDER, accelerators/DATE by default, gets results.json, page.md, and the figures and the
output of each command. Ends with 1 if an expectation does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ds_dynmo.cli.command_line import check_at_least_1, path_of, refusals_of, write_json
from ds_dynmo.errors import counted
from ds_dynmo.files import write_text
from guard import guarded_group

ROOT = Path(__file__).resolve().parents[1]
EMULATED = ("cpu", "emulated")  # accelerators whose kernels are the CPU's: their seconds say nothing
OUTPUT_LINES, FAILED_LINES = 15, 60  # of a command's output that the page has
ENVIRONMENT = (  # of what torch knows about the machine, for the page
    "os",
    "python_version",
    "nvidia_driver_version",
    "cuda_runtime_version",
    "cuda_compiled_version",
    "cudnn_version",
    "hip_runtime_version",
    "hip_compiled_version",
)

# What is expected.
LEAST_OVER_STOCK = 1.0  # zero bubble's batches per second, over DeepSpeed's 1F1B
LEAST_OF_RAW = 0.5  # bandwidth of a move, over a plain send of the same bytes
MOST_PROFILED = 1.10  # seconds of a profiled batch, over one that is not
MOST_OF_RUN = 0.01  # share of a run that decisions take at interval 100
ALLOCATED = (0.9, 1.1)  # bytes allocated at most, over those predicted


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Attributes:
        devices: the numbers of the accelerators, as DeepSpeed's launcher counts them.
        kind: their name in DeepSpeed.
        quick: short sizes.
        folder: gets all files.
    """

    devices: tuple[int, ...]
    kind: str
    quick: bool
    folder: Path

    @property
    def judges_seconds(self) -> bool:
        """Return whether expectations of seconds are judged: in full sizes, on devices with kernels of their own."""
        return not self.quick and self.kind not in EMULATED


class Expectation(NamedTuple):
    """What should hold.

    Attributes:
        held: None: it is not judged here.
        timed: it is about seconds.
    """

    says: str
    figures: str
    held: bool | None
    timed: bool = False


@dataclass
class Done:
    """A command that has run.

    Attributes:
        fault: None: it ended well.
        figures: None: it wrote none.
        output: its end.
    """

    label: str
    command: str
    seconds: float
    fault: str | None
    figures: Any
    output: list[str]


@dataclass
class Outcome:
    """A step's commands and expectations.

    Attributes:
        skipped: why; None: it was not.
    """

    step: str
    skipped: str | None = None
    commands: list[Done] = field(default_factory=list)
    expectations: list[Expectation] = field(default_factory=list)


# -- the commands of each step: by label, their words before the file of their figures --------------------

Commands = Mapping[str, Sequence[str]]


def tests(trial: Trial) -> Commands:
    chosen = ["-k", "clocks or transfers_wait"] if trial.quick else []
    return {"tests": ["bash", "scripts/test.sh", "--accelerator", "-rs", *chosen, "--junitxml"]}


def quickstart(trial: Trial) -> Commands:
    steps = ["--steps", "20"] if trial.quick else []
    return {"quickstart": ["bash", "scripts/quickstart.sh", "--accelerator", *steps, "--report"]}


def schedules(trial: Trial) -> Commands:
    stages = len(trial.devices)
    words = ["scripts/schedules.py", "--compute", "real", "--deterministic"]
    words += ["--arm", "1f1b", "--arm", "zero_bubble", "--arm", "auto", *block_sizes(trial)]
    if trial.quick:
        words += ["--layers", str(2 * stages), "--micro-batches", str(2 * stages), "--batches", "3"]
    else:
        words += ["--layers", str(6 * stages), "--micro-batches", str(4 * stages), "--batches", "30"]
    return {"schedules": launched(trial.devices, *words)}


def migration(trial: Trial) -> Commands:
    """Take all pairs of devices, and the first one also in fp32; with --quick only that."""
    sizes = ["0.1", "--pairs", "2"] if trial.quick else ["32"]
    pairs = list(itertools.combinations(trial.devices, 2))
    chosen = [(pairs[0], "fp32"), *((pair, "bf16-zero1") for pair in (pairs[:1] if trial.quick else pairs))]
    return {
        f"devices {first} and {second}, {precision}": launched(
            (first, second), "scripts/migration.py", "--precision", precision, "--layer-parameters", *sizes
        )
        for (first, second), precision in chosen
    }


def overhead(trial: Trial) -> Commands:
    words = ["scripts/emulate.py", "overhead", "--compute", "real", *block_sizes(trial)]
    words += ["--pairs", "4", "--micro-batches", "4"] if trial.quick else ["--pairs", "30"]
    return {"overhead": launched(trial.devices[:2], *words)}


def memory(trial: Trial) -> Commands:
    return {"memory": launched(trial.devices, "scripts/emulate.py", "allocated", *block_sizes(trial, quick=256))}


def block_sizes(trial: Trial, quick: int = 64) -> list[str]:
    hidden, sequence = (quick, quick) if trial.quick else (1024, 2048)
    return ["--hidden-size", str(hidden), "--sequence-length", str(sequence)]


def launched(devices: Sequence[int], *words: str) -> list[str]:
    """Run a script of ours on these devices, by DeepSpeed's launcher."""
    include = "localhost:" + ",".join(map(str, devices))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--include", include]
    return [*launcher, "--master_port", str(free_port()), *words, "--json"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- what is expected of their figures, by label ----------------------------------------------------------

Figures = Mapping[str, Any]


def judge_tests(found: Figures) -> list[Expectation]:
    count = {name: int(found["tests"][name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    figures = f"{passed} passed, {failed} failed, {count['skipped']} skipped"
    return [Expectation("tests pass, and none fails", figures, passed > 0 and not failed)]


def judge_quickstart(found: Figures) -> list[Expectation]:
    start, *records = found["quickstart"]
    end = records[-1]
    first, last = end["first_train_loss"], end["train_loss"]
    moves = sum(record["bytes_moved"] > 0 for record in records if record["kind"] == "rebalance")
    expected = [Expectation("the loss falls", f"{first:.3f} to {last:.3f}", last < first)]
    if start["stages"] > 1:
        moved = f"{counted(moves, 'move')}, {end['tokens_per_second']:,.0f} tokens/s"
        expected.append(Expectation("layers move as others freeze", moved, moves > 0, timed=True))
    return expected


def judge_schedules(found: Figures) -> list[Expectation]:
    figures = found["schedules"]
    differing = ", ".join(figures["differing_weights"])
    expected = [
        Expectation("every schedule trains the same weights, bit for bit", differing or "all equal", not differing)
    ]
    for arm in figures["arms"]:
        if arm["arm"] in ("zero_bubble", "auto"):
            ratio = arm["speedup_over_stock"]
            says = f'"{arm["arm"]}" is as fast as DeepSpeed\'s 1F1B, or faster'
            times = f"{ratio:.3f} of its speed, batches of {1e3 * arm['seconds']:.1f} ms"
            expected.append(Expectation(says, times, ratio >= LEAST_OVER_STOCK, timed=True))
    return expected


def judge_migration(found: Figures) -> list[Expectation]:
    return [
        Expectation(
            f"{label}: layers travel at {LEAST_OF_RAW} of a plain send's bandwidth, or more",
            f"{figures['bytes'] / 2**20:,.0f} MiB, {figures['bytes'] / figures['move_seconds'] / 1e9:.2f} GB/s, plain "
            f"{figures['bytes'] / figures['raw_seconds'] / 1e9:.2f} GB/s: {figures['bandwidth_over_raw']:.2f}",
            figures["bandwidth_over_raw"] >= LEAST_OF_RAW,
            timed=True,
        )
        for label, figures in found.items()
    ]


def judge_overhead(found: Figures) -> list[Expectation]:
    figures = found["overhead"]
    profiled = figures["profiled over plain batch (median of pairs)"]
    share = figures["share of a run at interval 100"]
    return [
        Expectation(
            f"a profiled batch takes {MOST_PROFILED} of one that is not, or less",
            f"{profiled:.3f}, batches of {figures['batch ms']:.1f} ms",
            profiled <= MOST_PROFILED,
            timed=True,
        ),
        Expectation(
            f"at interval 100 profiles, decisions and moves take {MOST_OF_RUN:.0%} of a run, or less",
            f"{share:.2%}",
            share <= MOST_OF_RUN,
            timed=True,
        ),
    ]


def judge_memory(found: Figures) -> list[Expectation]:
    """Judge allocated bytes, but not of a CPU, which does not count them."""
    least, most = ALLOCATED
    counts = found["memory"]["machine"]["accelerator"] != "cpu"
    expected = []
    for row in found["memory"]["rows"]:
        case = f"{row['schedule']}, {row['precision']}, checkpointing {row['checkpointing']}"
        shares = {
            key: [held / predicted for held, predicted in zip(row[key], row["predicted_bytes"])]
            for key in ("measured_bytes", "step_bytes")
        }
        for says, key, held in (
            (
                f"passes allocate {least} to {most} of what is predicted",
                "measured_bytes",
                least <= min(shares["measured_bytes"]),
            ),
            (f"the optimizer's step allocates {most} of that, or less", "step_bytes", True),
        ):
            figures = ", ".join(f"{share:.3f}" for share in shares[key])
            held = held and max(shares[key]) <= most
            most_bytes = max(row[key]) / 2**20
            expected.append(
                Expectation(f"{case}: {says}", f"{figures}; at most {most_bytes:,.0f} MiB", held if counts else None)
            )
    return expected


class Step(NamedTuple):
    """Commands that run one after the other.

    Attributes:
        devices: that it needs at least; ``why`` it does.
        limit: seconds of each command.
    """

    name: str
    commands: Callable[[Trial], Commands]
    judge: Callable[[Figures], list[Expectation]]
    limit: float
    devices: int = 1
    why: str = ""


STEPS = (
    Step("tests", tests, judge_tests, 2400),
    Step("quickstart", quickstart, judge_quickstart, 900),
    Step("schedules", schedules, judge_schedules, 900, 2, "one stage never waits for another"),
    Step("migration", migration, judge_migration, 300, 2, "one device has no other to send layers to"),
    Step("overhead", overhead, judge_overhead, 600),
    Step("memory", memory, judge_memory, 900),
)


# -- running them -----------------------------------------------------------------------------------------


def try_step(step: Step, trial: Trial) -> Outcome:
    """Run a step's commands and judge their figures."""
    outcome = Outcome(step.name)
    if len(trial.devices) < step.devices:
        outcome.skipped = f"needs {step.devices} devices, {len(trial.devices)} here: {step.why}"
        say(f"  skipped: {outcome.skipped}")
        return outcome
    for number, (label, words) in enumerate(step.commands(trial).items()):
        outcome.commands.append(run(label, words, trial.folder / f"{step.name}{number or ''}", step.limit))
    faults = [f"{done.label}: {done.fault}" for done in outcome.commands if done.fault]
    outcome.expectations.append(Expectation(f"{step.name} runs to its end", "; ".join(faults) or "it did", not faults))
    found = {done.label: done.figures for done in outcome.commands if done.figures is not None}
    try:
        outcome.expectations += [judged(expected, trial) for expected in (step.judge(found) if found else ())]
    except (LookupError, TypeError) as error:  # as of a report that a killed run left
        outcome.expectations.append(Expectation(f"{step.name} writes all figures", repr(error), False))
    return outcome


def judged(expected: Expectation, trial: Trial) -> Expectation:
    return expected._replace(held=None) if expected.timed and not trial.judges_seconds else expected


def run(label: str, words: Sequence[str], files: Path, limit: float) -> Done:
    """Run a command, whose output and figures go to files of this name."""
    figures, log = files.with_suffix(".figures"), files.with_suffix(".log")
    command = [*words, str(figures)]
    say(f"  {label}: {limit:g} s at most, output in {log}")
    began, fault = time.perf_counter(), None
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
        )
        with guarded_group(process):
            try:
                if process.wait(limit):
                    fault = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                fault = f"not done after {limit:g} s"
    seconds = time.perf_counter() - began
    say(f"  {label}: {fault or 'done'}, {seconds:.0f} s")
    found = read_figures(figures)
    if found is None and fault is None:
        fault = "no figures were written"
    lines = log.read_text(errors="replace").splitlines()
    return Done(label, shlex.join(command), seconds, fault, found, lines[-(FAILED_LINES if fault else OUTPUT_LINES) :])


def read_figures(path: Path) -> Any:
    """Read JSON, lines of it, or what pytest writes for JUnit; None: it is not there, or not whole."""
    text = path.read_text() if path.exists() else ""
    try:
        if text.startswith("<?xml"):
            return dict(ElementTree.fromstring(text)[0].attrib)
        if text.startswith('{"'):
            return [json.loads(line) for line in text.splitlines()]
        return json.loads(text)
    except (ValueError, ElementTree.ParseError):
        return None


def say(text: str) -> None:
    print(text, flush=True)


# -- what is written --------------------------------------------------------------------------------------

VERDICTS = {True: "held", False: "**did not hold**", None: "not judged"}


def page(results: Mapping[str, Any]) -> str:
    """Make the page of what :func:`record` returned."""
    machine, steps = results["machine"], results["steps"]
    expectations = [(step["step"], expected) for step in steps for expected in step["expectations"]]
    names = ", ".join(f"{machine['devices'].count(name)} × {name}" for name in dict.fromkeys(machine["devices"]))
    rows = [
        (
            "accelerator",
            f"{machine['accelerator']}, {results['devices']} tried of {machine['count']}: {names or 'unnamed'}",
        ),
        ("torch, deepspeed", f"{machine['torch']}, {machine['deepspeed']}"),
        ("processor", f"{machine['processor']}, {counted(machine['cores'], 'core')}"),
        *((name.replace("_", " "), value) for name, value in machine["environment"].items() if name in ENVIRONMENT),
        ("form", "quick: short sizes" if results["quick"] else "full"),
        ("seconds", "judged" if results["judges_seconds"] else "not judged: short sizes, or no device of its own"),
    ]
    lines = [f"# Accelerators, {results['date']}", "", f"**{summary(steps)}**", "", *table(("", ""), rows), ""]
    lines += ["## Expectations", ""]
    cells = [(step, says, figures, VERDICTS[held]) for step, (says, figures, held, _) in expectations]
    skipped = [(step["step"], "", step["skipped"], "skipped") for step in steps if step["skipped"]]
    lines += table(("step", "expected", "figures", ""), [*cells, *skipped])
    for step in steps:
        for done in step["commands"]:
            lines += [
                "",
                f"## {step['step']}: {done['label']}",
                "",
                f"{done['fault'] or 'Done'}, {done['seconds']:.0f} s",
            ]
            lines += ["", *(f"    {line}" for line in [f"$ {done['command']}", *done["output"]])]
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


def summary(steps: Sequence[Mapping[str, Any]]) -> str:
    """Count what held and what did not."""
    verdicts = [expected[2] for step in steps for expected in step["expectations"]]
    counts = f"{verdicts.count(True)} of {counted(verdicts.count(True) + verdicts.count(False), 'expectation')} held"
    skipped = sum(step["skipped"] is not None for step in steps)
    return f"{counts}, {verdicts.count(None)} not judged, {counted(skipped, 'step')} skipped"


def record(trial: Trial, machine: Mapping[str, Any], date: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Collect everything for results.json."""
    settings = {
        "date": date,
        "devices": len(trial.devices),
        "quick": trial.quick,
        "judges_seconds": trial.judges_seconds,
    }
    return {**settings, "machine": dict(machine), "steps": [asdict(outcome) for outcome in outcomes]}


def describe_machine() -> dict[str, Any]:
    """Say which devices there are, and what drives them."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.collect_env import get_env_info

    from ds_dynmo.cli.hardware import hardware

    accelerator = get_accelerator()
    visible = os.environ.get(accelerator.visible_devices_envs()[0], "").split(",")
    found = {name: value for name, value in get_env_info()._asdict().items() if value not in (None, "N/A")}
    return {
        **hardware(),
        "count": accelerator.device_count(),
        # DeepSpeed's launcher counts all devices of the machine.
        "numbers": [int(text) for text in visible] if all(map(str.isdigit, visible)) else None,
        "environment": found,
    }


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=path_of, nargs="?", metavar="FOLDER", help="default: accelerators/DATE")
    parser.add_argument("--only", action="append", choices=[step.name for step in STEPS], help="may be repeated")
    parser.add_argument("--devices", type=int, metavar="N", help="take the first N (default: all that DeepSpeed sees)")
    parser.add_argument("--quick", action="store_true", help="short sizes; seconds are not judged")
    arguments = parser.parse_args(given)
    with refusals_of("try_accelerators.py"):
        check_at_least_1(arguments, "devices")
    date = datetime.now().astimezone().isoformat(timespec="minutes")
    folder: Path = (arguments.folder or ROOT / "accelerators" / date[:16].replace(":", "")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # A program of its own, as it may take memory of a device until it ends.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as program:
        machine = program.submit(describe_machine).result()
    devices = tuple(machine["numbers"] or range(machine["count"]))[: arguments.devices]
    trial = Trial(devices, machine["accelerator"], arguments.quick, folder)
    steps = [step for step in STEPS if not arguments.only or step.name in arguments.only]
    outcomes: list[Outcome] = []
    for number, step in enumerate(steps, start=1):
        say(f"[{number}/{len(steps)}] {step.name}")
        outcomes.append(try_step(step, trial))
        results = record(trial, machine, date, outcomes)
        write_json(folder / "results.json", results)
        write_text(folder / "page.md", page(results))
    say("")
    for outcome in outcomes:
        for expected in outcome.expectations:
            say(f"{VERDICTS[expected.held].strip('*')}: {outcome.step}: {expected.says}: {expected.figures}")
        if outcome.skipped:
            say(f"skipped: {outcome.step}: {outcome.skipped}")
    say(f"{summary(results['steps'])}: {folder / 'page.md'}")
    return int(any(expected.held is False for outcome in outcomes for expected in outcome.expectations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
