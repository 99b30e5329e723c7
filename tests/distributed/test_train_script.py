"""scripts/train.py stopped, or killed, and resumed: to the bit what it is in one go."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.errors import CheckpointError
from ds_dynmo.models import language_model_loss, model_layers
from tests.distributed.harness import run
from tests.distributed.support.script import flags, run_script
from tests.distributed.support.training import state, whole
from train import batches, build_cases, build_engine, train
from training.options import RESUME_FILE, prepare
from training.report import begin_report, record_nothing

STEPS = 8


@pytest.mark.parametrize(("name", "killed_in"), [("freezing and pruning", None), ("egeria", 7)])
def test_a_resumed_run_is_the_run_in_one_go(name: str, killed_in: int | None, tmp_path: Path) -> None:
    """Its schedule too, though it is not told the steps again; from the last checkpoint that is whole."""
    arguments = flags(tmp_path, name, STEPS)
    folder = tmp_path / "saved"
    saving = ["--save", str(folder), "--save-interval", "3"]
    in_one_go = run(2, run_script, arguments)
    if killed_in is None:
        begun = run(2, run_script, [*arguments, *saving, "--stop-at", "4"])
        assert begun[0]["losses"] == in_one_go[0]["losses"][:4]
        (folder / "latest").write_text("global_step3")  # what counts is the checkpoint that the run's own file names
        done = 4
    else:
        run(2, run_script, [*arguments, *saving], killed_in)
        done = 6
    assert {path.name for path in folder.glob("global_step*")} == {"global_step3", f"global_step{done}"}
    assert json.loads((folder / RESUME_FILE).read_text())["step"] == done
    resumed = run(2, run_script, [*flags(tmp_path, name), "--resume", str(folder)])
    assert resumed[0]["losses"] == in_one_go[0]["losses"][done:]
    assert resumed[0]["validation"] == [(step, loss) for step, loss in in_one_go[0]["validation"] if step > done]
    assert whole(resumed) == whole(in_one_go)


def test_a_run_that_stopped_to_be_launched_anew_is_resumed(tmp_path: Path) -> None:
    """At the size that launch.json says; in the middle of a step, whose end the cases have still to see."""
    arguments = flags(tmp_path, "freezing and pruning", STEPS)
    in_one_go = run(2, run_script, arguments)
    folder = tmp_path / "saved"
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    repack = {"release": "checkpoint", "checkpoint": str(folder)}
    path.write_text(json.dumps({**settings, "dynmo": {**settings["dynmo"], "repack": repack}}))
    run(2, run_script, [*arguments, "--save", str(folder), "--save-interval", "2"], None, None, 5)
    launch = json.loads((folder / "launch.json").read_text())
    assert (launch["ranks"], launch["step"], launch["tag"]) == (1, 5, "global_step5")
    assert json.loads((folder / RESUME_FILE).read_text())["step"] == 4
    resumed = run(1, run_script, [*flags(tmp_path, "freezing and pruning"), "--resume", str(folder)])
    assert resumed[0]["losses"] == in_one_go[0]["losses"][5:]
    assert whole(resumed) == whole(in_one_go)


def reported(arguments: list[str]) -> tuple[list[float], str]:
    """The losses of a run that writes its report from rank 0, and what rank 0 had to say of it."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = prepare(arguments)
        engine = build_engine(run)
        record = begin_report(run.report) if engine.global_rank == 0 else record_nothing
        return train(run, engine, build_cases(run, engine), record).losses, said.getvalue()


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    arguments = flags(tmp_path, "dense", 3)
    plain = run(2, run_script, arguments)[0]["losses"]
    (first, said), (second, nothing) = run(2, reported, [*arguments, "--report", "/dev/full"])
    assert first == second == plain and nothing == ""
    assert said.count("train.py: /dev/full: was not written: [Errno 28]") == 1
    first, said = run(2, reported, [*arguments, "--report", str(tmp_path / "report.jsonl")])[0]
    records = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert [record["train_loss"] for record in records if record["kind"] == "step"] == first and said == ""


