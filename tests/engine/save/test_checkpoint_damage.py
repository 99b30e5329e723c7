"""Damaged checkpoints, and ranks that die or fail while they write one."""

from __future__ import annotations

import enum
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.serialization import safe_globals

import ds_dynmo
from ds_dynmo.engine.save import destinations, writing
from ds_dynmo.engine.save import folder as folders
from tests.support.checkpoints import (
    STEPS,
    Evil,
    check_same,
    load_and_continue,
    outcome,
    refuse,
    save_and_continue,
    save_as,
    train_on,
    train_undisturbed,
)
from tests.support.configs import Case
from tests.support.full_disk import files_of_at_most
from tests.support.harness import RankError, run
from tests.support.training import build, freeze, state, whole

pytestmark = pytest.mark.ranks

# -- damaged files ------------------------------------------------------------------------------------


def test_a_damaged_file_is_named_and_changes_nothing(tmp_path: Path) -> None:
    case = Case(stages=2)
    for name, seed in (("good", 0), ("other", 1)):
        run(2, save_and_continue, replace(case, blocks=5 + seed), str(tmp_path / name), None)
    run(2, save_and_continue, replace(case, clip=0.01), str(tmp_path / "same"), None)
    good, other, same = (str(tmp_path / name / f"global_step{STEPS}") for name in ("good", "other", "same"))
    files = ["layer_03-model_states.pt", "mp_rank_01_model_states.pt", "dynmo/layer_05-data_00-model_00.pt"]
    files += ["dynmo/rank-pipe_01-data_00-model_00.pt", "dynmo/manifest.json"]
    files += ["dynmo/manifest-pipe_01.json"]
    hurts = [(file, how) for file in files for how in ("missing", "truncated", "garbage")]
    hurts += [("mp_rank_00_model_states.pt", "evil")]
    hurts += [(file, f"{where}/{file}") for file in files[:2] for where in (other, same)]
    hurts += [(file, f"{other}/{file}") for file in files[-2:]]
    hurts += [(file, "flipped") for file in files[:2]]
    (tmp_path / "copies").mkdir()
    start = replace(case, start=(0, 3, 8))  # a successful load would move layers
    results = run(2, refuse, start, good, str(tmp_path / "copies"), hurts)
    for found in results:
        for (message, unchanged), (file, how) in zip(found, hurts):
            named = file.removesuffix(".json")  # beside another save's manifest, the first of a stage is the wrong one
            assert named in message and unchanged, (file, how, message)
    assert [found[-1][0] for found in results] == run(2, train_undisturbed, start)


def test_a_flipped_bit_of_a_shard_names_the_file_and_the_tensor(tmp_path: Path) -> None:
    case = Case(stages=2, precision="bf16 zero1")
    run(2, save_and_continue, case, str(tmp_path), None)
    (tmp_path / "copies").mkdir()
    folder, shard = str(tmp_path / f"global_step{STEPS}"), "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    results = run(2, refuse, case, folder, str(tmp_path / "copies"), [(shard, "flipped")])
    for (message, unchanged), _ in results:
        assert unchanged and f"{shard}: optimizer_state_dict/" in message and "its checksum differs" in message


def test_a_malicious_pickle_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    case = Case(stages=1)
    run(1, save_as, "stock", case, str(tmp_path))
    (tmp_path / "copies").mkdir()
    files = ["mp_rank_00_model_states.pt", "layer_00-model_states.pt"]
    says = {"evil": "could run code", "empty": "cannot be read: EOFError: it is empty, or ends too early"}
    hurts = [(file, how) for file in files for how in says]
    found = run(1, refuse, case, str(tmp_path / f"global_step{STEPS}"), str(tmp_path / "copies"), hurts)[0]
    for (message, unchanged), (file, how) in zip(found, hurts):
        assert file in message and says[how] in message and unchanged
    assert not list(tmp_path.rglob("evil"))


def save_frozen(case: Case, folder: str) -> None:
    engine = build(case)
    freeze(engine, 1)
    engine.model_changed("frozen")
    train_on(engine, 0)
    engine.save_checkpoint(folder)


