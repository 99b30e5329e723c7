"""Checkpoints that DeepSpeed's own engine writes and reads."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

import ds_dynmo
from tests.support.checkpoints import STEPS, attempt, load_as, save_as, stock_state, train_on
from tests.support.configs import Case, config, parameter_groups
from tests.support.harness import RankError, run
from tests.support.models import layers, module_of
from tests.support.sliced_layers import SLICES, sliced_layers
from tests.support.training import batches, build, gather, raw

pytestmark = pytest.mark.ranks


def decay_and_rise(optimizer: torch.optim.Optimizer) -> Any:
    """Make a scheduler that runs as many others as there are groups, with a function for each group."""
    factors = [lambda step: 0.25 * (step + 1), lambda step: 0.5 * (step + 1)][-len(optimizer.param_groups) :]
    runs = [ExponentialLR(optimizer, 0.5), LambdaLR(optimizer, factors)]
    return SequentialLR(optimizer, runs, milestones=[2])


def stock_with_an_empty_group(case: Case, folder: str) -> list[list[float]]:
    """Return losses of DeepSpeed's engine after it saved, and of ours after it loaded that checkpoint."""

    def engine_of(initialize: Any, case: Case) -> Any:
        module = module_of(case)
        groups = [{"params": [], "weight_decay": 0.3}, {"params": list(module.parameters()), "weight_decay": 0.1}]
        return initialize(model=module, model_parameters=groups, lr_scheduler=decay_and_rise, config=config(case))[0]

    stock = engine_of(deepspeed.initialize, replace(case, dynmo=None))
    train_on(stock, 0)
    stock.save_checkpoint(folder)
    ours = engine_of(ds_dynmo.initialize, case)
    ours.load_checkpoint(folder)
    return [train_on(engine, STEPS) for engine in (stock, ours)]


def test_a_stock_checkpoint_with_an_unused_group_is_loaded(tmp_path: Path) -> None:
    for stock, ours in run(2, stock_with_an_empty_group, Case(precision="bf16 zero1", clip=0.0), str(tmp_path)):
        assert stock == ours


UNIVERSAL = {"checkpoint": {"load_universal": True}}


