"""scripts/train.py: what it refuses before a process group exists, and short runs by launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_dynmo.cli import train
from ds_dynmo.cli.training.options import RECORDING, TrainingRun, prepare
from ds_dynmo.cli.training.resuming import find_checkpoint, read_resumed
from ds_dynmo.cli.training.stopping import StopSignals
from ds_dynmo.config.explain import show
from ds_dynmo.engine.save.manifest import MANIFEST
from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.launch import ALONE
from ds_dynmo.models import huggingface, read_model_config
from tests.support.ports import free_port
from tests.support.saved_runs import metadata_of, save_metadata

ROOT = Path(__file__).parents[2]
NO_DATA = ["--data", "/does/not/exist"]  # which would be refused if it were looked for
SIZES = {"layers": 4, "hidden_size": 16, "heads": 2, "sequence_length": 16, "tied_embedding": False}


def write(folder: Path, **changes: Any) -> Path:
    settings = json.loads((ROOT / "ds_configs" / "freezing.json").read_text())
    settings["model"] = SIZES
    settings["gradient_accumulation_steps"] = 2
    settings.update(changes)
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"dynmo": {"intervall": 5}}, [], "dynmo.intervall.*interval"),
        ({"dynmo": {"interval": -1}}, [], "dynmo.interval"),
        ({"dynmo": {"balancer": "partitoin"}}, [], "partition"),
        ({"dynmo": {"initial_partition": [0, 3, 3]}}, [], "initial_partition"),
        ({"dynamo": {}, "dynmo": {}}, [], "dynamo"),
        ({"model": {"layers": 4, "head": 2}}, [], "model.head.*heads"),
        ({"model": {"layers": 0}}, [], "model.layers"),
        ({}, ["--steps", "0"], "--steps 0: should be at least 1"),
        ({}, ["--steps", "8", "--stop-at", "9"], "--stop-at 9: should be in 1 to 8"),
        ({}, ["--stop-at", "0"], "--stop-at 0: should be in 1 to 150"),
        ({}, ["--save-interval", "3"], "--save-interval 3: needs --save"),
        ({}, ["--save", "unused", "--save-interval", "0"], "--save-interval 0: should be at least 1"),
        ({}, ["--stages", "3"], "^--stages 3: should divide the number of processes, 2: start 3 or a multiple, by "),
        ({}, ["--reports=r"], '^unrecognized arguments: --reports=r; did you mean "--report"'),
        ({}, ["--data", "/does/not/exist"], "/does/not/exist"),
        ({}, ["--resume", "/does/not/exist"], "/does/not/exist"),
        ({}, ["--unknown"], "--unknown"),
        (
            {"dynmo": {"repack": {"enabled": True}}},
            ["--record", "r.jsonl"],
            "--record r.jsonl: needs dynmo.repack.enab",
        ),
        ({}, ["--record", "/dev/null/r.jsonl"], "--record /dev/null/r.jsonl: cannot be written"),
        ({}, ["--tag", "global_step3"], "^--tag global_step3: needs --resume DIR"),
        ({"optimizer": None}, [], "^optimizer = null: should be an object"),
        ({"optimizer": {"params": {}}}, [], "^optimizer.type = null: should be a name"),
        ({"optimizer": {"type": "Nope"}}, NO_DATA, '^optimizer.type = "Nope": neither'),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}}, NO_DATA, "^optimizer.params.momentun = 0.9"),
        ({"scheduler": {"type": "Nope"}}, NO_DATA, '^scheduler.type = "Nope": neither'),
        ({"zero_optimization": {"stage": 3}}, NO_DATA, "^zero_optimization.stage = 3: cannot be combined"),
        ({"fp16": {"enabled": True}}, NO_DATA, "^fp16.enabled = true: .*'cpu' does not support"),
        ({"flops_profiler": {"enabled": True}}, NO_DATA, "^flops_profiler.enabled = true: "),
        ({"dynmo": {"initial_partition": [0, 20]}}, NO_DATA, "^dynmo.initial_partition: .*should be 3 bound"),
        ({"dynmo": {"initial_partition": "type:nothing"}}, NO_DATA, "^dynmo.initial_partition = .*no layer's name"),
        ({"dynmo": {"keep_together": [[0, 99]]}}, NO_DATA, "^dynmo.keep_together"),
        ({"gradient_accumulation_steps": "8"}, [], '^gradient_accumulation_steps = "8": should be an int'),
        ({"gradient_accumulation_steps": 0}, [], "^gradient_accumulation_steps = 0: should be an int of at least 1"),
        ({"train_micro_batch_size_per_gpu": None}, [], "^train_micro_batch_size_per_gpu: is missing; give it"),
        (
            {"train_batch_size": 9},
            ["--stages", "1"],
            "^train_batch_size = 9: should be train_micro_batch_size_per_gpu 1 x gradient_accumulation_steps 2 x repli"
            "cas 2 = 4$",
        ),
        ({"gradient_clipping": "1"}, [], '^gradient_clipping = "1": should be a number of at least 0'),
        ({"bf16": True}, [], "^bf16 = true: should be an object"),
        ({"zero_optimization": {"stage": 7}}, [], "^zero_optimization.stage = 7: should be 0, 1, 2"),
        ({"optimizer": {"type": "AdamW", "no_wd_kws": []}}, [], r"^optimizer.no_wd_kws = \[\]: unknown key; should be"),
        (
            {"peft": {}},
            [],
            r"^peft = {}: neither DeepSpeed nor ds-dynmo-train reads this key; did you mean model.peft\?",
        ),
        *(
            ({key: {}}, [], rf"^{key} = {{}}: neither .*; did you mean {meant}")
            for key, meant in {
                **{"lora": "model.peft", "huggingface": "model.huggingface", "models": "model", "dat": "data"},
                **{"seed": "model.seed", "micro_batch_size": "train_micro_batch_size_per_gpu", "wandbb": "wandb"},
                **{
                    "epochs": "--steps, which counts batches",
                    "save-interval": "--save-interval",
                    "lr": "optimizer.par",
                },
                **{"field": "data.field", "num_layers": "model.layers"},
            }.items()
        ),
        ({"training": {}}, [], "^training = {}: .*; sections beside DeepSpeed's are model, data, dynmo$"),
        ({}, ["--epochs", "3"], "^unrecognized arguments: --epochs 3; did you mean --steps, which counts batches"),
        ({}, ["--seed=3"], r"^unrecognized arguments: --seed=3; did you mean --set model.seed=VALUE\?"),
    ],
)
def test_wrong_configs_and_flags_are_refused(
    tmp_path: Path, changes: dict[str, Any], flags: list[str], message: str
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises((ConfigError, PartitionError), match=message) as error:
        prepare(["--deepspeed_config", str(path), *flags])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dynmo.intervall=5", "dynmo.intervall.*interval"),
        ("model.head=2", "model.head.*heads"),
        ("model.layers=four", '^model.layers = "four"'),
        ("gradient_accumulation_steps=0", "^gradient_accumulation_steps = 0: should be an int of at least 1"),
        ("model.layers.count=4", "^--set model.layers.count=4: model.layers is 4"),
    ],
)
def test_a_change_is_checked_as_the_file_is(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(["--deepspeed_config", str(write(tmp_path)), "--set", change])


def test_a_changed_run_is_the_one_whose_file_says_so(tmp_path: Path) -> None:
    changes = ["--set", "dynmo.interval=7", "--set", "scheduler=null"]
    changes += ["--set", "model.case.kind=mod", "--set", "model.case.every=1"]
    changed = prepare([*on_a_small_text(write(tmp_path)), *changes])
    path = write(tmp_path, dynmo={**json.loads((ROOT / "ds_configs" / "freezing.json").read_text())["dynmo"]})
    settings = json.loads(path.read_text())
    settings["dynmo"]["interval"] = 7
    settings["model"]["case"] = {"kind": "mod", "every": 1}
    del settings["scheduler"]
    path.write_text(json.dumps(settings))
    said = prepare(on_a_small_text(path))
    assert (changed.settings, changed.model, changed.interval) == (said.settings, said.model, said.interval)


def test_a_configuration_may_have_comments_as_deepspeeds_may(tmp_path: Path) -> None:
    path = write(tmp_path)
    given = on_a_small_text(path)
    plain = prepare(given)
    path.write_text("// why\n" + path.read_text().replace("{", "{ # what follows\n", 1))
    assert prepare(given).settings == plain.settings


def test_the_first_profile_places_layers_where_decisions_are_due(tmp_path: Path) -> None:
    named: list[tuple[dict[str, Any], Any]] = [({}, "profile"), ({"initial_partition": None}, None)]
    for given, first in [*named, ({"enabled": False}, None), ({"interval": 0}, None)]:
        settings = prepare(on_a_small_text(write(tmp_path, dynmo=given))).settings
        assert settings["dynmo"].get("initial_partition") == first


def test_a_recording_profiles_every_batch_and_moves_no_layer(tmp_path: Path) -> None:
    path = write(tmp_path, dynmo={"interval": 7, "balancer": "partition", "profile": {"batches": 3}})
    run = prepare(["--deepspeed_config", str(path), "--record", str(tmp_path / "new" / "r.jsonl")])
    assert run.settings["dynmo"] == {**RECORDING, "balancer": "partition"} and run.interval == 7
    assert (run.name, run.record) == ("config", tmp_path / "new" / "r.jsonl")
    for given, kept in (("profile", None), ("parameters", "parameters")):  # layers would move after a profile
        write(tmp_path, dynmo={"initial_partition": given, "memory_limit": 0.5})
        recorded = prepare(["--deepspeed_config", str(path), "--record", str(tmp_path / "r.jsonl")])
        assert recorded.settings["dynmo"] == {**RECORDING, "initial_partition": kept, "memory_limit": None}
    settings = json.loads(path.read_text())
    del settings["dynmo"]
    path.write_text(json.dumps({**settings, "model": {"layers": 4}}))
    with pytest.raises(ConfigError, match=r'^--record r\.jsonl: needs a "dynmo" section'):
        prepare(["--deepspeed_config", str(path), "--record", "r.jsonl"])


@pytest.mark.parametrize(
    ("moe", "named"),
    [
        ({"routing": "bias"}, r'model\.case\.routing = "bias": needs a "dynmo" section'),
        ({"expert_parallel": True}, r'model\.case\.expert_parallel: needs a "dynmo" section'),
    ],
)
def test_features_over_all_replicas_need_the_block(tmp_path: Path, moe: dict[str, Any], named: str) -> None:
    path = write(tmp_path, model={"layers": 4, "case": {"kind": "moe", **moe}})
    prepare(["--deepspeed_config", str(path)])
    settings = json.loads(path.read_text())
    del settings["dynmo"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=named):
        prepare(["--deepspeed_config", str(path)])


def test_an_empty_data_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"empty\.txt"):
        prepare(["--deepspeed_config", str(write(tmp_path)), "--data", str(tmp_path / "empty.txt")])


# -- a run that is resumed ----------------------------------------------------------------------------------


CHANGING = {
    "freezing": {"case": {"kind": "freezing", "schedule": [[0.5, 2]]}},
    "pruning": {"case": {"kind": "pruning"}},
    "early_exit": {"case": {"kind": "early_exit", "method": "calm", "start": 0.5}},
}
CONSTANT = {
    "nothing": {},
    "experts": {"case": {"kind": "moe"}},
    "one capacity": {"case": {"kind": "mod"}},
    "exits from the start": {"case": {"kind": "early_exit", "method": "calm", "start": 0.0}},
}


def on_a_small_text(config: Path) -> list[str]:
    """Return the flags that name a configuration and a text beside it, which is read faster than the default one."""
    text = config.with_name("text.txt")
    text.write_text("one two three " * 400)
    return ["--deepspeed_config", str(config), "--data", str(text)]


def resumed(folder: Path, case: dict[str, Any], *flags: str, **changes: Any) -> TrainingRun:
    """Prepare to resume at step 5 of 8."""
    given = on_a_small_text(write(folder, model={**SIZES, **case}))
    model = prepare(given).model.model_dump(mode="json")
    facts = {"step": 5, "steps": 8, "stages": 2, "partition": [0, 3, 7], "model": model, "cases": {}}
    save_metadata(folder / "global_step5", {**facts, **changes})
    return prepare([*given, "--resume", str(folder), *flags])


@pytest.mark.parametrize("case", [*CHANGING.values(), *CONSTANT.values()], ids=[*CHANGING, *CONSTANT])
def test_a_resumed_run_keeps_its_number_of_steps(tmp_path: Path, case: dict[str, Any]) -> None:
    for flags in ([], ["--steps", "8"]):
        run = resumed(tmp_path, case, *flags)
        assert (run.first_step, run.stop, run.steps) == (5, 8, 8)
    run = resumed(tmp_path, case, "--stop-at", "6")
    assert (run.first_step, run.stop, run.steps) == (5, 6, 8)


@pytest.mark.parametrize("key", CHANGING)
def test_other_steps_are_refused_if_they_would_shift_a_schedule(tmp_path: Path, key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--steps 16: the run in .* has 8 steps in total, and model\.case \({key}\) would"
    ):
        resumed(tmp_path, CHANGING[key], "--steps", "16")


@pytest.mark.parametrize("case", CONSTANT.values(), ids=CONSTANT)
def test_without_a_schedule_a_resumed_run_may_have_other_steps(tmp_path: Path, case: dict[str, Any]) -> None:
    run = resumed(tmp_path, case, "--steps", "16")
    assert (run.first_step, run.stop, run.steps) == (5, 16, 16)


def test_a_run_saved_without_the_key_tokens_can_be_resumed(tmp_path: Path) -> None:
    said = read_model_config({"model": SIZES}).model_dump(mode="json", exclude={"tokens"})
    assert resumed(tmp_path, {"tokens": "bytes"}, model=said).model.tokens == "bytes"


def test_a_changed_run_is_resumed_with_its_changes(tmp_path: Path) -> None:
    run = resumed(tmp_path, {"case": {"kind": "mod"}}, "--set", "dynmo.interval=3")
    assert (run.first_step, run.interval) == (5, 3)
    with pytest.raises(ConfigError, match=r"^--resume .*: was trained with model\.case = .*, this run has null"):
        resumed(tmp_path, {"case": {"kind": "mod"}}, "--set", "model.case=null")


@pytest.mark.parametrize(
    ("key", "value"), [("vocabulary_slices", 8), ("vocabulary_slices", None), ("split_blocks", False)]
)
def test_a_run_in_other_pieces_is_refused_and_begins_from_an_export(key: str, value: Any, tmp_path: Path) -> None:
    pieces = {"vocabulary_slices": 4, "split_blocks": True}
    remedy = f"; ds-dynmo-export {tmp_path} DIR, then --set model.huggingface=DIR without --resume begins with any"
    facts = {"step": 5, "steps": 8, "stages": 2, "partition": [0, 3, 7], "cases": {}}
    for sizes, said in ((SIZES, ""), ({"huggingface": {"model_type": "llama"}, "sequence_length": 8}, remedy)):
        config = sizes.get("huggingface")
        save_metadata(tmp_path / "global_step5", {**facts, "model": {**sizes, **pieces}, "config": config})
        model = read_model_config({"model": {**sizes, **pieces, key: value}})
        with pytest.raises(ConfigError) as error:
            read_resumed(tmp_path, None, model, config)
        saved, given = (json.dumps(one) for one in (pieces[key], value))
        assert str(error.value).endswith(f": was trained with model.{key} = {saved}, this run has {given}{said}")


def test_a_model_is_known_by_its_config_wherever_its_folder_is(tmp_path: Path) -> None:
    """A file that was written by another version of transformers is the same; one that was edited is not."""
    config = {"model_type": "llama", "hidden_size": 8, "transformers_version": "5"}
    for name, changes in (("model", {}), ("moved", {"transformers_version": "6"}), ("other", {"hidden_size": 16})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **changes}))
    facts = {"step": 5, "steps": 8, "stages": 2, "partition": [0, 3, 7], "cases": {}, "config": config}
    saved = f"{tmp_path}/model"
    save_metadata(tmp_path / "global_step5", {**facts, "model": {"huggingface": saved}})

    def resume(model: Any) -> dict[str, Any]:
        section = read_model_config({"model": {"huggingface": model}})
        return read_resumed(tmp_path, None, section, huggingface.config_json(model))

    for same in (saved, f"{tmp_path}/./model/", f"{saved}/config.json", f"{tmp_path}/moved", config):
        assert resume(same)["step"] == 5
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "hidden_size": 16}))
    for other in (saved, f"{tmp_path}/other"):
        with pytest.raises(ConfigError) as error:
            resume(other)
        assert str(error.value) == (
            f"--resume {tmp_path}: was trained with model.huggingface = {show(str(saved))}, this run has "
            f"{show(str(other))}: its "
            "hidden_size was 8, is 16"
        )


def test_runs_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    for flags, changes, message in (
        ([], {"step": 8}, "is at step 8, --steps 8 leaves nothing to do"),
        (["--steps", "4"], {}, "is at step 5, --steps 4 leaves nothing to do"),
        (["--stop-at", "5"], {}, "--stop-at 5: should be in 6 to 8"),
        (["--set", "model.seed=3"], {}, r"model\.seed = 0, this run has 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            resumed(tmp_path, {}, *flags, **changes)
    save_metadata(tmp_path / "global_step5", {"step": 5, "partition": [0, 3, 7], "model": {}, "cases": []})
    with pytest.raises(
        ConfigError, match=r"^--resume .*global_step5/mp_rank_00_model_states\.pt: lacks cases, stages, steps"
    ):
        prepare([*on_a_small_text(tmp_path / "config.json"), "--resume", str(tmp_path)])


def test_a_run_is_resumed_from_a_checkpoint_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, problem in (("empty", "holds no checkpoint of ds-dynmo-train"), ("nowhere", "no such folder")):
        with pytest.raises(ConfigError, match=f"^--resume .*{folder}: {problem}"):
            prepare([*on_a_small_text(write(tmp_path)), "--resume", str(tmp_path / folder)])
    run = resumed(tmp_path, {})
    assert train.resumed_line(run) == f"resuming from {tmp_path}/global_step5: step 5 of 8; stages: 2 when saved, 2 now"
    latest = tmp_path / "latest"
    latest.unlink()  # of a folder with one checkpoint it is plain which is meant
    flags = [*on_a_small_text(tmp_path / "config.json"), "--resume", str(tmp_path)]
    assert prepare(flags).first_step == 5
    save_metadata(tmp_path / "global_step3", {**metadata_of(tmp_path / "global_step5"), "step": 3, "stages": 3})
    assert prepare(flags).first_step == 3
    there = "there are global_step3, global_step5; --tag TAG chooses one"
    for names, problem in ((None, 'has no file "latest", and'), ("global_step7", '"latest" names global_step7, which')):
        latest.unlink() if names is None else latest.write_text(names)
        with pytest.raises(ConfigError, match=f"^--resume {tmp_path}: {problem}.* {there}$"):
            prepare(flags)
        run = prepare([*flags, "--tag", "global_step3", "--save", str(tmp_path)])
        assert train.resumed_line(run).endswith("global_step3: step 3 of 8; stages: 3 when saved, 2 now")
        assert f"with --resume {tmp_path} --tag global_step4 continues" in train.stopped_line(run, 2, "global_step4", 4)
        untagged = replace(run, tag=None)
        assert f"with --resume {tmp_path} continues from step 4" in train.stopped_line(untagged, 2, "global_step4", 4)
    with pytest.raises(ConfigError, match=f"^--resume {tmp_path}: --tag global_step4, which is not there; {there}$"):
        prepare([*flags, "--tag", "global_step4"])
    with pytest.raises(ConfigError, match=f"^--resume {tmp_path}: --tag is empty; {there}$"):
        prepare([*flags, "--tag", ""])
    latest.write_text("")
    with pytest.raises(ConfigError, match=f"^--resume {tmp_path}: latest is empty; {there}$"):
        prepare(flags)


def test_ctrl_c_without_save_says_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train_and_export", interrupted)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    assert train.main(["--deepspeed_config", str(write(tmp_path))]) == 130
    saves = "--save DIR --save-interval N saves on the way"
    assert capsys.readouterr().out == f"stopped by SIGINT. Nothing of this run is saved: start it again; {saves}\n"


@pytest.mark.parametrize(
    ("weights", "flags", "rank", "said"),
    [
        ("a/model", [], 0, True),
        ("a/model", [], 1, False),
        ("a/model", ["--save={}/run"], 0, False),
        (None, [], 0, False),
    ],
)
def test_a_finetuning_that_saves_nothing_says_so_before_it_begins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    weights: str | None,
    flags: list[str],
    rank: int,
    said: bool,
) -> None:
    def refuse() -> None:
        raise ConfigError("no ranks")

    monkeypatch.setattr(train, "check_launch", refuse)  # what comes first once the run begins
    run = prepare([*on_a_small_text(write(tmp_path)), *(flag.format(tmp_path) for flag in flags)])
    run = replace(run, model=run.model.model_copy(update={"huggingface": weights}))
    assert train.train_and_export(run, first_rank=rank == 0, launched=True) != 0
    assert (train.UNSAVED in capsys.readouterr().out) == said


def test_a_run_that_has_saved_nothing_yet_begins_where_it_would_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that starts the same command again need not know whether it is the first time."""
    (tmp_path / "run").mkdir()
    given = on_a_small_text(write(tmp_path / "run"))
    for folder in ("run", "nowhere"):
        saving = ["--save", str(tmp_path / folder)]
        run = prepare([*given, *saving, "--resume", str(tmp_path / "run" / ".." / folder)])
        assert (run.resumed, run.resume, run.first_step) == (None, None, 0)
        assert "nothing has been saved there yet; the run begins" in capsys.readouterr().out
        save_metadata(tmp_path / "run" / "unfinished", {})  # by stock DeepSpeed, which writes into the folder
        (tmp_path / "run" / "unfinished" / MANIFEST).unlink()
        (tmp_path / "run" / "latest").unlink()
    with pytest.raises(ConfigError, match=r"^--resume .*nowhere: no such folder"):
        prepare([*given, *saving, "--resume", str(tmp_path / "nowhere"), "--tag", "global_step3"])
    (tmp_path / "run" / "latest").write_text("of_another_command")
    with pytest.raises(ConfigError, match=r"^--resume .*run: holds no checkpoint of ds-dynmo-train"):
        prepare([*given, *("--save", str(tmp_path / "run")), "--resume", str(tmp_path / "run")])
    resumed(tmp_path / "run", {})
    assert prepare([*given, "--save", str(tmp_path / "run"), "--resume", str(tmp_path / "run")]).first_step == 5


