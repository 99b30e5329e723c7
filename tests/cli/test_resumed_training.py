"""scripts/train.py stopped or killed, and resumed, equals an uninterrupted run, to the bit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import string
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed.pipe import LayerSpec, PipelineModule

import ds_dynmo
from ds_dynmo.cli import command_line
from ds_dynmo.cli.train import batches, build_cases, build_engine, main, save, train
from ds_dynmo.cli.training.options import prepare
from ds_dynmo.cli.training.report import begin_report, continue_report, record_nothing
from ds_dynmo.cli.training.resuming import find_checkpoint, has_saved
from ds_dynmo.engine.save.destinations import ToMemory
from ds_dynmo.engine.save.folder import write_latest
from ds_dynmo.errors import CheckpointError
from ds_dynmo.models import DynamicCase, language_model_loss, model_layers
from simulation import Recorded
from tests.support.case_runs import SIZES
from tests.support.full_disk import files_of_at_most
from tests.support.harness import run, run_each
from tests.support.saved_runs import metadata_of
from tests.support.script import flags, run_command, run_script
from tests.support.training import Warnings, state, whole
from tests.support.watched_command import ROOT

pytestmark = pytest.mark.ranks

STEPS = 8


def signalled(arguments: list[str], received: dict[int, tuple[int, int]]) -> dict[str, Any]:
    """Run the script. A save in the background ends only once the third batch has begun.

    Args:
        received: by rank, the step in which it gets a signal, counted from 1, and the signal.
    """
    step, number = received.get(int(os.environ["RANK"]), (0, 0))
    has_begun, write_rest = threading.Event(), ToMemory.write_rest

    def held(files: ToMemory) -> None:
        assert has_begun.wait(60), "training waits for the save"
        write_rest(files)

    with patch.object(ToMemory, "write_rest", held):
        return run_script(arguments, before={3: has_begun.set, step: lambda: os.kill(os.getpid(), number)})


def test_a_run_stopped_by_signals_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """They come to ranks in different batches; a launcher's SIGTERM follows a SIGINT. It saves in the background."""
    arguments = [*flags(tmp_path, "slices tied, moe auxiliary loss", STEPS), "--report", str(tmp_path / "report.jsonl")]
    folder = tmp_path / "saved"
    saving = ["--save", str(folder), "--save-interval", "2", "--set", "dynmo.checkpoint=background"]
    in_one_go = run(2, run_script, arguments)
    received = {0: (5, signal.SIGTERM), 1: (4, signal.SIGINT)}
    begun = run(2, signalled, [*arguments, *saving], received)
    assert [rank["stopped"] for rank in begun] == [signal.SIGINT, signal.SIGINT]
    assert begun[0]["losses"] == in_one_go[0]["losses"][:5]
    assert find_checkpoint(folder) == (folder / "latest").read_text() == "global_step5"
    resumed = run(2, run_script, [*arguments, "--resume", str(folder)])
    assert resumed[0]["losses"] == in_one_go[0]["losses"][5:] and whole(resumed) == whole(in_one_go)


def left_alone(arguments: list[str], folder: Path) -> list[str]:
    """Lose rank 1 after SIGTERM came to rank 0; return what is in the folder of checkpoints in the end."""
    if os.environ["RANK"] == "0":
        begin = {3: lambda: os.kill(os.getpid(), signal.SIGTERM)}
    else:
        begin = {3: leave}
    with contextlib.suppress(RuntimeError, Left):
        run_script(arguments, before=begin)
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


class Left(Exception):
    """A rank takes no further part."""


def leave() -> None:
    raise Left


def test_nothing_is_saved_when_a_rank_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    arguments = [*flags(tmp_path, "dense", STEPS), "--save", str(folder)]
    assert run(2, left_alone, arguments, folder, complete=False) == [[], []]


@pytest.mark.parametrize(
    ("name", "killed_in"), [pytest.param("freezing and pruning", None, marks=pytest.mark.nightly), ("egeria", 7)]
)
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, killed_in: int | None, tmp_path: Path) -> None:
    """Also its schedule, without the flag --steps, and from the last complete checkpoint."""
    arguments = flags(tmp_path, name, STEPS)
    folder = tmp_path / "saved"
    saving = ["--save", str(folder), "--save-interval", "3"]
    in_one_go = run(2, run_script, arguments)
    if killed_in is None:
        begun = run(2, run_script, [*arguments, *saving, "--stop-at", "4"])
        assert begun[0]["losses"] == in_one_go[0]["losses"][:4]
        done = 4
    else:
        run(2, run_script, [*arguments, *saving], killed_in)
        done = 6
    assert {path.name for path in folder.glob("global_step*")} == {"global_step3", f"global_step{done}"}
    assert metadata_of(folder / find_checkpoint(folder))["step"] == done
    resumed = run(2, run_script, [*flags(tmp_path, name), "--resume", str(folder)])
    assert resumed[0]["losses"] == in_one_go[0]["losses"][done:]
    assert resumed[0]["validation"] == [(step, loss) for step, loss in in_one_go[0]["validation"] if step > done]
    assert whole(resumed) == whole(in_one_go)


