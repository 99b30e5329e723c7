"""Damaged checkpoints, and ranks that die or fail while they write one."""

from __future__ import annotations

import enum
import os
import re
import shutil
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.serialization import safe_globals

import ds_dynmo
from ds_dynmo.engine.save import applying, destinations, writing
from tests.support.checkpoints import (
    STEPS,
    Evil,
    attempt,
    check_same,
    load_each,
    outcome,
    refuse,
    save_as,
    train_on,
)
from tests.support.configs import Case
from tests.support.full_disk import files_of_at_most
from tests.support.harness import RankError, run, run_each
from tests.support.kills import killed_at
from tests.support.training import build, drop_decision, freeze, gather, whole

pytestmark = pytest.mark.ranks

# -- damaged files ------------------------------------------------------------------------------------

SHARD = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
FILES = ["layer_03-model_states.pt", "mp_rank_01_model_states.pt", "dynmo/layer_05-data_00-model_00.pt"]
FILES += ["dynmo/rank-pipe_01-data_00-model_00.pt", "dynmo/manifest.json", "dynmo/manifest-pipe_01.json"]


def refuse_damages(case: Case, folder: str, hurts: list[tuple[str, str]]) -> tuple[list[Any], list[float], list[float]]:
    """Return what becomes of each damage, and losses of what follows without the attempts to load, and after them."""
    engine, other = build(case), build(replace(case, blocks=6))
    for one, tag in ((engine, "good"), (engine, "same"), (other, "other")):
        train_on(one, one.global_steps, 1)
        one.save_checkpoint(folder, tag=tag)
    engine.rebalance([0, 3, 8])  # a successful load would move layers
    engine.save_checkpoint(folder, tag="here")
    undisturbed = train_on(engine, 2, 2)
    engine.load_checkpoint(folder, tag="here")
    return refuse(engine, f"{folder}/good", hurts), undisturbed, train_on(engine, 2, 2)


def test_a_damaged_file_is_named_and_changes_nothing(tmp_path: Path) -> None:
    hurts = [(file, how) for file in FILES for how in ("missing", "truncated", "garbage")]
    hurts += [("mp_rank_00_model_states.pt", "evil"), (FILES[0], "flipped"), (SHARD, "flipped")]
    hurts += [(file, f"{tmp_path}/{where}/{file}") for file in FILES[:2] for where in ("other", "same")]
    hurts += [(file, f"{tmp_path}/other/{file}") for file in FILES[-2:]]
    case = Case(stages=2, precision="bf16 zero1", micro_batches=1)
    for found, undisturbed, then in run(2, refuse_damages, case, str(tmp_path), hurts):
        for (message, unchanged), (file, how) in zip(found, hurts, strict=True):
            named = file.removesuffix(".json")  # beside another save's manifest, the first of a stage is the wrong one
            assert named in message and unchanged, (file, how, message)
            if how == "flipped":
                assert "its checksum differs" in message, file
                assert file != SHARD or f"{SHARD}: optimizer_state_dict/" in message, "the tensor is named"
        assert then == undisturbed


