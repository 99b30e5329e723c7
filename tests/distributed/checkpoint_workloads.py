"""Runs for test_checkpoint.py; every function here runs on a rank."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_dynmo
from ds_dynmo.engine.checkpoint import folder as folders
from tests.distributed import workloads
from tests.distributed.workloads import WIDTH, Block, Case, Embedding, Head, batches, build, seeded, state

STEPS = 3  # before a checkpoint, and after it


def data_after(engine: Any, steps: int) -> Iterator[Any]:
    """The micro-batches that follow ``steps`` batches."""
    return islice(batches(engine), steps * engine.micro_batches, None)


def outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "state": state(engine),
        "partition": engine.partition,
        "steps": (engine.global_steps, engine.global_samples, engine.module.micro_offset, engine.skipped_steps),
        "lr": engine.get_lr(),
        "random": (torch.rand(1).item(), random.random(), np.random.rand()),
        "settled": engine._controller.state_dict()["_settled"],
        "replica": engine.grid.get_data_parallel_id(),
    }


def train_on(engine: Any, start: int, steps: int = STEPS) -> list[float]:
    data = data_after(engine, start)
    return [engine.train_batch(data).item() for _ in range(steps)]


Make = Callable[[Case], Any]


def save_and_go_on(
    case: Case, folder: str, move: Sequence[int] | None = None, make_layers: Make = workloads.layers
) -> dict[str, Any]:
    engine = build(case, make_layers)
    torch.manual_seed(7 + engine.global_rank), random.seed(7), np.random.seed(7)
    train_on(engine, 0)
    if move is not None:
        engine.rebalance(move)
    torch.rand(3), random.random(), np.random.rand(3)
    assert engine.save_checkpoint(folder, client_state={"epoch": 4, "best": [1.5]})
    return outcome(engine, train_on(engine, STEPS))


def load_and_go_on(
    case: Case, folder: str, trained: int = 0, make_layers: Make = workloads.layers, **flags: Any
) -> dict[str, Any]:
    """Load into an engine that has trained ``trained`` batches of its own."""
    engine = build(case, make_layers)
    train_on(engine, 50, trained)
    path, client = engine.load_checkpoint(folder, **flags)
    assert path is not None and os.path.isfile(path)
    found = outcome(engine, train_on(engine, STEPS))
    return {**found, "client": {name: client[name] for name in ("epoch", "best") if name in client}}


# -- stock DeepSpeed ----------------------------------------------------------------------------------


def stock_engine(case: Case, make_layers: Make = workloads.layers) -> Any:
    torch.manual_seed(0)
    module = PipelineModule(
        layers=make_layers(case),
        num_stages=case.stages,
        topology=case.topology,
        loss_fn=workloads.loss,
        partition_method="uniform",
    )
    return deepspeed.initialize(
        model=module,
        model_parameters=workloads.parameter_groups(module, case.groups),
        config=workloads.config(replace(case, dynmo=None)),
    )[0]


def stock_state(engine: Any) -> dict[str, bytes]:
    """Weights by DeepSpeed's names, and moments in the optimizer's order."""
    found = {name: workloads.raw(parameter) for name, parameter in engine.module.named_parameters()}
    groups = engine.basic_optimizer.param_groups
    for number, parameter in enumerate(parameter for group in groups for parameter in group["params"]):
        if engine.optimizer is not engine.basic_optimizer:
            found[f"{number}/master"] = workloads.raw(parameter)
        for what, value in engine.basic_optimizer.state[parameter].items():
            found[f"{number}/{what}"] = workloads.raw(value)
    return found


def pipeline(which: str, case: Case, make_layers: Make) -> Any:
    return stock_engine(case, make_layers) if which == "stock" else build(case, make_layers)


def save_as(
    which: str, case: Case, folder: str, make_layers: Make = workloads.layers
) -> tuple[list[float], dict[str, bytes]]:
    engine = pipeline(which, case, make_layers)
    train_on(engine, 0)
    if which == "moved and back":
        at_first = engine.partition
        engine.rebalance([0, 1, at_first[-1]])
        engine.rebalance(at_first)
    engine.save_checkpoint(folder, client_state={"epoch": 4})
    return train_on(engine, STEPS), stock_state(engine)


def load_as(
    which: str, case: Case, folder: str, make_layers: Make = workloads.layers
) -> tuple[list[float], dict[str, bytes], int, int]:
    engine = pipeline(which, case, make_layers)
    _, client = engine.load_checkpoint(folder)
    return train_on(engine, STEPS), stock_state(engine), engine.global_steps, client["epoch"]


def load_stock_weights(case: Case, folder: str, make_layers: Make = workloads.layers) -> list[float]:
    engine = build(case, make_layers)
    engine.load_checkpoint(folder, load_module_only=True)
    return [engine.eval_batch(batches(engine, seed=7)).item()]


# -- layers that change -------------------------------------------------------------------------------


class Changing(nn.Module):
    """Counts its batches, keeps a mask in a buffer and one in an attribute, and can be pruned and frozen."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH, 6), index))
        self.back = nn.Parameter(seeded((6, WIDTH), index + 50))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("total", torch.zeros(1))
        self.calls = 0
        self.history: list[Any] = []
        self.mask: torch.Tensor | None = None
        self.rate = 0.5
        self.function = lambda x: torch.tanh(x)  # cannot be pickled

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.total += hidden.detach().abs().mean()
        self.history = [*self.history, (self.calls, "x")][-3:]
        inner = self.function(hidden @ self.weight)
        if self.mask is not None:
            inner = inner * self.mask
        if "gain" in self._parameters:
            inner = inner * self.gain
        scale = 1 + 0.01 * (self.seen + self.total + self.calls + len(self.history))
        return hidden + self.rate * scale * (inner @ self.back)


