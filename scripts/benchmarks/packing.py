"""Train a model that re-packs, under the memory limit that it just meets as it was built: scripts/repack.py memory."""

from __future__ import annotations

from typing import Any

from benchmarks.arms import engines_end_here, say
from ds_dynmo.cli.command_line import print_table
from ds_dynmo.cli.train import batches, build_cases, build_engine, train
from ds_dynmo.cli.training.options import TrainingRun, prepare
from ds_dynmo.config import read_dynmo_config
from ds_dynmo.engine.decide.decision_input import memory_model
from ds_dynmo.errors import ConfigError
from ds_dynmo.partitioners import MemoryModel

MIB = 2**20


def prepare_without_limit(flags: list[str], settings: dict[str, Any]) -> TrainingRun:
    """Check a configuration. Return its run without a limit.

    Raises:
        ConfigError: naming the option, key or path, its value and what is allowed.
    """
    dynmo = read_dynmo_config(settings)
    if dynmo is None or not dynmo.repack.enabled:
        raise ConfigError("dynmo.repack.enabled = false: should be true, so that ranks can be given back")
    return prepare(flags, with_block(settings, memory_limit=None, repack={}, interval=0))


def with_block(settings: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Replace keys of the "dynmo" section."""
    return {**settings, "dynmo": {**settings["dynmo"], **keys}}


def least_limit(run: TrainingRun) -> int:
    """Profile the model as it is built. Return the bytes of the stage that needs most. Collective."""
    engine = build_engine(run)
    data = batches(run, engine, "train").iterate()
    while engine.profile is None:
        engine.train_batch(data)
    model = memory_model(engine.profile, 0, engine.rebalancer.memory.checkpoint_interval)
    assert model is not None
    return max(model.bytes_per_stage(engine.partition)) + workspace_bytes(engine)


def workspace_bytes(engine: Any) -> int:
    """Return what every stage sets aside for the layer that runs."""
    return max(layer.workspace_bytes for layer in engine.profile.layers)


class MemoryRows:
    """Rows of a run: one for each size of the model and number of ranks.

    Attributes:
        rows: ``steps`` trained, ``parameters`` that are left, bytes of the whole model (weights, gradients, optimizer
            state, buffers), ``ranks``, the ``fewest_ranks`` that it fits on, and the bytes that each rank needs.
    """

    def __init__(self, engine: Any, limit: int) -> None:
        self._engine, self._limit, self._most = engine, limit, engine.num_stages
        self.rows: list[dict[str, Any]] = [{"steps": 0}]

    def record(self, record: dict[str, Any]) -> None:
        """Count a batch, and begin a row if the model or the number of ranks is another from now on."""
        if record["kind"] != "step":
            return
        self.rows[-1]["steps"] += 1
        if self._engine.profile is None:
            return
        now, known = self._measure(), self.rows[-1]
        if known.get("ranks", now["ranks"]) != now["ranks"] or known.get("bytes", now["bytes"]) != now["bytes"]:
            self.rows.append({"steps": 0})
        self.rows[-1] |= now

    def _measure(self) -> dict[str, Any]:
        engine, layers = self._engine, self._engine.profile.layers
        whole = memory_model(engine.profile, self._limit, engine.rebalancer.memory.checkpoint_interval)
        assert whole is not None
        model = whole.on(engine.num_stages)
        workspace = workspace_bytes(engine)
        return {
            "parameters": sum(layer.parameters for layer in layers),
            "bytes": sum(model.static_bytes),
            "ranks": engine.num_stages,
            "fewest_ranks": fewest_ranks(model, self._most),
            "bytes_per_rank": [needed + workspace for needed in model.bytes_per_stage(engine.partition)],
        }

    def average(self, column: str) -> float:
        """Average a column over the batches of the run."""
        return sum(row["steps"] * row[column] for row in self.rows) / sum(row["steps"] for row in self.rows)


def fewest_ranks(model: MemoryModel, most: int) -> int:
    """Count the ranks that whole layers fit on in their order, each rank filled before the next."""
    for count in range(1, most):
        stages, stop = model.on(count), 0
        for stage in range(count):
            stop = stages.furthest_stops(stage)[stop]
        if stop == len(model.static_bytes):
            return count
    return most


def train_within_limit(flags: list[str], unlimited: TrainingRun, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Train under the limit that the model just meets as built. Return figures of the run on rank 0, which stays.

    Args:
        flags: of ds-dynmo-train.
        unlimited: what :func:`prepare_without_limit` gave for ``settings``.
    """
    with engines_end_here():
        limit = least_limit(unlimited)
    say(f'"memory_limit": {limit}')
    run = prepare(flags, with_block(settings, memory_limit=limit))
    engine = build_engine(run)
    rows = MemoryRows(engine, limit)
    history = train(run, engine, build_cases(run, engine), rows.record)
    if engine.released or engine.global_rank != 0:
        return None
    return {
        "memory_limit": limit,
        "stages": run.stages,
        "average_ranks": rows.average("ranks"),
        "average_fewest_ranks": rows.average("fewest_ranks"),
        "rows": rows.rows,
        "losses": history.losses,
    }


def show_memory(found: dict[str, Any]) -> None:
    """Print figures of :func:`train_within_limit`."""
    first, cells = found["rows"][0], []
    for row in found["rows"]:
        per_rank = ", ".join(f"{needed / MIB:.1f}" for needed in row["bytes_per_rank"])
        left = f"{row['parameters'] / first['parameters']:.1%}", f"{row['bytes'] / MIB:.1f}"
        cells.append((row["steps"], *left, row["ranks"], row["fewest_ranks"], per_rank))
    print_table(("steps", "parameters left", "model, MiB", "ranks", "fewest that fit", "MiB needed per rank"), cells)
    print(
        f"{found['average_ranks']:.1f} of {found['stages']} ranks on average, each within "
        f"{found['memory_limit'] / MIB:.1f} MiB; {found['average_fewest_ranks']:.1f} with the fewest that fit; "
        f"loss {found['losses'][0]:.3f} to {found['losses'][-1]:.3f}"
    )
