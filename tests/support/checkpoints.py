"""Save, load and continue, in our engine and in DeepSpeed's; every function runs on a rank."""

from __future__ import annotations

import os
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch

import ds_dynmo
from tests.support.configs import Case, client_optimizer, config, parameter_groups
from tests.support.models import Changing, layers, module_of
from tests.support.training import batches, build, drop_decision, freeze, gather, layers_of, raw, state, whole

STEPS = 3  # batches before a checkpoint, and after it


def skewed(stages: int, num_layers: int = 8) -> list[int]:
    """Return the partition with as many layers as possible on the last stage."""
    return [*range(stages), num_layers]


def check_same(saved: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    assert loaded[0]["losses"] == saved[0]["losses"]
    assert whole(loaded) == whole(saved)
    assert loaded[0]["steps"] == saved[0]["steps"]
    assert loaded[0]["lr"] == saved[0]["lr"]


def data_after(engine: Any, steps: int) -> Iterator[Any]:
    """Return the micro-batches that follow ``steps`` batches."""
    return islice(batches(engine), steps * engine.micro_batches, None)


def outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "state": state(engine),
        "partition": engine.partition,
        "steps": (engine.global_steps, engine.global_samples, engine.module.micro_offset, engine.skipped_steps),
        "lr": engine.get_lr(),
        "random": (torch.rand(1).item(), random.random(), np.random.rand()),
        "settled": engine.rebalancer.cycle.since_move,
        "replica": engine.grid.get_data_parallel_id(),
    }


def train_on(engine: Any, start: int, steps: int = STEPS) -> list[float]:
    data = data_after(engine, start)
    return [engine.train_batch(data).item() for _ in range(steps)]


Make = Callable[[Case], Any]


def save_and_continue(
    case: Case, folder: str, move: Sequence[int] | None = None, make_layers: Make = layers, steps: int = STEPS
) -> dict[str, Any]:
    engine = build(case, make_layers)
    torch.manual_seed(7 + engine.global_rank), random.seed(7), np.random.seed(7)
    train_on(engine, 0, steps)
    if move is not None:
        engine.rebalance(move)
    torch.rand(3), random.random(), np.random.rand(3)
    assert engine.save_checkpoint(folder, client_state={"epoch": 4, "best": [1.5]})
    return outcome(engine, train_on(engine, steps, steps))


