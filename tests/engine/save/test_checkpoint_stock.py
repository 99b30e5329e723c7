"""Checkpoints that DeepSpeed's own engine writes and reads."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

import ds_dynmo
from tests.support.checkpoints import STEPS, attempt, exchange_with_stock, plain, stock_state, train_on
from tests.support.configs import Case, config, parameter_groups
from tests.support.harness import run, run_each
from tests.support.models import layers, module_of
from tests.support.sliced_layers import SLICES, sliced_layers
from tests.support.training import batches, build, gather, raw

pytestmark = pytest.mark.ranks
NIGHTLY = pytest.mark.nightly

# -- either's checkpoints load in the other -------------------------------------------------------------


def check_files(folder: Path) -> None:
    """Check that our files, saved after the same batches, hold what those of stock DeepSpeed hold."""
    names = {
        which: {str(path.relative_to(folder / which)) for path in (folder / which).rglob("*") if path.is_file()}
        for which in ("stock", "ours")
    }
    assert names["stock"] == {name for name in names["ours"] if "dynmo" not in name}
    for name in names["stock"] - {"latest"}:
        stock, ours = (torch.load(folder / which / name, weights_only=True) for which in ("stock", "ours"))
        if "ds_config" in stock:
            stock.pop("ds_config"), ours.pop("ds_config")
        assert plain(stock) == plain(ours), name


def test_checkpoints_load_in_stock_and_back_and_hold_the_same(tmp_path: Path) -> None:
    """Also where layers have moved and come back, and where they are elsewhere when they are loaded."""
    case = Case(clip=0.0, groups="two", scheduler=True, micro_batches=2)
    cases = {
        "fp32": replace(case, tied=True),
        "bf16": replace(case, precision="bf16"),
        "bf16 zero1": replace(case, precision="bf16 zero1"),
    }
    calls = [(case, f"{tmp_path}/{name}") for name, case in cases.items()]
    for name, ranks in zip(cases, run_each(2, exchange_with_stock, *calls), strict=True):
        for ways in ranks:
            for way, (expected, loaded) in ways.items():
                assert loaded == expected, (name, way)
            assert len(ways) == (1 if name == "bf16" else 3)
    check_files(tmp_path / "fp32")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "replicas", "tied"), [("fp32", 1, False), ("bf16 zero1", 2, False), ("fp32 zero1", 1, True)]
)
def test_so_do_others(tmp_path: Path, precision: str, replicas: int, tied: bool) -> None:
    case = Case(clip=0.0, groups="two", scheduler=True, precision=precision, replicas=replicas, tied=tied)
    for ways in run(case.ranks, exchange_with_stock, case, str(tmp_path)):
        for way, (expected, loaded) in ways.items():
            assert loaded == expected, way
        assert len(ways) == 3


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


# -- universal checkpoints ------------------------------------------------------------------------------

PATTERNS = {
    "tp_replicated_parameter_patterns": [r"\d+\.norm\..*", r"\d+\.bias", r"(\d+|tied_modules\.embedding)\.weight"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down"],
}


def convert(case: Case, folder: str, make_layers: Any = layers) -> Any:
    """Save after a move, let DeepSpeed convert that, and compare weights and moments with what this rank has."""
    engine = build(case, make_layers)
    train_on(engine, 0)
    engine.rebalance([0, 2, engine.partition[-1]])
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "make_layers"),
    [
        (Case(replicas=2, precision="bf16", tied=True, groups="two"), layers),
        (Case(replicas=2, precision="bf16 zero1", groups="two"), layers),
        (Case(slices=2, blocks=3, precision="bf16 zero1", tied=True), sliced_layers),
    ],
    ids=["bf16", "bf16 zero1", "slices, by the patterns in the client state"],
)
def test_deepspeed_converts_our_checkpoints_to_universal_ones(tmp_path: Path, case: Case, make_layers: Any) -> None:
    run(case.ranks, convert_alone, case, str(tmp_path), make_layers)


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


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=NIGHTLY)])
def test_a_universal_checkpoint_goes_on_by_way_of_stock_deepspeed(tmp_path: Path, tied: bool) -> None:
    case = Case(stages=2, precision="bf16 zero1", clip=0.0, tied=tied, scheduler=True)
    for (message, unchanged), (saved, *loaded) in run(2, convert_and_go_on, case, str(tmp_path)):
        assert 'universal: a universal checkpoint; load it once without the "dynmo" section' in message and unchanged
        assert loaded == [saved, saved]


# -- stock checkpoints at another layout, and of other groups ---------------------------------------------


def save_at(case: Case, folder: str, method: str) -> list[int]:
    """Save in DeepSpeed's engine at the partition that its ``method`` chooses, and return that."""
    module = module_of(case, partition_method=method)
    groups = parameter_groups(module, case.groups)
    stock = deepspeed.initialize(model=module, model_parameters=groups, config=config(replace(case, dynmo=None)))[0]
    train_on(stock, 0, 1)
    stock.save_checkpoint(folder)
    return [int(part) for part in module.parts]


def refused(case: Case, folder: str) -> tuple[str, bool]:
    """Return why all of it is refused, and whether the engine is then as it was; load weights alone."""
    engine = build(case)
    found = attempt(engine, folder)
    assert engine.load_checkpoint(folder, load_module_only=True)[0] is not None
    return found


