"""Universal checkpoints: DeepSpeed's converter makes them of ours, and they load at other degrees, here and there."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

import ds_dynmo
from ds_dynmo.engine.deepspeed.loss_scale import saved_loss_scale
from tests.distributed.harness import run
from tests.distributed.support.checkpoints import STEPS, attempt, damaged, outcome, stock_state, train_on
from tests.distributed.support.configs import Case, config, parameter_groups
from tests.distributed.support.models import layers, module_of
from tests.distributed.support.sliced_layers import CutBlock, sliced_layers
from tests.distributed.support.training import build, gather, layers_of, raw, whole

UNIVERSAL = {"checkpoint": {"load_universal": True}}
INFO = "universal_checkpoint_info"
PATTERNS = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"\d+\.norm\..*", r"\d+\.bias", r"(\d+|tied_modules\.embedding)\.weight"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down"],
}


def layers_for(case: Case) -> Callable[[Case], list[Any]]:
    return layers if case.slices is None else partial(sliced_layers, block=CutBlock)


def convert(folder: str) -> None:
    """Let DeepSpeed convert ``folder/now`` to ``folder/universal``."""
    arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    paths = {"input_folder": os.path.join(folder, "now"), "output_folder": os.path.join(folder, "universal")}
    ds_to_universal.main(Namespace(**paths, **arguments, strict=True, inject_missing_state=False))


def save_and_convert(engine: Any, folder: str, info: dict[str, Any] | None = None) -> None:
    client_state = {"epoch": 4} if info is None else {"epoch": 4, INFO: info}
    engine.save_checkpoint(folder, tag="now", client_state=client_state)
    if engine.global_rank == 0:
        convert(folder)
    gather(None)


def save_then_train(case: Case, folder: str, move: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save after a move, and return the state that was saved and that after more batches."""
    engine = build(case, layers_for(case))
    train_on(engine, 0)
    engine.rebalance(move)
    save_and_convert(engine, folder, None if case.slices is None else PATTERNS)
    return outcome(engine, []), outcome(engine, train_on(engine, STEPS))