def narrow(layer: Any, optimizer: Any) -> None:
    """Half the inner width: two smaller parameters, in the same group, without state."""
    for name, kept in (("weight", layer.weight[:, :3]), ("back", layer.back[:3])):
        old, new = getattr(layer, name), nn.Parameter(kept.detach().clone())
        setattr(layer, name, new)
        optimizer.state.pop(old, None)
        for group in optimizer.param_groups:
            group["params"] = [new if member is old else member for member in group["params"]]


class Tapered(nn.Module):
    """Can be narrowed and weakened, and counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded((WIDTH, 6), 1))
        self.back = nn.Parameter(seeded((6, WIDTH), 2))
        self.factor = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.factor * torch.tanh(hidden @ self.weight) @ self.back


def tied_tapered(case: Case) -> list[Any]:
    tied = [TiedLayerSpec("t", Tapered, tied_weight_attr=["weight", "back"]) for _ in range(2)]
    return [LayerSpec(Embedding, 1), tied[0], LayerSpec(Block, 2), tied[1], LayerSpec(Head, 2)]


def save_narrowed_tie(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, tied_tapered)
    train_on(engine, 0)
    for layer in engine._layers.modules().values():
        if isinstance(layer, Tapered):
            narrow(layer, engine.basic_optimizer)
            layer.factor = 0.5
    engine.model_changed("narrower")
    engine._controller.decided(moved=False)
    engine.save_checkpoint(folder)
    return outcome(engine, train_on(engine, STEPS))


def changing_layers(case: Case) -> list[Any]:
    return [
        LayerSpec(Embedding, 1),
        *[LayerSpec(Changing, i) for i in range(5)],
        nn.LayerNorm(WIDTH),
        LayerSpec(Head, 2),
    ]


def all_wrapped_ties(case: Case) -> list[Any]:
    """Every use of the tied layer has a function around it, so DeepSpeed writes no file of it."""

    def look_up(layer: Embedding, tokens: torch.Tensor) -> torch.Tensor:
        return layer(tokens)

    tied = [
        TiedLayerSpec("e", Embedding, 1, forward_fn=how, tied_weight_attr="weight")
        for how in (look_up, workloads.project)
    ]
    return [tied[0], *[LayerSpec(Block, index) for index in range(3)], tied[1]]


def tie_without_functions(case: Case) -> list[Any]:
    return workloads.layers_tied_in_the_middle(case)


def change(engine: Any) -> None:
    layers = engine._layers.modules()
    if 1 in layers:
        layers[1].gain = nn.Parameter(torch.full((6,), 0.9))
        engine.basic_optimizer.param_groups[1]["params"].append(layers[1].gain)
    if 2 in layers:
        narrow(layers[2], engine.basic_optimizer)
        layers[2].mask = torch.tensor([1.0, 0.0, 1.0])
    if 3 in layers:
        layers[3].weight.requires_grad_(False)
        layers[3].weight.grad = None
    if 4 in layers:
        layers[4].register_buffer("late", torch.arange(3.0))
    engine.model_changed("pruned")
    engine._controller.decided(moved=False)


def kept(engine: Any) -> dict[str, Any]:
    """What the changing layers hold beyond parameters."""
    found = {}
    for index, layer in engine._layers.modules().items():
        if isinstance(layer, Changing):
            found[index] = (
                layer.seen.item(), layer.total.item(), layer.calls, layer.history, layer.rate,
                None if layer.mask is None else layer.mask.tolist(), layer.weight.requires_grad,
                layer.late.tolist() if hasattr(layer, "late") else None,
                sorted(layer._non_persistent_buffers_set),
            )  # fmt: skip
    return found


def save_changed(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case, changing_layers)
    train_on(engine, 0)
    change(engine)
    train_on(engine, STEPS, 1)
    engine.save_checkpoint(folder)
    before = kept(engine)
    return {**outcome(engine, train_on(engine, STEPS + 1)), "kept": before}


def save_frozen(case: Case, folder: str) -> dict[str, Any]:
    """Leading layers are frozen from the start, and left out of the checkpoint."""
    engine = build(case)
    workloads.freeze(engine, 2)
    engine.model_changed("frozen")
    engine._controller.decided(moved=False)
    train_on(engine, 0)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    return outcome(engine, train_on(engine, STEPS))


def save_in_parallel(case: Case, folder: str) -> dict[str, Any]:
    """Replicas share the writing of layers."""
    engine = build(case)
    engine.module.checkpoint_parallel_write_pipeline = True
    train_on(engine, 0)
    engine.save_checkpoint(folder)
    return outcome(engine, train_on(engine, STEPS))


def load_changed(case: Case, folder: str, rate: float, trained: int) -> dict[str, Any]:
    def layers(case: Case) -> list[Any]:
        made = changing_layers(case)
        return made if rate == 0.5 else [Faster(i - 1) if 0 < i < 6 else layer for i, layer in enumerate(made)]

    engine = build(case, layers)
    train_on(engine, 50, trained)
    engine.load_checkpoint(folder)
    before = kept(engine)
    return {**outcome(engine, train_on(engine, STEPS + 1)), "kept": before}


class Faster(Changing):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rate = 0.25


# -- damage -------------------------------------------------------------------------------------------


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (os.path.join(self.folder, "evil"),)


def damaged(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "garbage":
        path.write_bytes(b"\0" * path.stat().st_size)
    elif how == "evil":
        torch.save({"module": None, "evil": Evil(str(path.parent))}, path)
    else:
        shutil.copy(how, path)


def refuse(
    case: Case, folder: str, copies: str, hurts: list[tuple[str, str]], make_layers: Make = workloads.layers
) -> list[tuple[str, bool]]:
    """For each (file, damage) the message of the error, and whether the engine is what it was; then train on."""
    engine = build(case, make_layers)
    train_on(engine, 0, 2)
    found = []
    for number, (file, how) in enumerate(hurts):
        copy = Path(copies, str(number))
        if engine.global_rank == 0:
            shutil.copytree(folder, copy)
            damaged(copy / file, how)
        engine._comm.gather_objects(None)
        found.append(attempt(engine, copies, tag=str(number)))
    return [*found, (str(train_on(engine, 2)), True)]


def attempt(engine: Any, folder: str, **flags: Any) -> tuple[str, bool]:
    """The message of the error that loading raises, and whether the engine is what it was."""
    before = (state(engine), engine.partition, engine.global_steps, kept(engine))
    message = ""
    try:
        engine.load_checkpoint(folder, **flags)
    except ds_dynmo.CheckpointError as error:
        message = str(error)
    return message, before == (state(engine), engine.partition, engine.global_steps, kept(engine))


def train_undisturbed(case: Case, make_layers: Make = workloads.layers) -> str:
    engine = build(case, make_layers)
    train_on(engine, 0, 2)
    return str(train_on(engine, 2))


# -- kills --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As a kill: nothing is tidied up."""