def test_a_second_ctrl_c_ends_a_run_at_once_and_a_launchers_sigterm_does_not() -> None:
    child = os.fork()
    if child == 0:
        with StopSignals(True):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT


def test_a_signal_that_comes_while_ranks_agree_counts_in_the_next_batch() -> None:
    """The other ranks have not heard of it: this one may not stop alone."""

    def interrupted(number: torch.Tensor, **_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    child = os.fork()
    if child == 0:
        with StopSignals(True) as stop, patch("torch.distributed.all_reduce", interrupted):
            found = [stop.agreed(torch.device("cpu")) for _ in range(2)]
        os._exit(0 if found == [0, signal.SIGTERM] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- a whole run --------------------------------------------------------------------------------------------


def launch(config: Path, *flags: str) -> str:
    """Run the script on two stages, check that it succeeds, and return what it prints."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
    return output_of([*launcher, "scripts/train.py", "--deepspeed_config", str(config), *flags])


def train_alone(config: Path, *flags: str) -> str:
    """Run the module on one stage without a launcher, check that it succeeds, and return what it prints."""
    return output_of([sys.executable, "-m", "ds_dynmo.cli.train", "--deepspeed_config", str(config), *flags])


def output_of(command: list[str]) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_torch(folder: Path, config: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the script where torch cannot be imported."""
    (folder / "torch.py").write_text("raise SystemExit('torch is imported')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "scripts/train.py", "--local_rank=0", "--deepspeed_config", str(config), *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400.0)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dynmo": {"intervall": 3}}, 'dynmo.intervall = 3: unknown key; did you mean "interval"?'),
        ({"dynmo": {"memory_limit": 2}}, "dynmo.memory_limit = 2: is 2 bytes, and should be at least 1048576, 1 MiB"),
        ({"dynmoo": {}}, 'dynmoo: unknown top-level key; did you mean "dynmo"?'),
        ({"optimizer": "AdamW"}, 'optimizer = "AdamW": should be an object'),
    ],
)
def test_a_typo_is_reported_before_torch_is_imported(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    config = tmp_path / "config.json"
    config.write_text("// why\n" + json.dumps(changes))
    done = without_torch(tmp_path, config)
    assert done.returncode == 2 and done.stderr.startswith(f"ds-dynmo-train: error: {line}"), done.stderr


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("dynmo.intervall=3", 'dynmo.intervall = 3: unknown key; did you mean "interval"?'),
        (
            "dynmo.interval.steps=3",
            "--set dynmo.interval.steps=3: dynmo.interval is 25, and has no keys; give it whole",
        ),
    ],
)
def test_a_wrong_change_is_reported_before_torch_is_imported(tmp_path: Path, change: str, line: str) -> None:
    done = without_torch(tmp_path, ROOT / "ds_configs" / "freezing.json", "--set", change)
    assert done.returncode == 2 and done.stderr.startswith(f"ds-dynmo-train: error: {line}"), done.stderr


