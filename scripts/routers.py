#!/usr/bin/env python3
"""Measure how unevenly routers that train load experts, replicas and layers, and how long that lasts.

    OMP_NUM_THREADS=1 python scripts/routers.py --routing none --json none.json
    python scripts/routers.py --show none.json aux_loss.json sbase.json bias.json

The first form trains the model of a configuration in this process, on Python's standard library, and counts the
choices of every expert in every layer. ``--routing none`` is the auxiliary loss with coefficient 0. Of R replicas that
share the experts, each has one micro-batch at a time: R of them run at once, and all wait for the busiest. Figures are
printed at the end, which the second form does for such files; ``scripts/plot.py --routers`` draws them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_dynmo.cli.command_line import CommandParser, check_at_least_1, print_table, refusals_of, write_json
from ds_dynmo.cli.plotting.routers import Loads, loads_over_mean, read_loads
from ds_dynmo.config import load_settings
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import MixtureOfExperts, load_text, model_layers, read_model_config
from ds_dynmo.models.gpt import language_model_losses

NONE = "none"
ROUTINGS = (NONE, "aux_loss", "sbase", "bias")
REPLICAS = (2, 4)
LAGS = (1, 10, 50)
PRINT_EVERY = 20
CONFIG = Path("ds_configs/moe.json")

LAST = 50  # steps that figures are of

Counts = np.ndarray[Any, np.dtype[np.int64]]


def with_routing(settings: dict[str, Any], routing: str) -> dict[str, Any]:
    """Set how the experts of a configuration are balanced."""
    without = {"routing": "aux_loss", "auxiliary_coefficient": 0.0}
    moe = {**settings["model"]["moe"], **(without if routing == NONE else {"routing": routing})}
    return {**settings, "model": {**settings["model"], "moe": moe}}


def check(settings: dict[str, Any]) -> None:
    """Refuse a model without experts or with tied layers, and experts or micro-batches that replicas cannot share.

    Raises:
        ConfigError: naming the key.
    """
    model = read_model_config(settings)
    if model.moe is None:
        raise ConfigError("model.moe: null: should be an object, routers are measured")
    if model.tied_embedding:
        raise ConfigError("model.tied_embedding: true: should be false, layers run here one by one")
    for name, value in (
        ("model.moe.experts", model.moe.experts),
        ("gradient_accumulation_steps", settings["gradient_accumulation_steps"]),
    ):
        if value % max(REPLICAS):
            raise ConfigError(f"{name} {value}: should be a multiple of {max(REPLICAS)}, the most replicas that share")


def train(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train, and give for every step the loss and, per layer with experts, the choices and the busiest replicas."""
    config = read_model_config(settings)
    torch.manual_seed(config.seed)
    layers = [spec.build().train() for spec in model_layers(config)]
    experts = [part for layer in layers if isinstance(part := getattr(layer, "mlp", None), MixtureOfExperts)]
    weights = nn.ModuleList(layers)
    options = {key: value for key, value in settings["optimizer"]["params"].items() if key != "torch_adam"}
    optimizer = torch.optim.AdamW(weights.parameters(), **options)
    warm_up = settings["scheduler"]["params"]["warmup_num_steps"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    size, micro_batches = settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    text = load_text()
    data = text.batches(
        "train", micro_batch_size=size, sequence_length=config.sequence_length, seed=config.seed
    ).iterate()
    found: dict[str, Any] = {"losses": [], "choices": [], "busiest": {str(count): [] for count in REPLICAS}}
    began = time.perf_counter()
    for step in range(steps):
        rows, total = [], 0.0
        for _ in range(micro_batches):
            activations, labels = next(data)
            for part in experts:
                part.start_batch()
            for layer in layers:
                activations = layer(activations)
            loss, auxiliary = language_model_losses(activations, labels)
            ((loss if auxiliary is None else loss + auxiliary) / micro_batches).backward()
            rows.append([part.choices_per_expert for part in experts])
            total += loss.item() / micro_batches
        nn.utils.clip_grad_norm_(weights.parameters(), settings["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        counts = np.array(rows)
        choices = counts.sum(axis=0)
        for part, of_batch in zip(experts, choices.tolist()):
            if part.router.config.routing == "bias":
                part.router.balance(of_batch)
        found["losses"].append(total)
        found["choices"].append(choices.tolist())
        for replicas in REPLICAS:
            found["busiest"][str(replicas)].append(busiest(counts, replicas))
        if (step + 1) % PRINT_EVERY == 0:
            print(f"step {step + 1}: loss {total:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    return found


def busiest(counts: Counts, replicas: int) -> list[int]:
    """Add up, per layer, the choices that go to the busiest replica while ``replicas`` micro-batches run at once.

    Args:
        counts: ``[micro-batches, layers, experts]``.
    """
    _, layers, experts = counts.shape
    shares = counts.reshape(-1, replicas, layers, replicas, experts // replicas)
    loads: list[int] = shares.sum(axis=(1, 4)).max(axis=-1).sum(axis=0).tolist()
    return loads


def show(runs: dict[str, dict[str, Any]]) -> None:
    """Print, over the last :data:`LAST` steps of each run, how loads differ, and how alike they are later."""
    for name, found in runs.items():
        print(f"{name}: routing {found['routing']}, {found['steps']} steps, loss {found['losses'][-1]:.2f}")
        rows = []
        for busiest_of, loads in loads_over_mean(found).items():
            late = loads[-LAST:]
            levels, worst = late.mean(axis=0), late.max(axis=1) / late.mean(axis=1)
            settled = loads[min(LAST, len(loads) // 2) :]
            alike = [f"{likeness(settled, lag):.2f}" if len(settled) > lag else "-" for lag in LAGS]
            spread = f"{levels.min():.2f} to {levels.max():.2f}"
            rows.append((busiest_of, f"{np.median(late):.2f}", spread, f"{np.median(worst):.2f}", *alike))
        head = ("busiest", "over mean", "of layers", "worst layer over mean layer", *(f"after {lag}" for lag in LAGS))
        print_table(head, rows)
        print()


def likeness(loads: Loads, lag: int) -> float:
    """Give the mean correlation of the layers' loads with those ``lag`` steps later."""
    pairs = zip(loads[:-lag], loads[lag:])
    return float(np.mean([np.corrcoef(now, later)[0, 1] for now, later in pairs]))


def main(arguments: list[str]) -> int:
    parser = CommandParser(__doc__)
    parser.add_argument("--deepspeed_config", type=Path, default=CONFIG, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--routing", choices=ROUTINGS, default="aux_loss", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print figures of these, train nothing")
    args = parser.parse_args(arguments)
    with refusals_of("routers.py"):
        check_at_least_1(args, "steps")
        if args.show is not None:
            show({str(file): read_loads(file) for file in args.show})
            return 0
        settings = load_settings(args.deepspeed_config)
        check(settings)
        settings = with_routing(settings, args.routing)
    torch.set_num_threads(1)
    found = {"routing": args.routing, "steps": args.steps, **train(settings, args.steps)}
    write_json(args.json, found)
    show({str(args.deepspeed_config): found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
