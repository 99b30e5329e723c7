"""The component of the engine that writes and reads checkpoints."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.decide.memory import HeldMemory
from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.decide.reporter import Reporter
from ds_dynmo.engine.move.references import References
from ds_dynmo.engine.run.trainable import TrainableLayers
from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.background import BackgroundSave
from ds_dynmo.engine.save.context import CheckpointContext
from ds_dynmo.engine.save.destinations import Destination, ToDisk, ToMemory
from ds_dynmo.engine.save.initial_model import InitialModelSpec
from ds_dynmo.engine.save.listing import is_of_run, remove_older
from ds_dynmo.engine.save.progress import EngineProgress
from ds_dynmo.engine.save.reading import load
from ds_dynmo.engine.save.size import expected_bytes
from ds_dynmo.engine.save.writing import SaveOptions, UnfinishedCheckpoint, begin_save
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.placement import Placement
from ds_dynmo.plan import SaveReport


class Checkpointer:
    """Writes checkpoints, and loads them at any partition. Construction is collective.

    At most one save is under way in the background: the next save, a load and a re-packing wait for it first.

    Args:
        engine: DeepSpeed's, which writes its files beside ds_dynmo's.
        references: to objects that layers refer to and do not own.
        reporter: records saves.
    """

    def __init__(
        self,
        engine: Any,
        stage: StageContext,
        references: References,
        rebalancer: Rebalancer,
        trainable: TrainableLayers,
        progress: EngineProgress,
        reporter: Reporter,
    ) -> None:
        self._engine, self._stage, self._references, self._rebalancer = engine, stage, references, rebalancer
        self._trainable, self._progress, self._reporter = trainable, progress, reporter
        self._under_way: BackgroundSave | None = None
        self._has_warned = False
        self._paths: list[str] = []  # of checkpoints that were loaded, or begun to be saved; the last one last
        stage.comm.how_to_continue = self._how_to_continue
        self._origin = InitialModelSpec.of(stage, engine.get_data_types()[0], references.is_shared)
        stage.optimizer.changed.subscribe("a checkpoint describes its files", self._describe_optimizer)

    def save(self, options: SaveOptions) -> bool:
        """Write a checkpoint, or begin to if ``dynmo.checkpoint`` says so. Collective.

        Raises:
            ConfigError, CheckpointError: see :func:`begin_save` and :meth:`UnfinishedCheckpoint.finish`; or the save
                before has failed.
        """
        began = time.perf_counter()
        self.wait()
        self._stage.optimizer.match_layers("save_checkpoint")
        context = self._context("saving a checkpoint")
        destination: Destination = ToMemory() if self._saves_in_background() else ToDisk()
        unfinished = begin_save(context, options, destination)
        self._paths.append(unfinished.path)
        if not destination.writes_later:
            self._saved(unfinished, began, None, unfinished.finish(context))
            return True
        self._under_way = BackgroundSave(
            unfinished,
            self._stage.comm,
            saved=partial(self._saved, unfinished, began, time.perf_counter() - began),
            failed=partial(self._report_failure, unfinished),
        )
        return True

    @property
    def is_saving(self) -> bool:
        """Whether a save was under way in the background when the last batch began: the same on every rank."""
        return self._under_way is not None

    def wait(self) -> None:
        """Wait until no save is under way in the background. Collective.

        Raises:
            CheckpointError: on every rank; that save has failed. Earlier checkpoints are untouched.
        """
        save, self._under_way = self._under_way, None
        if save is not None:
            save.wait()

    def before_batch(self) -> None:
        """Notice the end of a save in the background, without a wait for it. Collective.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        if self._under_way is not None and self._under_way.is_over():
            self.wait()

    def check(self) -> None:
        """Notice the end of a save in the background now. Collective.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        if self._under_way is not None and self._under_way.is_over_now():
            self.wait()

    def expected_bytes(self, *, exclude_frozen: bool) -> int:
        """Estimate the size of a checkpoint: :func:`ds_dynmo.engine.save.size.expected_bytes`. Collective."""
        self._stage.optimizer.match_layers("checkpoint_bytes")
        return expected_bytes(self._stage, exclude_frozen=exclude_frozen)

    def load(
        self, load_dir: str, tag: str | None, options: LoadOptions, *, newest_whole: bool
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint: :func:`ds_dynmo.engine.save.reading.load`. Collective."""
        self.wait()
        self._stage.optimizer.match_layers("load_checkpoint")
        found = load(self._context("loading a checkpoint"), load_dir, tag, options, newest_whole=newest_whole)
        if found[0] is not None:
            self._paths.append(os.path.dirname(found[0]))
        return found

    def _how_to_continue(self) -> str:
        """Say how to go on with the job after a rank was lost, by what is on the disk: a thread may still be saving."""
        for path in reversed(self._paths):
            folder, tag = os.path.split(path)
            if is_of_run(folder, tag, self._progress.run):
                return (
                    f"The last whole checkpoint is {path}: start again, on as many ranks as there are, with "
                    f"engine.load_checkpoint({folder!r}, {tag!r})"
                )
        return "There is no checkpoint of this run: start it again as before"

    def _context(self, operation: str) -> CheckpointContext:
        return CheckpointContext(
            engine=self._engine,
            stage=self._stage,
            references=self._references,
            origin=self._origin,
            rebalancer=self._rebalancer,
            trainable=self._trainable,
            progress=self._progress,
            operation=operation,
        )

    def _saves_in_background(self) -> bool:
        """Return whether to save in the background. Collective: on a CPU, the copy counts with the memory limit."""
        if self._stage.config.checkpoint.kind != "background":
            return False
        if get_accelerator().device_name() != "cpu":
            return True
        self._stage.comm.enter("saving a checkpoint")
        held = self._rebalancer.decider.memory.held()
        if held is None:
            return True
        present, copied = _most_bytes(held, self._stage.placement)
        if present + copied <= held.limit:
            return True
        if not self._has_warned:
            self._reporter.warn(
                f"DynMo step {self._stage.counters.steps}: training waits for checkpoints, because the {copied} bytes "
                f"that a save in the background copies would take a rank to {present + copied} bytes, above "
                f"{held.limit} (dynmo.memory_limit)"
            )
        self._has_warned = True
        return False

    def _saved(
        self, unfinished: UnfinishedCheckpoint, began: float, wait_seconds: float | None, bytes_saved: int
    ) -> None:
        """Report a checkpoint that is whole, and remove older ones; ``wait_seconds``: None: training waited for it."""
        save_seconds = time.perf_counter() - began
        self._reporter.saved(
            SaveReport(
                step=unfinished.step,
                path=unfinished.path,
                background=wait_seconds is not None,
                bytes_saved=bytes_saved,
                wait_seconds=save_seconds if wait_seconds is None else wait_seconds,
                save_seconds=save_seconds,
            )
        )
        keep = self._stage.config.checkpoint.keep
        if keep is not None and unfinished.manifest is not None:
            folder = os.path.dirname(unfinished.path)
            try:
                remove_older(folder, unfinished.manifest.state["run"], keep)
            except OSError as error:
                self._reporter.warn(f"DynMo step {unfinished.step}: a checkpoint older than {keep} stays: {error}")

    def _report_failure(self, unfinished: UnfinishedCheckpoint, error: str) -> None:
        self._reporter.warn(f"DynMo step {unfinished.step}: checkpoint {unfinished.path} was not saved: {error}")

    def _describe_optimizer(self, _: None) -> None:
        self._origin = self._origin.with_optimizer(self._stage)


def _most_bytes(held: HeldMemory, placement: Placement) -> tuple[int, int]:
    """Return the bytes in training, and those that a save copies, of the stage where they are the most."""
    of_stages = []
    for stage in placement.stages:
        layers = placement.layers_of(stage)
        copied = sum(held.layers[index].total - held.layers[index].gradients for index in layers)
        of_stages.append((sum(held.static_bytes[index] for index in layers), copied))
    return max(of_stages, key=sum)