PATTERNS = {
    "tp_replicated_parameter_patterns": [r"\d+\.norm\..*", r"\d+\.bias", r"(\d+|tied_modules\.embedding)\.weight"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down"],
}


def convert(case: Case, folder: str, make_layers: Any = layers) -> Any:
    """Save after a move, let DeepSpeed convert that, and compare weights and moments with what this rank has."""
    engine = build(case, make_layers)
    train_on(engine, 0)
    engine.rebalance([0, 2, case.num_layers])
    patterns = {} if case.slices is None else {"universal_checkpoint_info": PATTERNS}
    engine.save_checkpoint(folder, tag="now", client_state=patterns)
    if engine.global_rank == 0:
        folders = {"input_folder": os.path.join(folder, "now"), "output_folder": os.path.join(folder, "universal")}
        workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        ds_to_universal.main(Namespace(**folders, **workers, strict=True, inject_missing_state=False))
    gather(None)
    for name, parameter in engine.module.named_parameters():
        held = {kind: safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")}
        for kind, value in {"fp32": safe_get_full_fp32_param(parameter), **held}.items():
            whole = torch.load(Path(folder, "universal", "zero", name, f"{kind}.pt"), weights_only=True)["param"]
            dim = 1 if name.endswith("down") else 0
            start = whole.shape[dim] - value.shape[dim] if SLICES.get("index") else 0
            assert raw(whole.narrow(dim, start, value.shape[dim])) == raw(value), (name, kind)
    return engine


@pytest.mark.parametrize(
    "case",
    [
        Case(stages=2, replicas=2, precision="bf16", tied=True, groups="two"),
        pytest.param(Case(stages=2, replicas=2, precision="bf16 zero1", groups="two"), marks=pytest.mark.nightly),
    ],
)
def test_deepspeed_converts_our_checkpoints_to_universal_ones(tmp_path: Path, case: Case) -> None:
    run(case.ranks, convert_alone, case, str(tmp_path))


@pytest.mark.nightly
def test_deepspeed_joins_slices_by_the_patterns_in_the_client_state(tmp_path: Path) -> None:
    case = Case(stages=2, slices=2, blocks=3, precision="bf16 zero1", tied=True)
    run(case.ranks, convert_alone, case, str(tmp_path), sliced_layers)


def convert_alone(case: Case, folder: str, make_layers: Any = layers) -> None:
    convert(case, folder, make_layers)


def convert_and_go_on(case: Case, folder: str) -> tuple[tuple[str, bool], list[Any]]:
    """Load what DeepSpeed converted without the section, save, and load that with it.

    Returns:
        What ours says of the universal checkpoint, and what each of the three engines has after more batches.
    """
    engine = convert(case, folder)
    said = attempt(engine, folder, tag="universal")
    engine.rebalance([0, 4, 8])  # where DeepSpeed puts them: parameters are compared in its order
    stock = build(replace(case, dynmo=None), more={"checkpoint": {"load_universal": True}})
    stock.load_checkpoint(folder)
    stock.save_checkpoint(os.path.join(folder, "stock"))
    ours = build(case)
    ours.load_checkpoint(os.path.join(folder, "stock"))
    return said, [(train_on(one, STEPS), stock_state(one), one.global_steps) for one in (engine, stock, ours)]


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_universal_checkpoint_goes_on_by_way_of_stock_deepspeed(tmp_path: Path, tied: bool) -> None:
    case = Case(stages=2, precision="bf16 zero1", clip=0.0, tied=tied, scheduler=True)
    for (message, unchanged), (saved, *loaded) in run(2, convert_and_go_on, case, str(tmp_path)):
        assert 'universal: a universal checkpoint; load it once without the "dynmo" section' in message and unchanged
        assert loaded == [saved, saved]


@pytest.mark.parametrize(
    ("precision", "replicas", "writer", "reader"),
    [
        ("bf16", 1, "stock", "ours"),  # DeepSpeed 0.19.8 cannot load its own checkpoint of this kind: KeyError
        *((precision, number, "stock", "ours") for precision, number in (("bf16 zero1", 2), ("fp32 zero1", 1))),
        *((precision, 1, "ours", "stock") for precision in ("bf16 zero1", "fp32 zero1")),
        *((precision, 1, "moved and back", "stock") for precision in ("bf16 zero1", "fp32 zero1")),
    ],
)
def test_wrapped_checkpoints_load_in_stock_and_back(
    tmp_path: Path, writer: str, reader: str, precision: str, replicas: int
) -> None:
    case = Case(stages=2, replicas=replicas, clip=0.0, groups="two", scheduler=True, precision=precision)
    saved = run(case.ranks, save_as, writer, case, str(tmp_path))
    loaded = run(case.ranks, load_as, reader, case, str(tmp_path))
    assert [found[:2] for found in loaded] == saved


# -- stock DeepSpeed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("writer", "reader"), [("stock", "ours"), ("ours", "stock"), ("moved and back", "stock")])
def test_checkpoints_load_in_stock_and_back(tmp_path: Path, writer: str, reader: str, tied: bool) -> None:
    case = Case(stages=2, tied=tied, clip=0.0, groups="two", scheduler=True)
    saved = run(2, save_as, writer, case, str(tmp_path))
    loaded = run(2, load_as, reader, case, str(tmp_path))
    assert [found[:2] for found in loaded] == saved
    assert [found[2:] for found in loaded] == [(2 * STEPS, 4)] * 2


def plain(value: Any) -> Any:
    """Return the content of a file, with tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, raw(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_our_files_hold_what_stock_writes(tmp_path: Path) -> None:
    case = Case(stages=2, clip=0.0)
    for which in ("stock", "ours"):
        run(2, save_as, which, case, str(tmp_path / which))
    names = {which: _files(tmp_path / which) for which in ("stock", "ours")}
    assert names["stock"] == {name for name in names["ours"] if "dynmo" not in name}
    for name in names["stock"] - {"latest"}:
        stock, ours = (torch.load(tmp_path / which / name, weights_only=True) for which in ("stock", "ours"))
        if "ds_config" in stock:
            stock.pop("ds_config"), ours.pop("ds_config")
        assert plain(stock) == plain(ours), name


def test_a_stock_checkpoint_loads_after_layers_have_moved(tmp_path: Path) -> None:
    """Our engine goes back to the partition that its module was built with, at which DeepSpeed saved."""
    case = Case(stages=2, clip=0.0)
    saved = run(2, save_as, "stock", case, str(tmp_path))
    loaded = run(2, load_as, "ours", replace(case, start=(0, 1, 8)), str(tmp_path))
    assert [found[:2] for found in loaded] == saved


def save_at(case: Case, folder: str, method: str) -> list[int]:
    """Save in DeepSpeed's engine at the partition that its ``method`` chooses, and return that."""
    module = module_of(case, partition_method=method)
    groups = parameter_groups(module, case.groups)
    stock = deepspeed.initialize(model=module, model_parameters=groups, config=config(replace(case, dynmo=None)))[0]
    train_on(stock, 0)
    stock.save_checkpoint(folder)
    return [int(part) for part in module.parts]


def refused(case: Case, folder: str) -> tuple[str, bool]:
    """Return why all of it is refused, and whether the engine is then as it was; load weights alone."""
    engine = build(case)
    found = attempt(engine, folder)
    assert engine.load_checkpoint(folder, load_module_only=True)[0] is not None
    return found


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp32", r"has parameter groups of \[.*\] parameters, expected .*: those of stage 0 under .*\[0, 4, 8\]"),
        (
            "bf16",
            r"fp32 weights of layer 4's .* are not its weights: it was saved at another partition than \[0, 4",
        ),
        ("bf16 zero1", r"has parameter groups of \[.*\] parameters, expected .*: those of stage 0 under .*\[0, 4, 8\]"),
    ],
)
def test_of_a_stock_checkpoint_of_another_partition_only_weights_load(
    tmp_path: Path, precision: str, message: str
) -> None:
    case = Case(stages=2, clip=0.0, precision=precision)
    assert run(2, save_at, case, str(tmp_path), "type:Embedding|Head")[0] == [0, 7, 8]
    for found, unchanged in run(2, refused, case, str(tmp_path)):
        assert re.search(message, found) and unchanged, found