def test_a_checkpoint_that_lost_its_dynmo_folder_says_what_it_is(tmp_path: Path) -> None:
    case = Case(stages=2, precision="bf16 zero1")
    run(2, save_frozen, case, str(tmp_path))
    (tmp_path / "copies").mkdir()
    folder = str(tmp_path / f"global_step{STEPS}")
    for (message, unchanged), _ in run(2, refuse, case, folder, str(tmp_path / "copies"), [("dynmo", "missing")]):
        assert unchanged and f"{tmp_path}/copies/0: has no folder dynmo/, so it is read as stock DeepSpeed's" in message
        assert "copy it with that folder. " in message and "model_states.pt: has parameter groups of " in message


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_a_checkpoint_that_lost_its_dynmo_folder_is_read_as_deepspeed_writes_it(tmp_path: Path, precision: str) -> None:
    case = Case(stages=2, precision=precision)
    saved = run(2, save_and_continue, case, str(tmp_path), None)
    shutil.rmtree(tmp_path / f"global_step{STEPS}" / "dynmo")
    loaded = run(2, load_and_continue, case, str(tmp_path))
    for what in ("losses", "partition", "lr"):
        assert loaded[0][what] == saved[0][what]
    assert whole(loaded) == whole(saved)


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    case = Case(stages=2)
    run(2, save_and_continue, case, str(tmp_path), None)
    for other, message in (
        (replace(case, blocks=6), "a model of 8 layers, expected 9"),
        (replace(case, tied=True), "layer 7 has parameters .* there, expected none"),
        (replace(case, optimizer="SGD"), "AdamW.*expected SGD"),
        (replace(case, groups="two"), "has 1 parameter groups, expected 2"),
    ):
        with pytest.raises(RankError, match=f"CheckpointError.*{message}"):
            run(2, load_and_continue, other, str(tmp_path))


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.nightly), "bf16 zero1"])
def test_flat_buffers_of_other_groups_are_refused(tmp_path: Path, precision: str) -> None:
    """They are refused before anything changes."""
    cases = [Case(stages=2, precision=precision, groups=groups) for groups in ("one", "two")]
    for case, folder in zip(cases, ("one", "two")):
        run(2, save_as, "ours", case, str(tmp_path / folder))
    for case, folder, counts in ((cases[1], "one", (1, 2)), (cases[0], "two", (2, 1))):
        with pytest.raises(RankError, match="flat-pipe_0.*has {} parameter groups, expected {}".format(*counts)):
            run(2, load_and_continue, case, str(tmp_path / folder))


class Killed(BaseException):
    """A simulated kill: no handler cleans up."""


STEPS_OF_WRITING = [
    (os, "rename"), (os, "replace"), (os, "makedirs"), (os, "rmdir"), (os, "unlink"), (os, "fsync"), (torch, "save"),
    (shutil, "rmtree"), (destinations, "copied_records"), (destinations, "write_records"),
]  # fmt: skip


class Countdown:
    """Kills the process at the n-th step of writing, counted over all files."""

    def __init__(self, step: int, die: Callable[[], None]) -> None:
        self.left, self.die = step, die
        self._originals: list[Any] = []

    def __enter__(self) -> Countdown:
        for module, name in STEPS_OF_WRITING:
            self._originals.append(getattr(module, name))
            setattr(module, name, self._counting(self._originals[-1]))
        return self

    def __exit__(self, *_: Any) -> None:
        for (module, name), original in zip(STEPS_OF_WRITING, self._originals):
            setattr(module, name, original)

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                self.die()
            self.left -= 1
            return original(*args, **kwargs)

        return count


def killed() -> None:
    raise Killed


def problems_after_kill(engine: Any, folder: str, saved: dict[str, Any], tag: str, new: Any) -> str:
    """Tell what is wrong with the checkpoints after a kill while ``tag`` was written over those of ``saved``."""
    last = list(saved)[-1]
    latest = folders.read_latest(folder)
    if latest is None or folders.find(folder, latest) is None:
        return f"latest names {latest}, which is not there"
    engine.load_checkpoint(folder)
    if (engine.global_steps, state(engine)) not in (saved[last], new):
        return "latest is neither the previous nor the new one"
    for name, expected in saved.items():
        engine.load_checkpoint(folder, tag=name)
        allowed = (expected, new) if name == tag else (expected,)
        if (engine.global_steps, state(engine)) not in allowed:
            return f"{name} is not what was saved"
    return ""


def kill_everywhere(folder: str, tags: list[str], kind: str, every: int) -> list[tuple[int, str]]:
    """Kill the writing of the last of ``tags`` at every ``every``-th step. Return what is wrong afterwards, by step."""
    engine = build(Case(stages=1, blocks=1, dynmo={"interval": 0, "checkpoint": kind}))
    wrong, step, survived = [], 0, False
    while not survived:
        target = os.path.join(folder, str(step))
        saved = {}
        for tag in tags[:-1]:
            train_on(engine, 0, 1)
            engine.save_checkpoint(target, tag=tag)
            engine.wait_for_save()
            saved[tag] = (engine.global_steps, state(engine))
        train_on(engine, 0, 1)
        new = (engine.global_steps, state(engine))
        with Countdown(step, killed):
            try:
                engine.save_checkpoint(target, tag=tags[-1])
                engine.wait_for_save()
                survived = True
            except Killed:
                pass
            except ds_dynmo.CheckpointError as error:
                assert kind == "background" and "Killed" in str(error)  # in the thread
        if problem := problems_after_kill(engine, target, saved, tags[-1], new):
            wrong.append((step, problem))
        train_on(engine, 0, 1)
        newest = (engine.global_steps, state(engine))
        engine.save_checkpoint(target, tag=tags[-1])  # the next one cleans up
        engine.load_checkpoint(target)
        if (engine.global_steps, state(engine)) != newest:
            wrong.append((step, "the next checkpoint was lost"))
        names = {name for name in os.listdir(target)}
        if folders.read_latest(target) != tags[-1] or names != {*tags, "latest"}:
            wrong.append((step, f"left {names}"))
        step += every
        shutil.rmtree(target)
    return [*wrong, (step, "steps")]