def test_of_a_stock_checkpoint_of_another_layout_only_weights_load(tmp_path: Path) -> None:
    """Of another partition, other stages, or other replicas."""
    cases = {name: Case(clip=0.0, precision=name) for name in ("bf16", "bf16 zero1", "fp32")}
    calls = [(case, f"{tmp_path}/{name}", "type:Embedding|Head") for name, case in cases.items()]
    assert [ranks[0] for ranks in run_each(2, save_at, *calls)] == [[0, 7, 8]] * 3
    alone = replace(cases["bf16 zero1"], stages=1)
    run(1, save_at, alone, f"{tmp_path}/alone", "uniform")
    counts = r"has parameter groups of \[.*\] parameters, expected .*: those of stage 0 under .*\[0, 4, 8\]"
    folder = re.escape(f"{tmp_path}/alone/global_step1: has no folder dynmo/, so it is read as stock DeepSpeed's")
    stages = r"stage files \['mp_rank_00_model_states.pt'\], expected \['mp_rank_00_model_states.pt'"
    table = [
        (cases["bf16"], "bf16", r"88 elements, expected 120 at least: layer 4's up.weight under .*\[0, 4, 8\]"),
        (cases["bf16 zero1"], "bf16 zero1", counts),
        (cases["fp32"], "fp32", counts),
        (replace(alone, stages=2), "alone", f"{folder}.*{stages}"),
        (replace(alone, replicas=2), "alone", f"{folder}.*: written with 1 data-parallel replicas, expected 2"),
    ]
    found = run_each(2, refused, *((case, f"{tmp_path}/{name}") for case, name, _ in table))
    for ranks, (case, _, message) in zip(found, table, strict=True):
        for said, unchanged in ranks:
            assert re.search(message, said) and unchanged, (case, said)


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
        train_on(engine, 0, 1)
        engine.optimizer.param_groups[-1]["lr"] = 0.007 + engine.global_rank
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return [group["lr"] for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("precision", ["bf16 zero1", "fp32"])  # each kind of state has its own importer
def test_a_group_that_one_stage_alone_had_keeps_its_options(tmp_path: Path, precision: str) -> None:
    case = Case(clip=0.0, precision=precision)
    (embedding, others), (others_later, head) = run(2, rates_of_groups, deepspeed.initialize, case, str(tmp_path))
    ours = run(2, rates_of_groups, ds_dynmo.initialize, case, str(tmp_path))
    assert ours == [[embedding, others, head], [embedding, others_later, head]]


def reversed_groups(initialize: Any, case: Case, frozen: int) -> Any:
    """Build an engine with parameters in an order of their own, of which those of a layer are frozen."""
    module = module_of(case)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(f"{frozen}."))
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return initialize(model=module, model_parameters=parameters[::-1], config=config(case))[0]


def load_reversed_groups(case: Case, folder: str) -> tuple[list[float], list[str], list[Any]]:
    """Save in DeepSpeed's engine with layer 2 frozen. Load in ours: with it frozen, with others frozen.

    Returns:
        Losses after the save; errors of the loads of everything, and our engines.
    """
    stock = reversed_groups(deepspeed.initialize, replace(case, dynmo=None), 2)
    train_on(stock, 0, 2)
    stock.save_checkpoint(folder)
    ours = [reversed_groups(ds_dynmo.initialize, case, frozen) for frozen in (2, 1)]
    return train_on(stock, 2, 2), [attempt(engine, folder)[0] for engine in ours], ours


def under_zero(case: Case, folder: str) -> tuple[list[float], list[float], list[str]]:
    losses, errors, (same, other) = load_reversed_groups(case, folder)
    assert (
        other.load_checkpoint(folder, load_optimizer_states=False)[0] and other.global_steps == same.global_steps == 2
    )
    return losses, train_on(same, 2, 2), errors


def test_under_zero_the_names_in_the_files_say_what_a_group_has(tmp_path: Path) -> None:
    """Groups may have any order; a model that trains other parameters is refused, and has their weights alone."""
    case = Case(clip=0.0, precision="bf16 zero1")
    for stock, ours, (none, error) in run(2, under_zero, case, str(tmp_path)):
        assert ours == stock and not none
        assert re.search(r"has 1\.\S* in the parameter group of .*: those of stage 0", error)


def errors_without_zero(case: Case, folder: str) -> list[str]:
    return load_reversed_groups(case, folder)[1]


def test_without_zero_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    """No file names their parameters."""
    for error, _ in run(2, errors_without_zero, Case(clip=0.0, precision="bf16"), str(tmp_path)):
        assert re.search("are not its weights: .*or its parameter groups list", error)


def _save_without_block(case: Case, folder: str) -> tuple[bool, int]:
    engine = build(case)
    engine.train_batch(batches(engine))
    engine.save_checkpoint(folder)
    engine = build(replace(case, micro_batches=1))
    return engine.load_checkpoint(folder)[0] is not None, engine.micro_batches_taken


def test_without_a_block_the_checkpoint_is_deepspeeds(tmp_path: Path) -> None:
    case = Case(stages=1, clip=0.0, dynmo=None)
    assert run(1, _save_without_block, case, str(tmp_path)) == [(True, case.micro_batches)]
    assert not list(tmp_path.rglob("dynmo"))