def test_a_rank_ends_with_its_launcher_while_it_reads_data(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def read(arguments: list[str]) -> TrainingRun:
        called.append("prepare")
        raise ConfigError("unreadable")

    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ds_dynmo.end_with_launcher", lambda: called.append("end_with_launcher"))
    monkeypatch.setattr(train, "prepare", read)
    assert train.main([]) == 2 and called == ["end_with_launcher", "prepare"]


@pytest.mark.nightly
def test_a_run_with_a_thread_beside_it_ends(tmp_path: Path) -> None:
    """Egeria's last verdict, due after the last step, is still being computed then."""
    egeria = 'model.case={"kind": "freezing", "egeria": {"interval": 0.04, "delay": 0.02, "window": 3, "start": 0.0}}'
    changes = ["--set", egeria, "--set", "gradient_accumulation_steps=2"]
    printed = train_alone(ROOT / "ds_configs" / "freezing.json", *changes, "--steps", "3")
    assert "step 3/3" in printed
    assert printed.startswith("One process, so one stage: no layer can move.")


@pytest.mark.nightly
def test_the_configuration_to_begin_with_trains(tmp_path: Path) -> None:
    """As it is but for its report's place, and an interval that is over by then."""
    report = tmp_path / "report.jsonl"
    changes = ["--set", f"dynmo.report={report}", "--set", "dynmo.interval=2"]
    printed = launch(ROOT / "ds_configs" / "starter.json", *changes, "--steps", "6", "--save", str(tmp_path / "saved"))
    records = [json.loads(line) for line in report.read_text().splitlines()]
    block = {"interval": 2, "memory_limit": "80%", "schedule": "auto", "report": str(report)}
    block["initial_partition"] = "profile"
    assert records[0]["config"]["dynmo"] == block and records[0]["config"]["bf16"] == {"enabled": True}
    # What is due after batch 2 is decided after batch 3; layers move, if they do, while the next one trains.
    assert next(record["step"] for record in records if record["kind"] == "rebalance") in (3, 4)
    losses = [record["train_loss"] for record in records if record["kind"] == "step"]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert "step 6/6" in printed and find_checkpoint(tmp_path / "saved") == "global_step6"


def test_after_a_failed_save_it_says_what_is_saved_and_how_to_go_on(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run = prepare(["--deepspeed_config", str(write(tmp_path)), "--save", str(saved)])
    room = "make room or name another folder by --save, and "
    assert train.after_failed_save(run) == (
        f"nothing of this run is saved: {room}start again; --save-interval N saves on the way"
    )
    assert train.how_to_continue(run).startswith("Nothing of this run is saved: start it again")
    save_metadata(saved / "global_step30", run.state_dict())
    assert train.how_to_continue(run) == (
        f"The last whole checkpoint is {saved}/global_step30: the same command with --resume {saved} continues from it"
    )
    assert train.after_failed_save(run) == (
        f"the last whole checkpoint there is global_step30: {room}the same command with --resume {saved} continues "
        "from it"
    )