def test_a_run_that_stopped_for_a_restart_is_resumed(tmp_path: Path) -> None:
    """It resumes at the size in launch.json, in the middle of a step, whose end the cases have not seen yet."""
    arguments = flags(tmp_path, "freezing and pruning", STEPS)
    in_one_go = run(2, run_script, arguments)
    folder = tmp_path / "saved"
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    repack = {"release": "checkpoint", "checkpoint": str(folder)}
    path.write_text(json.dumps({**settings, "dynmo": {**settings["dynmo"], "repack": repack}}))
    run(2, run_script, [*arguments, "--save", str(folder), "--save-interval", "2"], None, 5)
    launch = json.loads((folder / "launch.json").read_text())
    assert (launch["ranks"], launch["step"], launch["tag"]) == (1, 5, "global_step5")
    assert metadata_of(folder / "global_step4")["step"] == 4
    assert find_checkpoint(folder) == "global_step5"
    resumed = run(1, run_script, [*flags(tmp_path, "freezing and pruning"), "--resume", str(folder)])
    assert resumed[0]["losses"] == in_one_go[0]["losses"][5:]
    assert whole(resumed) == whole(in_one_go)


class Announcing(DynamicCase):
    """Gives a reason that the engine's own decisions have too."""

    name = "announcing"

    def before_batch(self, step: int) -> None:
        if step == 1:
            self.engine.model_changed("interval")


def reported(arguments: list[str]) -> tuple[list[float], str, list[tuple[int, float]]]:
    """Train with a model that changes once, and let rank 0 write the report.

    Returns:
        losses, what rank 0 printed and its engine warned of, and validation losses.
    """
    said, specify, warnings = io.StringIO(), LayerSpec.__init__, Warnings()
    with contextlib.redirect_stderr(said), patch.object(LayerSpec, "__init__", autospec=True) as specified:
        specified.side_effect = specify
        run = prepare(arguments)
        first_rank = os.environ["RANK"] == "0"
        unwritten = begin_report(run) if first_rank else []
        engine = build_engine(run)
        record = continue_report(run, engine, unwritten) if first_rank else record_nothing
        history = train(run, engine, [*build_cases(run, engine), Announcing(engine)], record)
        assert specified.call_count == engine.partition[-1]  # each layer once
        return history.losses, said.getvalue() + "\n".join(warnings.messages), history.validation_losses


def test_a_report_that_cannot_be_written_does_not_end_a_run(tmp_path: Path) -> None:
    arguments = flags(tmp_path, "dense", 3)
    plain = run(2, run_script, arguments)[0]["losses"]
    (first, said, _), (second, nothing, _) = run(2, reported, [*arguments, "--report", "/dev/full"])
    assert first == second == plain and nothing == ""
    assert said.count("was not written") == said.count("/dev/full: was not written: [Errno 28]") == 1


def test_reports_monitors_and_recordings_are_written_as_the_run_goes(tmp_path: Path) -> None:
    arguments = flags(tmp_path, "dense", 4)
    path = tmp_path / "config.json"
    monitors = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **monitors}))
    (tmp_path / "report.jsonl").write_text("of another run\n")
    arguments += ["--report", str(tmp_path / "report.jsonl")]
    saving = ["--save", str(tmp_path / "saved"), "--stop-at", "3", "--record", str(tmp_path / "loads.jsonl")]
    begun = run(2, reported, [*arguments, *saving])[0]
    resumed = run(2, reported, [*arguments, "--resume", str(tmp_path / "saved")])[0]  # goes on with the report
    losses, said, validations = (first + second for first, second in zip(begun, resumed, strict=True))
    records = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["train_loss"] for record in steps] == losses and said == ""
    found = [(record["step"], record["validation_loss"]) for record in records if record["kind"] == "validation"]
    assert found == validations and found[-1][0] == 4
    rows = (tmp_path / "job" / "Train_Samples_tokens_per_second.csv").read_text().splitlines()
    speeds = [float(row.split(",")[1]) for row in rows if row[0].isdigit()]  # each launch writes a header
    assert speeds == [record["tokens_per_second"] for record in steps]
    loads = [json.loads(line) for line in (tmp_path / "loads.jsonl").read_text().splitlines()[1:]]
    assert [(line["step"], line.get("changed")) for line in loads] == [(2, "interval"), (3, None)]