STEPS_OF_WRITING = [
    (os, "rename"), (os, "replace"), (os, "makedirs"), (os, "rmdir"), (os, "unlink"), (os, "link"), (os, "fsync"),
    (torch, "save"), (shutil, "copytree"), (shutil, "rmtree"),
]  # fmt: skip


class Countdown:
    """Kills at the n-th step of writing, counted over all of them."""

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


def kill_everywhere(folder: str, tags: list[str], every: int) -> list[tuple[int, str]]:
    """Kill the writing of the last of ``tags`` at ``every`` so many of its steps; what is wrong afterwards, by step."""
    engine = build(Case(stages=1, blocks=1))
    wrong, step, survived = [], 0, False
    while not survived:
        target = os.path.join(folder, str(step))
        saved = {}
        for tag in tags[:-1]:
            train_on(engine, 0, 1)
            engine.save_checkpoint(target, tag=tag)
            saved[tag] = (engine.global_steps, state(engine))
        train_on(engine, 0, 1)
        new = (engine.global_steps, state(engine))
        with Countdown(step, killed):
            try:
                engine.save_checkpoint(target, tag=tags[-1])
                survived = True
            except Killed:
                pass
        if problem := whole(engine, target, saved, tags[-1], new):
            wrong.append((step, problem))
        train_on(engine, 0, 1)
        newest = (engine.global_steps, state(engine))
        engine.save_checkpoint(target, tag=tags[-1])  # and the next one tidies up
        engine.load_checkpoint(target)
        if (engine.global_steps, state(engine)) != newest:
            wrong.append((step, "the next checkpoint was lost"))
        names = {name for name in os.listdir(target)}
        if folders.read_latest(target) != tags[-1] or names != {*tags, "latest"}:
            wrong.append((step, f"left {names}"))
        step += every
        shutil.rmtree(target)
    return [*wrong, (step, "steps")]