def failure_to_save(arguments: list[str]) -> str:
    try:
        run_script(arguments)
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def test_a_resume_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (folder / f"{RESUME_FILE}.new").mkdir(parents=True)
    for message in run(2, failure_to_save, [*flags(tmp_path, "dense", 3), "--save", str(folder)]):
        assert message.startswith(f"{folder / RESUME_FILE}: cannot be written: [Errno 21] Is a directory")


def losses_apart(arguments: list[str]) -> dict[str, Any]:
    """What scripts/train.py reports, and beside it a plain pipeline and an evaluation of the first batch."""
    run = prepare(arguments)
    module = PipelineModule(
        layers=model_layers(run.model), num_stages=run.stages, loss_fn=language_model_loss, partition_method="uniform"
    )
    parameters = list(module.parameters())
    plain = ds_dynmo.initialize(model=module, model_parameters=parameters, config=run.settings)[0]
    data = batches(run, plain, "train")
    totals = [plain.train_batch(data.iterate(step * plain.micro_batches)).item() for step in range(run.steps)]
    engine = build_engine(run)
    evaluated = engine.eval_batch(data.iterate(0)).item()
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


@pytest.mark.parametrize("name", ["moe auxiliary loss", "dense"])
def test_the_losses_are_told_apart_and_training_is_the_same(name: str, tmp_path: Path) -> None:
    results = run(4, losses_apart, [*flags(tmp_path, name, 3), "--stages", "2"])
    first = results[0]
    assert first["losses"][0] == pytest.approx(first["evaluated"], rel=1e-6)  # evaluations have no auxiliary losses
    for loss, auxiliary, total in zip(first["losses"], first["auxiliary"], first["totals"], strict=True):
        assert loss + auxiliary == pytest.approx(total, rel=1e-6)
        assert auxiliary > 0.01 if "moe" in name else auxiliary == 0
    assert all((rank["losses"], rank["auxiliary"]) == (first["losses"], first["auxiliary"]) for rank in results)
    assert whole(results) == whole([{**rank, "state": rank["plain"]} for rank in results])


def test_freed_ranks_go_on_as_replicas_of_a_model_that_changes(tmp_path: Path) -> None:
    """Frozen and pruned layers, with sharded state, on 2 stages, then on 1 in two copies: but for the order of sums."""
    arguments = flags(tmp_path, "freezing and pruning", STEPS)
    path = tmp_path / "config.json"
    settings = {**json.loads(path.read_text()), "zero_optimization": {"stage": 1}}
    path.write_text(json.dumps(settings))
    kept = run(2, run_script, arguments)
    repack = {"freed_ranks": "replicas"}
    path.write_text(json.dumps({**settings, "dynmo": {**settings["dynmo"], "repack": repack}}))
    folded = run(2, run_script, arguments, None, None, 3)
    assert [result["replica"] for result in folded] == [0, 1]
    assert folded[1]["losses"] == folded[0]["losses"] == pytest.approx(kept[0]["losses"], rel=1e-4)
    assert [loss for _, loss in folded[0]["validation"]] == pytest.approx(
        [loss for _, loss in kept[0]["validation"]], rel=1e-4
    )


def test_replicas_that_would_share_out_experts_are_not_made(tmp_path: Path) -> None:
    """Each would have other experts: the freed rank is released instead."""
    arguments = flags(tmp_path, "moe auxiliary loss", 3)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    settings["model"]["moe"]["expert_parallel"] = True
    settings["dynmo"]["repack"] = {"freed_ranks": "replicas"}
    path.write_text(json.dumps(settings))
    stays, leaves = run(2, run_script, arguments, None, None, 1)
    assert len(stays["losses"]) == 3 and leaves == {"losses": []}