def test_a_recording_has_the_loads_of_every_batch_and_changes_no_number(tmp_path: Path) -> None:
    """Its run keeps layers where they are; the other one's move."""
    arguments = flags(tmp_path, "freezing and pruning", 2 * STEPS)
    path = tmp_path / "loads.jsonl"
    recorded = run(2, run_script, [*arguments, "--record", str(path)])
    plain = run(2, run_script, arguments)
    assert recorded[0]["losses"] == plain[0]["losses"] and whole(recorded) == whole(plain)
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 2 * STEPS + 1))  # the first batch warms up
    assert {"processor", "cores", "threads", "torch", "model", "micro_batches", "steps"} < header.keys()
    case = Recorded.read(path)
    assert (case.name, case.interval, case.layers, case.stages) == ("config", 2, header["partition"][-1], 2)
    assert header["whole_layers"] == [*range(case.layers + 1)] == [*case.whole]
    assert any("freezing: first 2 layers" in line.get("changed", "") for line in lines)
    frozen = next(one for one in case.iterations if not any(one.trainable[:2]))
    assert frozen.backward[:2] == (0, 0) and min(frozen.backward[2:]) > 0
    assert any(case.iterations[-1].backward[:2])  # they train again
    assert "load_signals" in lines[0] and sum("static_bytes" in line for line in lines) < len(lines)


def failure_to_save(arguments: list[str]) -> str:
    run = prepare(arguments)
    engine = build_engine(run)
    try:
        train(run, engine, build_cases(run, engine))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_that_cannot_be_the_latest_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """Without the section on the rank that would name it."""
    folder = tmp_path / "saved"
    (folder / "latest").mkdir(parents=True)
    arguments = [*flags(tmp_path, "dense", 3), "--save", str(folder)]
    for message in run(2, failure_to_save, [*arguments, "--set", "dynmo.checkpoint=background"]):
        assert message.startswith(f"{folder / 'global_step3'}: ") and "[Errno 21]" in message
    first, other = run(2, failure_to_save, [*arguments, "--take-over", "--set", "dynmo=null"])
    assert first.startswith(f"{folder}: checkpoint global_step3 was not saved: [Errno 21]") and other == ""


def saved_by_stock_deepspeed(arguments: list[str], folder: Path) -> list[int]:
    """Return the stages whose files are there, each time that ``latest`` is written."""
    found = []

    def name(save_dir: str, tag: str) -> None:
        assert not (folder / "latest").exists()
        found.append(len(list((folder / tag).glob("mp_rank_*_model_states.pt"))))
        write_latest(save_dir, tag)

    run = prepare(arguments)
    engine = build_engine(run)
    with patch("ds_dynmo.cli.train.write_latest", name):
        train(run, engine, build_cases(run, engine))
    return found


def test_without_the_section_a_checkpoint_is_the_latest_once_all_ranks_have_written_it(tmp_path: Path) -> None:
    arguments, folder = flags(tmp_path, "dense", 2), tmp_path / "saved"
    saving = ["--save", str(folder), "--set", "dynmo=null"]
    assert run(2, saved_by_stock_deepspeed, [*arguments, *saving], folder) == [[2], []]
    assert find_checkpoint(folder) == "global_step2" and metadata_of(folder / "global_step2")["step"] == 2