def whole(engine: Any, folder: str, saved: dict[str, Any], tag: str, new: Any) -> str:
    """What is wrong with the checkpoints after a kill while ``tag`` was written over those of ``saved``."""
    last = list(saved)[-1]
    latest = folders.read_latest(folder)
    if latest is None or not os.path.isdir(os.path.join(folder, latest)):
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


def save_twice_and_die(case: Case, folder: str, rank: int, step: int) -> None:
    engine = build(case)
    train_on(engine, 0)
    engine.save_checkpoint(folder, tag="t")
    train_on(engine, STEPS)
    with Countdown(step if engine.global_rank == rank else 10**6, lambda: os._exit(1)):
        engine.save_checkpoint(folder, tag="t")


def save_fails(case: Case, folder: str) -> tuple[str, dict[str, Any]]:
    """One rank's disk is full; then a client state that could not be loaded again."""
    engine = build(case)
    train_on(engine, 0)
    engine.save_checkpoint(folder, tag="good")
    messages = ""
    original = torch.save

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    if engine.global_rank == 1:
        torch.save = full
    for client in ({}, {"evil": Evil(folder)}):
        try:
            engine.save_checkpoint(folder, tag="bad", client_state=client)
        except ds_dynmo.CheckpointError as error:
            messages += str(error)
        torch.save = original
    assert sorted(os.listdir(folder)) == ["good", "latest"], os.listdir(folder)
    found = outcome(engine, train_on(engine, STEPS))
    return messages + failure_at_the_end(engine, folder), found