def refuse_stock(case: Case, folder: str, hurts: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    save_as("stock", case, folder)
    return refuse(build(case), f"{folder}/global_step{STEPS}", hurts)


def test_a_malicious_pickle_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    files = ["mp_rank_00_model_states.pt", "layer_00-model_states.pt"]
    says = {"evil": "could run code", "empty": "cannot be read: EOFError: it is empty, or ends too early"}
    hurts = [(file, how) for file in files for how in says]
    (found,) = run(1, refuse_stock, Case(stages=1, micro_batches=1), str(tmp_path), hurts)
    for (message, unchanged), (file, how) in zip(found, hurts, strict=True):
        assert file in message and says[how] in message and unchanged
    assert not list(tmp_path.rglob("evil"))


def lose_dynmo_folders(case: Case, folder: str) -> tuple[dict[str, Any], dict[str, Any], tuple[str, bool]]:
    """Save, and again with a frozen layer; load both without what ds_dynmo adds to them."""
    engine, other = build(case), build(case)
    train_on(engine, 0, 2)
    engine.save_checkpoint(folder, tag="trained")
    saved = outcome(engine, train_on(engine, 2, 2))
    freeze(engine, 1)
    engine.model_changed("frozen")
    drop_decision(engine)
    engine.save_checkpoint(folder, tag="frozen")
    gather(None)
    if engine.global_rank == 0:
        for tag in ("trained", "frozen"):
            shutil.rmtree(f"{folder}/{tag}/dynmo")
    gather(None)
    refused = attempt(other, folder, tag="frozen")
    other.load_checkpoint(folder, tag="trained")
    return saved, outcome(other, train_on(other, 2, 2)), refused


def test_a_checkpoint_that_lost_its_dynmo_folder_is_read_as_deepspeeds_or_refused_as_that(tmp_path: Path) -> None:
    case = Case(precision="bf16 zero1", micro_batches=1)
    saved, loaded, refusals = zip(*run(2, lose_dynmo_folders, case, str(tmp_path)))
    for what in ("losses", "partition", "lr"):
        assert loaded[0][what] == saved[0][what]
    assert whole(list(loaded)) == whole(list(saved))
    for message, unchanged in refusals:
        assert unchanged and f"{tmp_path}/frozen: has no folder dynmo/, so it is read as stock DeepSpeed's" in message
        assert "copy it with that folder. " in message and "model_states.pt: has parameter groups of " in message


def load_into_others(case: Case, folder: str, others: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    engine = build(case)
    train_on(engine, 0, 1)
    engine.save_checkpoint(folder)
    return [attempt(build(replace(case, **other)), folder) for other in others]


def test_a_model_or_an_optimizer_of_another_shape_is_refused(tmp_path: Path) -> None:
    groups = "has {} parameter groups, expected {}"
    plain: list[tuple[dict[str, Any], str]] = [
        ({"blocks": 6}, "a model of 8 layers, expected 9"),
        ({"tied": True}, "layer 7 has parameters .* there, expected none"),
        ({"optimizer": "SGD"}, "AdamW.*expected SGD"),
        ({"groups": "two"}, groups.format(1, 2)),
    ]
    one = Case(stages=1, micro_batches=1)
    flat = replace(one, precision="bf16 zero1")
    tables = {
        "fp32": (one, plain),
        "one group": (flat, [({"groups": "two"}, "flat-pipe_0.*" + groups.format(1, 2))]),
        "two groups": (replace(flat, groups="two"), [({"groups": "one"}, "flat-pipe_0.*" + groups.format(2, 1))]),
    }
    calls = [(case, f"{tmp_path}/{name}", [other for other, _ in table]) for name, (case, table) in tables.items()]
    for (found,), (_, table) in zip(run_each(1, load_into_others, *calls), tables.values(), strict=True):
        for (message, unchanged), (other, says) in zip(found, table, strict=True):
            assert re.search(says, message) and unchanged, other


# -- writing ------------------------------------------------------------------------------------------


STEPS_OF_WRITING = [
    (os, "rename"), (os, "replace"), (os, "makedirs"), (os, "rmdir"), (os, "unlink"), (os, "fsync"), (torch, "save"),
    (shutil, "rmtree"), (destinations, "copied_records"), (destinations, "write_records"),
]  # fmt: skip


def save_twice_and_die(case: Case, folder: str, rank: int, step: int) -> None:
    engine = build(case)
    train_on(engine, 0, 1)
    engine.save_checkpoint(folder, tag="t")
    engine.wait_for_save()
    train_on(engine, 1, 1)
    with killed_at(step if engine.global_rank == rank else 10**6, STEPS_OF_WRITING, lambda: os._exit(1)):
        engine.save_checkpoint(folder, tag="t")
        engine.wait_for_save()


@pytest.mark.parametrize(
    "deaths",
    [  # how it saves, the rank that dies, and the step of writing: copying, writing, waiting for the disk, renaming
        [("blocking", 1, 2), ("background", 0, 8), ("background", 1, 12), ("background", 1, 20), ("background", 0, 39)],
        pytest.param(
            [
                *(("blocking", 0, step) for step in range(13)),
                *(("background", rank, step) for rank, steps in ((0, 40), (1, 21)) for step in range(steps)),
            ],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["each phase", "each step"],
)
def test_a_rank_that_dies_while_writing_leaves_the_previous_checkpoint(
    tmp_path: Path, deaths: list[tuple[str, int, int]]
) -> None:
    saved_in = [f"{tmp_path}/{kind} {rank} {step}" for kind, rank, step in deaths]
    for folder, (kind, rank, step) in zip(saved_in, deaths, strict=True):
        case = Case(stages=2, micro_batches=1, dynmo={"interval": 0, "checkpoint": kind, "timeout_seconds": 20})
        with pytest.raises(RankError, match="died"):
            run(2, save_twice_and_die, case, folder, rank, step)
    assert run(2, load_each, Case(stages=2, micro_batches=1), saved_in) == [[True] * len(deaths)] * 2
    for folder in saved_in:
        assert sorted(os.listdir(folder)) == ["latest", "t"], folder  # loading removed the rest


def failure_at_the_end(engine: Any, folder: str) -> str:
    """Return the message if one rank fails after the last collective."""
    if engine.global_rank == 1:
        applying.restore_random_states = lambda states: [][0]
    with pytest.raises(ds_dynmo.CheckpointError) as error:
        engine.load_checkpoint(folder, tag="good")
    return str(error.value)


def save_fails(case: Case, folder: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Save while one rank's disk is full; then client states that cannot be loaded, or not before they are allowed.

    Returns:
        What is said, and what follows without failures, and after those of saves.
    """
    engine = build(case)
    train_on(engine, 0, 1)
    engine.save_checkpoint(folder, tag="good")
    undisturbed = outcome(engine, train_on(engine, 1, 2))
    engine.load_checkpoint(folder)
    messages = []
    for into, client in ((f"{folder}/new/one", {}), (folder, {}), (folder, {"evil": Evil(folder)})):
        full = not client and engine.global_rank == 1
        with pytest.raises(ds_dynmo.CheckpointError) as error, files_of_at_most(1000) if full else nullcontext():
            engine.save_checkpoint(into, tag="bad", client_state=client)
        messages.append(str(error.value))
    assert sorted(os.listdir(folder)) == ["good", "latest"], os.listdir(folder)
    found = outcome(engine, train_on(engine, 1, 2))
    about_allowing = allow_later(engine, folder)
    return [*messages, failure_at_the_end(engine, folder), *about_allowing], undisturbed, found


class Kind(enum.Enum):
    CAUSAL = 1


def allow_later(engine: Any, folder: str) -> list[str]:
    """Save what both Megatrons put into a client state, with an enum of theirs; return a warning and a load's error."""
    state = {"args": Namespace(kind=Kind.CAUSAL), "random": numpy.random.get_state(), "loss": numpy.float64(1.5)}
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "warning_once", lines.append)
        engine.save_checkpoint(folder, tag="own", client_state=state)
        with pytest.raises(ds_dynmo.CheckpointError) as error:
            engine.load_checkpoint(folder, tag="own")
        with safe_globals([Kind]):
            engine.save_checkpoint(folder, tag="own", client_state=state)
            loaded = engine.load_checkpoint(folder, tag="own")[1]
    numpy.testing.assert_equal({key: loaded[key] for key in state}, state)
    (line,) = lines
    return [line, str(error.value)]


def test_a_failure_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    said, undisturbed, found = zip(*run(2, save_fails, Case(micro_batches=1), str(tmp_path)))
    for to_new_folder, full, unsafe, at_the_end, *about_allowing in said:
        for message, written in ((to_new_folder, tmp_path / "new" / "one"), (full, tmp_path)):
            assert message.startswith(f"rank 1: OSError: [Errno 27] File too large: '{written}/.bad.writing/")
        assert "could run code" in unsafe and "mp_rank_00" in unsafe
        assert "neither what it was nor what was saved: rank 1: IndexError" in at_the_end
        line = f"from {__name__} import Kind; torch.serialization.add_safe_globals([Kind])"
        assert all(line in message for message in about_allowing)
    check_same(list(undisturbed), list(found))