# -- writing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["blocking", "background"])
@pytest.mark.parametrize(
    "tags",
    [pytest.param(["one", "two"], marks=pytest.mark.nightly), ["one", "one"], ["one", "two", "one"]],
    ids="-".join,
)
@pytest.mark.every_variant
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path, tags: list[str], kind: str, every: int) -> None:
    *wrong, (steps, _) = run(1, kill_everywhere, str(tmp_path), tags, kind, every)[0]
    assert not wrong
    assert steps > 20


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def save_twice_and_die(case: Case, folder: str, rank: int, step: int) -> None:
    engine = build(case)
    train_on(engine, 0)
    engine.save_checkpoint(folder, tag="t")
    engine.wait_for_save()
    train_on(engine, STEPS)
    with Countdown(step if engine.global_rank == rank else 10**6, lambda: os._exit(1)):
        engine.save_checkpoint(folder, tag="t")
        engine.wait_for_save()


IN_THE_MIDDLE = [  # one of each phase is always tested; all are in the nightly form
    *(("blocking", 1, 2), nightly("blocking", 0, 3), nightly("blocking", 0, 12)),
    *(("background", 0, 8), nightly("background", 1, 5)),  # copying
    *(("background", 1, 12), nightly("background", 0, 18)),  # writing
    *(("background", 1, 20), nightly("background", 0, 30)),  # waiting until files are on the disk
    ("background", 0, 39),  # about to rename
]


@pytest.fixture(scope="module")
def saved_whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ranks have after they saved and trained on."""
    return run(2, save_and_continue, Case(stages=2), str(tmp_path_factory.mktemp("reference")))


@pytest.mark.parametrize(("kind", "rank", "step"), IN_THE_MIDDLE)
@pytest.mark.every_variant
def test_a_rank_that_dies_while_writing_leaves_the_previous_checkpoint(
    tmp_path: Path, saved_whole: list[Any], kind: str, rank: int, step: int
) -> None:
    case = Case(stages=2, dynmo={"interval": 0, "checkpoint": kind, "timeout_seconds": 20})
    with pytest.raises(RankError, match="died"):
        run(2, save_twice_and_die, case, str(tmp_path), rank, step)
    check_same(saved_whole, run(2, load_and_continue, case, str(tmp_path)))
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]  # loading removed the rest


def failure_at_the_end(engine: Any, folder: str) -> str:
    """Return the message if one rank fails after the last collective."""
    from ds_dynmo.engine.save import applying

    if engine.global_rank == 1:
        applying.restore_random_states = lambda states: [][0]
    try:
        engine.load_checkpoint(folder, tag="good")
    except ds_dynmo.CheckpointError as error:
        return str(error)
    return ""


def save_fails(case: Case, folder: str) -> tuple[list[str], dict[str, Any]]:
    """Save while one rank's disk is full; then client states that cannot be loaded, or not before they are allowed."""
    engine = build(case)
    train_on(engine, 0)
    engine.save_checkpoint(folder, tag="good")
    messages = []
    for into, client in ((f"{folder}/new/one", {}), (folder, {}), (folder, {"evil": Evil(folder)})):
        full = not client and engine.global_rank == 1
        try:
            with files_of_at_most(1000) if full else nullcontext():
                engine.save_checkpoint(into, tag="bad", client_state=client)
        except ds_dynmo.CheckpointError as error:
            messages.append(str(error))
    assert sorted(os.listdir(folder)) == ["good", "latest"], os.listdir(folder)
    found = outcome(engine, train_on(engine, STEPS))
    about_allowing = allow_later(engine, folder)
    return [*messages, failure_at_the_end(engine, folder), *about_allowing], found


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
    case = Case(stages=2)
    results = run(2, save_fails, case, str(tmp_path))
    for (to_new_folder, full, unsafe, at_the_end, *about_allowing), _ in results:
        for message, written in ((to_new_folder, tmp_path / "new" / "one"), (full, tmp_path)):
            assert message.startswith(f"rank 1: OSError: [Errno 27] File too large: '{written}/.bad.writing/")
        assert "could run code" in unsafe and "mp_rank_00" in unsafe
        assert "neither what it was nor what was saved: rank 1: IndexError" in at_the_end
        line = f"from {__name__} import Kind; torch.serialization.add_safe_globals([Kind])"
        assert all(line in message for message in about_allowing)
    saved = run(2, save_and_continue, case, str(tmp_path / "reference"))
    check_same(saved, [found for _, found in results])