def failure_at_the_end(engine: Any, folder: str) -> str:
    """The message where one rank fails after everything that ranks do together."""
    from ds_dynmo.engine.checkpoint import applying

    if engine.global_rank == 1:
        applying.restore_random_states = lambda states: [][0]
    try:
        engine.load_checkpoint(folder, tag="good")
    except ds_dynmo.CheckpointError as error:
        return str(error)
    return ""


# -- the rest -----------------------------------------------------------------------------------------


def what_is_read(case: Case, folder: str, make_layers: Make = workloads.layers) -> list[str]:
    from ds_dynmo.engine.checkpoint import reading

    engine, read = build(case, make_layers), []
    original = reading.safe_load

    def watch(path: str, **kwargs: Any) -> Any:
        read.append(os.path.relpath(path, os.path.join(folder, f"global_step{STEPS}")))
        return original(path, **kwargs)

    reading.safe_load = watch
    engine.load_checkpoint(folder)
    return sorted(read)


def parts(case: Case, folder: str, **flags: Any) -> dict[str, Any]:
    """Which parts of the engine are the saved ones."""
    engine = build(case)
    saved = build(case)
    saved.load_checkpoint(folder)
    engine.load_checkpoint(folder, **flags)
    weights = lambda e: {n: v for n, v in state(e).items() if "/" not in n}  # noqa: E731
    moments = lambda e: {n: v for n, v in state(e).items() if "/exp" in n}  # noqa: E731
    return {
        "weights": weights(engine) == weights(saved),
        "moments": moments(engine) == moments(saved),
        "steps": engine.global_steps,
        "scheduler": engine.lr_scheduler.last_batch_iteration,
    }


def misuse(case: Case, folder: str) -> list[str]:
    engine = build(case)
    found = []
    for call in (
        lambda: engine.save_checkpoint(folder, tag="a/b"),
        lambda: engine.save_checkpoint(folder, tag=f"rank{engine.global_rank}"),
        lambda: engine.load_checkpoint(folder, tag="nowhere"),
        lambda: engine.load_checkpoint(folder, tag=f"rank{engine.global_rank}"),
        lambda: engine.load_checkpoint(folder, custom_load_fn=print),
        lambda: engine.load_checkpoint(folder) == (None, None),
    ):
        try:
            found.append(str(call()))
        except (ds_dynmo.ConfigError, ds_dynmo.CheckpointError) as error:
            found.append(str(error))
    return found


# -- wrapped optimizers -------------------------------------------------------------------------------


def save_then_thaw(
    case: Case, folder: str, prefix: int, move: Sequence[int], make_layers: Make = workloads.layers
) -> dict[str, Any]:
    engine = build(case, make_layers)
    train_on(engine, 0)
    workloads.freeze(engine, prefix)
    engine.model_changed("frozen")
    engine._controller.decided(moved=False)
    train_on(engine, STEPS, 1)
    engine.rebalance(move)
    engine.save_checkpoint(folder)
    return thaw_and_go_on(engine)


def load_frozen(case: Case, folder: str, make_layers: Make = workloads.layers) -> dict[str, Any]:
    engine = build(case, make_layers)
    engine.load_checkpoint(folder)
    return thaw_and_go_on(engine)


def thaw_and_go_on(engine: Any) -> dict[str, Any]:
    losses = train_on(engine, STEPS + 1, 1)
    workloads.freeze(engine, 0)
    engine.model_changed("thawed")
    engine._controller.decided(moved=False)
    losses += train_on(engine, STEPS + 2, 2)
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id()}


def state_after_loading(case: Case, folder: str, save: bool) -> dict[str, Any]:
    engine = build(case)
    if save:
        train_on(engine, 0)
        engine.rebalance([0, 1, 8])
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return {"state": state(engine), "replica": engine.grid.get_data_parallel_id()}


def weights_onto_moments(case: Case, folder: str) -> dict[str, Any]:
    """Load the weights of :func:`save_narrowed_tie`, and nothing else, into an engine that has trained."""
    engine = build(case, tied_tapered)
    train_on(engine, 50)
    before = state(engine)
    engine.load_checkpoint(folder, load_module_only=True)
    found = {"before": before, "after": state(engine), "replica": engine.grid.get_data_parallel_id()}
    return {
        **found,
        "dtypes": {parameter.dtype for parameter in engine.module.parameters()},
        "losses": train_on(engine, 0),
    }