def load_then_train(case: Case, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load into an engine that has trained already, and return the state that was loaded and after more batches."""
    engine = build(case, layers_for(case), more=UNIVERSAL)
    train_on(engine, 50, 1)
    path, client = engine.load_checkpoint(folder)
    assert path is not None and os.path.isfile(path) and client["epoch"] == 4
    return outcome(engine, []), outcome(engine, train_on(engine, STEPS))


def progress(outcome: dict[str, Any]) -> Any:
    """Return counters and learning rates; micro-batches that seed layers are not in a universal checkpoint."""
    steps, samples, _, skipped = outcome["steps"]
    return steps, samples, skipped, outcome["lr"]


@pytest.mark.parametrize(
    ("case", "reader"),
    [
        pytest.param(
            Case(stages=4, precision="bf16 zero1", groups="two", scheduler=True),
            {"stages": 2, "start": (0, 3, 8)},
            id="bf16 zero1",
        ),
        pytest.param(Case(stages=2, precision="bf16", tied=True), {"stages": 3}, id="bf16"),
        pytest.param(
            Case(stages=2, precision="fp32 zero1", clip=0.0, groups="two"),
            {"stages": 1, "precision": "fp32"},
            id="fp32 zero1 to fp32",
        ),
        pytest.param(
            Case(stages=2, replicas=2, precision="bf16 zero1 fp32sums", tied=True, groups="two"),
            {"stages": 3},
            id="fp32 sums",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_goes_on_at_another_number_of_stages(tmp_path: Path, case: Case, reader: dict[str, Any]) -> None:
    """Bitwise. Layers were moved, so that the first stage lacks a parameter group that another one has."""
    move = [*range(case.stages), case.num_layers]
    saved = [after for _, after in run(case.ranks, save_then_train, case, str(tmp_path), move)]
    other = replace(case, **reader)
    loaded = [after for _, after in run(other.ranks, load_then_train, other, str(tmp_path))]
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert progress(loaded[0]) == progress(saved[0])
    if other.precision == case.precision:
        assert whole(loaded) == whole(saved)


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), pytest.param(2, 1, marks=pytest.mark.nightly), pytest.param(2, 3, marks=pytest.mark.nightly)],
)
def test_another_number_of_replicas_has_the_same_state(tmp_path: Path, before: int, after: int) -> None:
    case = Case(stages=2, replicas=before, precision="bf16 zero1", tied=True, groups="two")
    saved = [now for now, _ in run(case.ranks, save_then_train, case, str(tmp_path), [0, 1, 8])]
    other = replace(case, replicas=after)
    results = run(other.ranks, load_then_train, other, str(tmp_path))
    trimmed = {key: value for key, value in whole([now for now, _ in results]).items()}
    for key, value in whole(saved).items():
        if isinstance(value, bytes):  # shards are padded to the number of replicas
            assert trimmed[key][: len(value)] == value[: len(trimmed[key])], key
        else:
            assert trimmed[key] == value, key
    assert all(loss < 3.5 for _, then in results for loss in then["losses"])


def loss_scales(case: Case, folder: str) -> list[tuple[float, int]]:
    """Return the loss scale, and the batches that it was adjusted in: fresh, saved, loaded."""
    engine = build(case)
    found = [saved_loss_scale(vars(engine.optimizer))]
    train_on(engine, 0)
    save_and_convert(engine, folder)
    found.append(saved_loss_scale(vars(engine.optimizer)))
    other = build(case, more=UNIVERSAL)
    other.load_checkpoint(folder)
    found.append(saved_loss_scale(vars(other.optimizer)))
    return [(state["cur_scale"], state["cur_iter"]) for state in found]


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    case = Case(stages=1, blocks=1, precision="fp16 zero1")
    ((fresh, saved, loaded),) = run(1, loss_scales, case, str(tmp_path))
    assert loaded == saved != fresh


# -- tensor-parallel degrees --------------------------------------------------------------------------


def load_and_convert(case: Case, folder: str, again: str) -> list[float]:
    """Load, save what was loaded as another universal checkpoint, and train."""
    engine = build(case, layers_for(case), more=UNIVERSAL)
    engine.load_checkpoint(folder)
    save_and_convert(engine, again, PATTERNS)
    return train_on(engine, STEPS)


def tensors(folder: Path) -> dict[str, bytes]:
    """Return weights and moments in a universal checkpoint, by file."""
    found = {}
    for path in sorted((folder / "universal" / "zero").glob("*/*.pt")):
        content = torch.load(path, weights_only=True)
        found[f"{path.parent.name}/{path.name}"] = raw(content["param"] if isinstance(content, dict) else content)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "tied"),
    [
        ("fp32 zero1", False),
        ("bf16 zero1", True),
        ("bf16", True),
    ],
)
def test_from_two_slices_to_one_and_back(tmp_path: Path, precision: str, tied: bool) -> None:
    """The state is the same to the bit; losses of one slice differ in the order of their sums."""
    case = Case(stages=2, slices=2, blocks=3, precision=precision, clip=0.05, groups="two", tied=tied)
    first, second = tmp_path / "first", tmp_path / "second"
    saved = [after for _, after in run(4, save_then_train, case, str(first), [0, 1, 5])]
    one_slice = run(2, load_and_convert, replace(case, slices=1), str(first), str(second))[0]
    assert one_slice == pytest.approx(saved[0]["losses"], rel=1e-5 if precision == "fp32 zero1" else 0.02)
    assert tensors(second) == tensors(first) and len(tensors(first)) > 60
    check = [after for _, after in run(4, load_then_train, case, str(second))]
    assert check[0]["losses"] == saved[0]["losses"] and whole(check) == whole(saved)


def test_slices_joined_without_patterns_are_refused(tmp_path: Path) -> None:
    """Without patterns everything is joined along dimension 0, also what all slices hold alike."""
    case = Case(stages=1, slices=2, blocks=0, precision="fp32 zero1")
    run(2, save_without_patterns, case, str(tmp_path))
    (found,) = run(1, attempt_to_load, replace(case, slices=1), str(tmp_path))
    assert "0.weight/fp32.pt: has shape [22, 8], which cannot be cut along dimension 0 into [[11, 8]]" in found[0]
    assert found[1]


def save_without_patterns(case: Case, folder: str) -> None:
    engine = build(case, layers_for(case))
    train_on(engine, 0, 1)
    save_and_convert(engine, folder)


def attempt_to_load(case: Case, folder: str) -> tuple[str, bool]:
    return attempt(build(case, layers_for(case), more=UNIVERSAL), folder)


# -- stock DeepSpeed ----------------------------------------------------------------------------------


def stock_engine(case: Case) -> Any:
    module = module_of(case)
    settings = {**config(replace(case, dynmo=None)), **UNIVERSAL}
    return deepspeed.initialize(model=module, model_parameters=parameter_groups(module, case.groups), config=settings)[
        0
    ]


def between_stock_and_ours(case: Case, folder: str) -> list[Any]:
    """Return, for each writer, its results after saving and those of the other engine after loading."""
    found = []
    for writer, reader in (("stock", "ours"), ("ours", "stock")):
        made: dict[str, Callable[[Case], Any]] = {"stock": stock_engine, "ours": partial(build, more=UNIVERSAL)}
        engine = made[writer](case)
        train_on(engine, 0)
        if writer == "ours":
            engine.rebalance([0, 2, 8])
        info = {"universal_checkpoint_version": 0.2, "pipeline_replicated_parameter_patterns": ["tied_modules.*"]}
        save_and_convert(engine, os.path.join(folder, writer), info)
        if writer == "ours":
            engine.rebalance([0, 4, 8])  # where DeepSpeed puts them: parameters are compared in its order
        other = made[reader](case)
        other.load_checkpoint(os.path.join(folder, writer))
        found.append([(train_on(one, STEPS), stock_state(one), one.global_steps) for one in (engine, other)])
    return found


@pytest.mark.parametrize("precision", ["bf16 zero1", pytest.param("fp32 zero1", marks=pytest.mark.nightly)])
def test_stock_reads_what_we_write_and_we_what_stock_writes(tmp_path: Path, precision: str) -> None:
    case = Case(stages=2, precision=precision, clip=0.0, scheduler=True, tied=True)
    for rank in run(2, between_stock_and_ours, case, str(tmp_path)):
        for writer, reader in rank:
            assert writer == reader


# -- bad input ----------------------------------------------------------------------------------------

HURT = [
    ("zero/3.up.weight", "missing folder", r"zero/3.up.weight/: there is no such folder; ds_to_universal leaves out"),
    ("zero/1.up.weight/exp_avg.pt", "missing", "zero/1.up.weight/exp_avg.pt: there is no such file"),
    ("zero/1.up.weight/step.pt", "missing", "zero/1.up.weight/step.pt: there is no such file"),
    ("zero/5.norm.bias/fp32.pt", "truncated", "zero/5.norm.bias/fp32.pt: cannot be read"),
    ("zero/5.norm.bias/fp32.pt", "zero/5.up.weight/fp32.pt", "has shape [4, 8], which cannot be cut"),
    ("zero/2.up.bias/step.pt", "zero/5.up.weight/fp32.pt", "expected a count of steps"),
    ("zero/2.up.bias/step.pt", "other count", "layer 2's up.bias 9, but bf16 and ZeRO count steps per parameter group"),
    ("zero/2.up.bias/fp32.pt", "zero/2.up.bias/step.pt", "holds no whole parameter"),
    ("zero/optimizer_state.pt", "missing", "this is no universal checkpoint"),
    ("mp_rank_00_model_states.pt", "evil", "holds what could run code"),
    ("zero/9.weight", "more", "has parameters that this model lacks: ['9.weight']"),
]


def refuse(case: Case, folder: str) -> list[tuple[str, bool]]:
    """Return, per damage and for other engines, the message of the error and whether the engine is unchanged."""
    engine = build(case, more=UNIVERSAL)
    train_on(engine, 0, 1)
    save_and_convert(engine, folder)
    found = [attempt(engine, folder, tag="now"), attempt(engine, os.path.join(folder, "now"))]
    good = Path(folder, "universal")
    for number, (file, how, _) in enumerate(HURT):
        copy = Path(folder, str(number))
        if engine.global_rank == 0:
            shutil.copytree(good, copy)
            if how == "missing folder":
                shutil.rmtree(copy / file)
            elif how == "more":
                (copy / file).mkdir()
            elif how == "other count":
                torch.save(torch.tensor(9.0), copy / file)
            else:
                damaged(copy / file, str(good / how) if how.endswith(".pt") else how)
        gather(None)
        found.append(attempt(engine, folder, tag=str(number)))
    path, _ = engine.load_checkpoint(folder, tag="0", load_module_strict=False)
    assert path is not None
    sgd = build(replace(case, optimizer="SGD", precision="fp32"), more=UNIVERSAL)
    found.append(attempt(sgd, folder))
    sgd.load_checkpoint(folder, load_optimizer_states=False)
    for name, parameter in sgd.module.named_parameters():
        assert torch.load(good / "zero" / name / "fp32.pt", weights_only=True)["param"].equal(parameter.cpu()), name
    found.append(attempt(build(replace(case, groups="one"), more=UNIVERSAL), folder))
    found.append(attempt(build(case), folder, tag="universal"))
    pruned = [layers_of(engine)[2].up] if engine.stage_id == 0 else []
    engine.keep_elements([(module, "weight", torch.tensor([0, 3])) for module in pruned])
    return [*found, attempt(engine, folder)]


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    case = Case(stages=2, precision="bf16 zero1", groups="two")
    expected = [
        "now/zero/optimizer_state.pt: there is no such file, so this is no universal checkpoint",
        "now/latest_universal: there is no such file",
        *(message for *_, message in HURT),
        "has the moments of Adam, but this engine trains with SGD; load_optimizer_states=False",
        "mp_rank_00_model_states.pt: parameter group 1 there is not one group here but (part of) [0]",
        "a universal checkpoint, which checkpoint.load_universal = true loads",
        "layer 2's up.weight had shape [7, 8] when it was built and has [2] now",
    ]
    for found in run(2, refuse, case, str(tmp_path)):
        for (message, unchanged), part in zip(found, expected, strict=True):
            assert part in message and unchanged, (part, message)
    assert not list(tmp_path.rglob("evil"))


def test_patterns_that_are_no_dict_are_refused(tmp_path: Path) -> None:
    assert run(1, _save_bad_patterns, Case(stages=1, precision="bf16 zero1"), str(tmp_path)) == [True]


def _save_bad_patterns(case: Case, folder: str) -> bool:
    engine = build(case)
    with pytest.raises(ds_dynmo.ConfigError, match=r"universal_checkpoint_info = \['norm'\]: has to be a dict"):
        engine.save_checkpoint(folder, client_state={INFO: ["norm"]})
    return not os.listdir(folder)