def save_and_come_back(case: Case, folder: str, make_layers: Make = layers) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a run has after a save, and after it has gone on, has moved layers and has loaded that."""
    engine = build(case, make_layers)
    torch.manual_seed(7 + engine.global_rank), random.seed(7), np.random.seed(7)
    train_on(engine, 0, 1)
    built = engine.partition
    engine.rebalance([0, 1, built[-1]])
    train_on(engine, 1, 1)
    engine.save_checkpoint(folder)
    saved = outcome(engine, train_on(engine, 2, 2))
    engine.rebalance(built)
    train_on(engine, 50, 1)
    engine.load_checkpoint(folder)
    return saved, outcome(engine, train_on(engine, 2, 2))


def check_comes_back(case: Case, ranks: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    saved, loaded = (list(found) for found in zip(*ranks))
    check_same(saved, loaded)
    assert [found["random"] for found in loaded] == [found["random"] for found in saved], case
    assert loaded[0]["partition"] == saved[0]["partition"], case
    assert loaded[0]["settled"] == saved[0]["settled"] == 3, case  # batches since the move before the save


def load_and_continue(
    case: Case, folder: str, trained: int = 0, make_layers: Make = layers, steps: int = STEPS, **flags: Any
) -> dict[str, Any]:
    """Load into an engine that has already trained ``trained`` batches, and continue."""
    engine = build(case, make_layers)
    train_on(engine, 50, trained)
    path, client = engine.load_checkpoint(folder, **flags)
    assert path is not None and os.path.isfile(path)
    found = outcome(engine, train_on(engine, steps, steps))
    return {**found, "client": {name: client[name] for name in ("epoch", "best") if name in client}}


def stock_engine(case: Case, make_layers: Make = layers) -> Any:
    module = module_of(case, make_layers)
    parameters = parameter_groups(module, case.groups)
    return deepspeed.initialize(
        model=module,
        model_parameters=parameters,
        optimizer=client_optimizer(case, parameters),
        config=config(replace(case, dynmo=None)),
    )[0]


def stock_state(engine: Any) -> dict[str, bytes]:
    """Return weights by DeepSpeed's names, and moments in the optimizer's order."""
    found = {name: raw(parameter) for name, parameter in engine.module.named_parameters()}
    groups = engine.basic_optimizer.param_groups
    for number, parameter in enumerate(parameter for group in groups for parameter in group["params"]):
        if engine.optimizer is not engine.basic_optimizer:
            found[f"{number}/master"] = raw(parameter)
        for what, value in engine.basic_optimizer.state[parameter].items():
            found[f"{number}/{what}"] = raw(value)
    return found


def plain(value: Any) -> Any:
    """Return the content of a file, with tensors as dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, raw(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return (type(value), vars(value)) if hasattr(value, "__dict__") and not callable(value) else value


def pipeline(which: str, case: Case, make_layers: Make) -> Any:
    return stock_engine(case, make_layers) if which == "stock" else build(case, make_layers)


def save_as(which: str, case: Case, folder: str, make_layers: Make = layers) -> tuple[list[float], dict[str, bytes]]:
    engine = pipeline(which, case, make_layers)
    train_on(engine, 0)
    if which == "moved and back":
        at_first = engine.partition
        engine.rebalance([0, 1, at_first[-1]])
        engine.rebalance(at_first)
    engine.save_checkpoint(folder, client_state={"epoch": 4})
    return train_on(engine, STEPS), stock_state(engine)


def load_as(
    which: str, case: Case, folder: str, make_layers: Make = layers
) -> tuple[list[float], dict[str, bytes], int, int]:
    engine = pipeline(which, case, make_layers)
    _, client = engine.load_checkpoint(folder)
    return train_on(engine, STEPS), stock_state(engine), engine.global_steps, client["epoch"]


def exchange_with_stock(case: Case, folder: str, make_layers: Make = layers) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Save in our engine, also after layers have moved and come back, and in DeepSpeed's, and load each in the other.

    Of bf16 without ZeRO DeepSpeed 0.19.8 cannot load its own checkpoints: KeyError.

    Returns:
        By writer and reader, what follows in the writer and in the reader: losses, state, and steps and client state.
    """
    engines = {"ours": build(case, make_layers), "stock": stock_engine(case, make_layers)}
    for which, engine in engines.items():
        train_on(engine, 0, 2)
        engine.save_checkpoint(f"{folder}/{which}", client_state={"epoch": 4})
    ours, built = engines["ours"], engines["ours"].partition
    ours.rebalance([0, 1, built[-1]])
    ours.rebalance(built)
    ours.save_checkpoint(f"{folder}/moved and back", client_state={"epoch": 4})
    expected = {which: (train_on(engine, 2, 1), stock_state(engine)) for which, engine in engines.items()}
    ours.rebalance([0, 1, built[-1]])  # it goes back to the partition that its module was built with
    if case.slices is None:
        engines["stock"] = stock_engine(case, make_layers)
    ways = [("stock", "ours"), ("ours", "stock"), ("moved and back", "stock")]
    found = {}
    for writer, reader in ways[:1] if case.precision == "bf16" else ways:
        _, client = engines[reader].load_checkpoint(f"{folder}/{writer}")
        loaded = train_on(engines[reader], 2, 1), stock_state(engines[reader])
        about = engines[reader].global_steps, client["epoch"]
        found[writer, reader] = (*expected["stock" if writer == "stock" else "ours"], 3, 4), (*loaded, *about)
    return found


def load_stock_weights(case: Case, folder: str, make_layers: Make = layers) -> list[float]:
    engine = build(case, make_layers)
    engine.load_checkpoint(folder, load_module_only=True)
    return [engine.eval_batch(batches(engine, seed=7)).item()]


def kept(engine: Any) -> dict[str, Any]:
    """Return what the changing layers hold beside parameters."""
    found = {}
    for index, layer in layers_of(engine).items():
        if isinstance(layer, Changing):
            found[index] = (
                layer.seen.item(), layer.total.item(), layer.calls, layer.history, layer.rate,
                None if layer.mask is None else layer.mask.tolist(), layer.weight.requires_grad,
                layer.late.tolist() if hasattr(layer, "late") else None,
                sorted(layer._non_persistent_buffers_set),
            )  # fmt: skip
    return found


class Evil:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (os.path.join(self.folder, "evil"),)


def damaged(path: Path, how: str) -> None:
    if how == "missing":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "garbage":
        path.write_bytes(b"\0" * path.stat().st_size)
    elif how == "flipped":  # a bit of the largest tensor
        with zipfile.ZipFile(path) as archive:
            largest = max((i for i in archive.infolist() if "/data/" in i.filename), key=lambda info: info.file_size)
            values = archive.read(largest)
        raw = bytearray(path.read_bytes())
        raw[raw.index(values) + len(values) // 3] ^= 1
        path.write_bytes(raw)
    elif how == "evil":
        torch.save({"module": None, "evil": Evil(str(path.parent))}, path)
    else:
        shutil.copy(how, path)


def attempt(engine: Any, folder: str, **flags: Any) -> tuple[str, bool]:
    """Return the message of the error that loading raises, and whether the engine is unchanged."""
    before = (state(engine), engine.partition, engine.global_steps, kept(engine))
    message = ""
    try:
        engine.load_checkpoint(folder, **flags)
    except ds_dynmo.CheckpointError as error:
        message = str(error)
    return message, before == (state(engine), engine.partition, engine.global_steps, kept(engine))


def refuse(engine: Any, folder: str, hurts: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    """Return, per (file, damage) of a checkpoint, the message of the error and whether the engine is unchanged."""
    first, found = engine.global_rank == 0, []
    for file, how in hurts:
        path = Path(folder, file)
        if first:
            whole = path.read_bytes()
            damaged(path, how)
        gather(None)
        found.append(attempt(engine, os.path.dirname(folder), tag=os.path.basename(folder)))
        gather(None)
        if first:
            path.unlink(missing_ok=True)
            path.write_bytes(whole)
    gather(None)
    return found


def load_each(case: Case, folders: list[str]) -> list[bool]:
    """Return whether the checkpoint in each of these folders has the state after the first batch."""
    engine, found = build(case), []
    train_on(engine, 0, 1)
    saved = engine.global_steps, state(engine)
    for folder in folders:
        train_on(engine, 50, 1)
        engine.load_checkpoint(folder)
        found.append((engine.global_steps, state(engine)) == saved)
    return found


def files_read(case: Case, folder: str, make_layers: Make = layers) -> list[str]:
    from ds_dynmo.engine.save import saved_files

    engine, read = build(case, make_layers), []
    original = saved_files.safe_load

    def watch(path: str, **kwargs: Any) -> Any:
        read.append(os.path.relpath(path, folder).partition("/")[2])
        return original(path, **kwargs)

    saved_files.safe_load = watch
    engine.load_checkpoint(folder)
    return sorted(read)


def thaw_and_continue(engine: Any) -> dict[str, Any]:
    losses = train_on(engine, STEPS + 1, 1)
    freeze(engine, 0)
    engine.model_changed("thawed")
    drop_decision(engine)
    losses += train_on(engine, STEPS + 2, 2)
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


def save_then_thaw(
    case: Case, folder: str, prefix: int, move: Sequence[int], make_layers: Make = layers
) -> dict[str, Any]:
    engine = build(case, make_layers)
    train_on(engine, 0)
    freeze(engine, prefix)
    engine.model_changed("frozen")
    drop_decision(engine)
    train_on(engine, STEPS, 1)
    engine.rebalance(move)
    engine.save_checkpoint(folder)
    return thaw_and_continue(engine)


def load_frozen(case: Case, folder: str, make_layers: Make = layers) -> dict[str, Any]:
    engine = build(case, make_layers)
    engine.load_checkpoint(folder)
    return thaw_and_continue(engine)