def test_of_a_stock_checkpoint_of_other_stages_or_replicas_only_weights_load(tmp_path: Path) -> None:
    case = Case(stages=1, clip=0.0, precision="bf16 zero1")
    run(1, save_as, "stock", case, str(tmp_path))
    for other, message in (
        (replace(case, stages=2), "stage files ['mp_rank_00_model_states.pt'], expected ['mp_rank_00_model_states.pt'"),
        (replace(case, replicas=2), "mp_rank_00_model_states.pt: written with 1 data-parallel replicas, expected 2"),
    ):
        for found, unchanged in run(2, refused, other, str(tmp_path)):
            assert f"{tmp_path}/global_step{STEPS}: has no folder dynmo/, so it is read as stock DeepSpeed's" in found
            assert message in found and unchanged, found


def rates_of_groups(initialize: Any, case: Case, folder: str) -> list[float]:
    """Save in DeepSpeed's engine after the rate of its last group changed, or load; return the rates of its groups."""
    module = module_of(case)
    parts = {0: "embedding", case.num_layers - 1: "head"}
    of_part: dict[str, list[Any]] = {"embedding": [], "others": [], "head": []}
    for name, parameter in module.named_parameters():
        of_part[parts.get(int(name.split(".")[0]), "others")].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in zip(of_part.values(), (0.1, 0.2, 0.3))
        if parameters
    ]
    dynmo = None if initialize is deepspeed.initialize else case.dynmo
    engine = initialize(model=module, model_parameters=groups, config=config(replace(case, dynmo=dynmo)))[0]
    if initialize is deepspeed.initialize:
        train_on(engine, 0)
        engine.optimizer.param_groups[-1]["lr"] = 0.007 + engine.global_rank
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return [group["lr"] for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_a_group_that_one_stage_alone_had_keeps_its_options(tmp_path: Path, precision: str) -> None:
    case = Case(clip=0.0, precision=precision)
    (embedding, others), (others_later, head) = run(2, rates_of_groups, deepspeed.initialize, case, str(tmp_path))
    ours = run(2, rates_of_groups, ds_dynmo.initialize, case, str(tmp_path))
    assert ours == [[embedding, others, head], [embedding, others_later, head]]


def reversed_groups(initialize: Any, case: Case, folder: str, frozen: int, **flags: bool) -> list[float]:
    """Train in DeepSpeed's engine with groups in an order of their own, or load and continue; return losses."""
    module = module_of(case)
    for parameter in module_layer(module, frozen):
        parameter.requires_grad_(False)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine = initialize(model=module, model_parameters=parameters[::-1], config=config(case))[0]
    if initialize is deepspeed.initialize:
        train_on(engine, 0)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder, **flags)
        assert engine.global_steps == STEPS
    return train_on(engine, STEPS)


def module_layer(module: Any, index: int) -> list[Any]:
    return [parameter for name, parameter in module.named_parameters() if name.startswith(f"{index}.")]


def test_under_zero_the_names_in_the_files_say_what_a_group_has(tmp_path: Path) -> None:
    """Groups may have any order; a model that trains other parameters is refused."""
    case = Case(clip=0.0, precision="bf16 zero1")
    stock = run(2, reversed_groups, deepspeed.initialize, replace(case, dynmo=None), str(tmp_path), 2)
    assert run(2, reversed_groups, ds_dynmo.initialize, case, str(tmp_path), 2) == stock
    with pytest.raises(RankError, match=r"CheckpointError.*has 1\.\S* in the parameter group of .*: those of stage 0"):
        run(2, reversed_groups, ds_dynmo.initialize, case, str(tmp_path), 1)
    run(2, partial(reversed_groups, load_optimizer_states=False), ds_dynmo.initialize, case, str(tmp_path), 3)


def test_without_zero_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    """No file names their parameters."""
    case = Case(clip=0.0, precision="bf16")
    run(2, reversed_groups, deepspeed.initialize, replace(case, dynmo=None), str(tmp_path), 2)
    with pytest.raises(RankError, match=r"CheckpointError.*are not its weights: .*or its parameter groups list"):
        run(2, reversed_groups, ds_dynmo.initialize, case, str(tmp_path), 2)


def _save_without_block(case: Case, folder: str) -> tuple[bool, int]:
    engine = build(case)
    engine.train_batch(batches(engine))
    engine.save_checkpoint(folder)
    engine = build(replace(case, micro_batches=1))
    return engine.load_checkpoint(folder)[0] is not None, engine.micro_batches_taken


def test_without_a_block_the_checkpoint_is_deepspeeds(tmp_path: Path) -> None:
    case = Case(stages=2, clip=0.0, dynmo=None)
    assert run(2, _save_without_block, case, str(tmp_path)) == [(True, case.micro_batches)] * 2
    assert not list(tmp_path.rglob("dynmo"))