def other_precisions(folder: str, ways: Sequence[tuple[str, str]]) -> list[tuple[set[Any], Any, list[float]]]:
    """Weights alone into an engine of another precision: dtypes, that of a buffer that was given another, losses."""

    def make_layers(case: Case) -> list[Any]:
        made = changing_layers(case)
        return [made[0], LayerSpec(workloads.FrozenBlock, 1), *made[2:]]

    found = []
    for number, (saved, loaded) in enumerate(ways):
        engine = build(Case(stages=2, precision=saved), make_layers)
        layer = engine._layers.modules().get(2)
        if layer is not None:
            layer.register_buffer("exact", torch.ones(2, dtype=torch.float64))
        train_on(engine, 0, 1)
        engine.save_checkpoint(folder, tag=str(number))
        engine = build(Case(stages=2, precision=loaded), make_layers)
        engine.load_checkpoint(folder, tag=str(number), load_module_only=True)
        tensors = dict([*engine.module.named_parameters(), *engine.module.named_buffers()])
        exact = next((tensors.pop(name).dtype for name in list(tensors) if "exact" in name), None)
        found.append(({tensor.dtype for tensor in tensors.values()}, exact, train_on(engine, 1)))
    return found


def stock_with_an_empty_group(case: Case, folder: str) -> list[list[float]]:
    """Losses of DeepSpeed's engine after it wrote a checkpoint, and of ours that goes on from it."""

    def engine_of(initialize: Any, case: Case) -> Any:
        torch.manual_seed(0)
        module = PipelineModule(
            layers=workloads.layers(case), num_stages=case.stages, loss_fn=workloads.loss, partition_method="uniform"
        )
        groups = [{"params": [], "weight_decay": 0.3}, {"params": list(module.parameters()), "weight_decay": 0.1}]
        return initialize(model=module, model_parameters=groups, config=workloads.config(case))[0]

    stock = engine_of(deepspeed.initialize, replace(case, dynmo=None))
    train_on(stock, 0)
    stock.save_checkpoint(folder)
    ours = engine_of(ds_dynmo.initialize, case)
    ours.load_checkpoint(folder)
    return [train_on(engine, STEPS) for engine in (stock, ours)]


def load_weights_only(case: Case, folder: str) -> dict[str, Any]:
    engine = build(case)
    train_on(engine, 50, 1)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    masters = {key: value for key, value in state(engine)["shards"].items() if key.endswith("/master")}
    weights = {key: value for key, value in state(engine).items() if isinstance(value, bytes) and "/" not in key}
    return {"masters": masters, "weights": weights, "losses": train_on(engine, STEPS, 2)}


def files_hold_no_placeholder(case: Case, folder: str) -> list[str]:
    """Train where stages lack groups, and look for traces in what DeepSpeed wrote."""
    engine = build(case)
    train_on(engine, 0)
    engine.save_checkpoint(folder, tag="now")
    if engine.global_rank:
        return []
    found = []
    for path in sorted(Path(folder, "now").glob("*.pt")):
        content = torch.load(path, weights_only=False)
        groups = content.get("optimizer_state_dict", {}).get("single_partition_of_fp32_groups", [])
        sizes = [group.numel() for group in groups]
        if "placeholder" in str(content) or 1 in sizes or 2 in sizes:
            found.append(path.name)
    return found


def save_for_conversion(case: Case, folder: str) -> dict[str, Any]:
    """Weights and moments in fp32 by DeepSpeed's names, at a partition that layers were moved to."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = build(case)
    train_on(engine, 0)
    engine.rebalance([0, 2, 8])
    engine.save_checkpoint(folder, tag="now")
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f"{name}/fp32"] = workloads.raw(safe_get_full_fp32_param(parameter))
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{kind}"] = workloads.raw(safe_get_full_optimizer_state(parameter, kind))
    return found