def command_on_a_full_disk(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of the command, whose saves find a full disk, and what it wrote to the error stream."""

    def limited(*given: Any) -> str:
        with files_of_at_most(2000):
            return save(*given)

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # of the world that is there
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
        patch.object(command_line, "FIRST_RANK_SECONDS", 0.0),
        patch("ds_dynmo.cli.train.save", limited),
    ):
        return main(arguments), said.getvalue()


def test_a_disk_that_is_full_at_the_first_save_gives_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "saved"
    given = [*flags(tmp_path, "dense", 2), "--save"]
    stock = tmp_path / "stock"  # DeepSpeed's files stay, and are not taken for a checkpoint
    answers = run_each(
        2, command_on_a_full_disk, ([*given, str(folder)],), ([*given, str(stock), "--set", "dynmo=null"],)
    )
    begins = (r"rank \d: OSError: ", f"{stock}: checkpoint global_step2 was not saved: ")
    for of_ranks, begin, saved in zip(answers, begins, (folder, stock)):
        for (code, said), where in zip(of_ranks, ("", " on rank 1")):
            line = (
                rf"ds-dynmo-train: error{where}: {begin}\[Errno 27\] File too large: '{saved}/.*'; nothing of this run "
                rf"is saved: make room or name another folder by --save, and start again; --save-interval N saves on "
                rf"the way\n"
            )
            assert code == 2 and re.fullmatch(line, said), said
    assert not folder.parent.exists() and not has_saved(stock)


def test_the_whole_command(tmp_path: Path) -> None:
    """It reports, traces and prints what it did."""
    letters = random.Random(0).choices(string.printable, k=512)
    (tmp_path / "text").write_text("".join(letters), newline="")  # some 40 sequences for training
    settings = json.loads((ROOT / "ds_configs" / "freezing.json").read_text())
    settings["model"] = {**SIZES, "sampling": "epochs", "case": {"kind": "freezing", "schedule": [[0.25, 2]]}}
    settings["dynmo"] = {"interval": 3, "min_improvement": 0.0, "profile": {"batches": 1}}
    settings["gradient_accumulation_steps"] = 8
    config, report = tmp_path / "config.json", tmp_path / "report.jsonl"
    config.write_text(json.dumps(settings))
    trace = {"path": str(tmp_path / "trace.json"), "steps": [7, 8]}
    given = ["--deepspeed_config", str(config), "--data", str(tmp_path / "text"), "--report", str(report)]
    (code, printed, _), (other_code, nothing, _) = run(
        2, run_command, [*given, "--steps", "8", "--set", f"dynmo.trace={json.dumps(trace)}"]
    )
    assert (code, other_code, nothing) == (0, 0, "")
    records = [json.loads(line) for line in report.read_text().splitlines()]
    assert records[0]["kind"] == "start" and records[-1]["kind"] == "end"
    assert records[0]["config"]["dynmo"]["interval"] == 3
    reasons = [record["reason"] for record in records if record["kind"] == "rebalance"]
    assert "interval" in reasons and any("freezing" in reason for reason in reasons)
    assert any(record["kind"] == "measured" for record in records)
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 9))
    tokens = 8 * SIZES["sequence_length"]
    assert all(r["tokens_per_second"] == pytest.approx(tokens / r["seconds"]) for r in steps)
    assert steps[0]["train_loss"] == records[-1]["first_train_loss"]
    assert {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]} >= {"step 7"}
    assert records[-1]["steps"] == 8 and records[-1]["validation_loss"] > 0
    assert "tokens/s" in printed and "bubble ratio" in printed


def losses_apart(arguments: list[str]) -> dict[str, Any]:
    """Return the losses that scripts/train.py reports, those of a plain pipeline, and those of an evaluation."""
    run = prepare(arguments)
    module = PipelineModule(
        layers=model_layers(run.model), num_stages=run.stages, loss_fn=language_model_loss, partition_method="uniform"
    )
    parameters = list(module.parameters())
    plain = ds_dynmo.initialize(model=module, model_parameters=parameters, config=run.settings)[0]
    data = batches(run, plain, "train")
    count = plain.micro_batches
    totals = [plain.train_batch(data.iterate(step * count, micro_batches=count)).item() for step in range(run.steps)]
    engine = build_engine(run)
    evaluated = engine.eval_batch(data.iterate(micro_batches=count)).item()
    history = train(run, engine, build_cases(run, engine))
    return {
        "totals": totals,
        "plain": state(plain),
        "evaluated": evaluated,
        "losses": history.losses,
        "auxiliary": history.auxiliary_losses,
        "state": state(engine),
        "replica": engine.grid.get_data_parallel_id(),
    }


@pytest.mark.parametrize("name", ["moe auxiliary loss", pytest.param("dense", marks=pytest.mark.nightly)])
def test_reported_losses_are_separate_and_do_not_change_training(name: str, tmp_path: Path) -> None:
    results = run(4, losses_apart, [*flags(tmp_path, name, 3), "--stages", "2"])
    first = results[0]
    assert first["losses"][0] == pytest.approx(first["evaluated"], rel=1e-6)  # evaluations have no auxiliary losses
    for loss, auxiliary, total in zip(first["losses"], first["auxiliary"], first["totals"], strict=True):
        assert loss + auxiliary == pytest.approx(total, rel=1e-6)
        assert auxiliary > 0.01 if "moe" in name else auxiliary == 0
    assert all((rank["losses"], rank["auxiliary"]) == (first["losses"], first["auxiliary"]) for rank in results)
    assert whole(results) == whole([{**rank, "state": rank["plain"]} for rank in results])
