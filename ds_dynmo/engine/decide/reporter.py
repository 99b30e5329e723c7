"""The reports of an engine, on rank 0: the latest are kept, all are logged, written as JSON lines, sent to monitors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.decide.report_files import check_writable, guard_monitors, record_writer
from ds_dynmo.engine.decide.report_lines import rebalance_line, repack_line, save_line
from ds_dynmo.engine.deepspeed.logs import logger_named
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MeasuredReport, Profile, RebalanceReport, RepackReport, SaveReport
from ds_dynmo.schedules import Schedule

KEPT_REPORTS = 1000  # of each kind, in a few megabytes per rank
# DeepSpeed's logger starts at WARNING, which would hide the one line per rebalance.
logger = logger_named("DynMo")


class Reporter:
    """Keeps the latest reports of each kind on rank 0, and logs, writes and monitors them as the configuration says.

    Construction is collective. If rank 0 cannot write later, it warns once, and training continues.

    Attributes:
        speaks: whether this rank keeps, logs, writes and monitors: it is rank 0. Others have no reports.
        rebalances, repacks, measurements: the latest reports, :data:`KEPT_REPORTS` at most.
        write: appends a record to the report, or warns once that it cannot; does nothing without a report.

    Args:
        monitor: DeepSpeed's ``MonitorMaster``.

    Raises:
        ConfigError: on every rank, if rank 0 cannot write ``dynmo.report``.
    """

    def __init__(self, config: DynMoConfig, comm: Communicator, *, is_first_rank: bool, monitor: Any) -> None:
        check_writable(config.report, "dynmo.report", comm, writes=is_first_rank)
        self.speaks = is_first_rank
        self.rebalances: deque[RebalanceReport] = deque(maxlen=KEPT_REPORTS)
        self.repacks: deque[RepackReport] = deque(maxlen=KEPT_REPORTS)
        self.measurements: deque[MeasuredReport] = deque(maxlen=KEPT_REPORTS)
        self._profiled_step: int | None = None
        self._recorded_order: str | None = ""  # hash of the order recorded latest; None: DeepSpeed's 1F1B
        self._log = config.log and is_first_rank
        writes = config.report is not None and is_first_rank
        self.write = record_writer(Path(str(config.report)), self.warn) if writes else _write_nothing
        self._monitor = monitor if config.monitor and is_first_rank and monitor.enabled else None
        guard_monitors(monitor, self.warn)

    def rebalanced(self, report: RebalanceReport, samples: int) -> None:
        """Record a decision.

        Args:
            samples: number of samples trained so far, the x-axis of DeepSpeed's monitors.
        """
        self._keep(self.rebalances, report)
        if self._log and report.moved:
            logger.info(rebalance_line(report))
        self.write(report.as_record())
        self._send(
            {
                "layers_moved": report.layers_moved,
                "bytes_moved": report.bytes_moved,
                "predicted_bottleneck_seconds": report.bottleneck_seconds_after,
                "predicted_imbalance": report.imbalance_after,
                "predicted_iteration_seconds": report.iteration_seconds_after,
                "profile_seconds": report.profile_seconds,
                "decide_seconds": report.decide_seconds,
                "migrate_seconds": report.migrate_seconds,
                **_boundaries(report.new_placement),
            },
            samples,
        )

    def repacked(self, report: RepackReport, samples: int) -> None:
        """Record a re-packing."""
        self._keep(self.repacks, report)
        if self._log:
            logger.info(repack_line(report))
        self.write(report.as_record())
        self._send(
            {
                "num_stages": float(report.new_stages),
                "repack_seconds": report.decide_seconds + report.migrate_seconds + report.world_seconds,
                **_boundaries(report.new_placement),
            },
            samples,
        )

    def profiled(self, profile: Profile | None, samples: int) -> None:
        """Record ``profile``, the latest one, unless it was recorded before."""
        if profile is not None and profile.step != self._profiled_step:
            self.write(profile.as_record())
            self._send(_stage_loads(profile), samples)
            self._profiled_step = profile.step

    def scheduled(self, step: int, order: Schedule | None) -> None:
        """Record the order of passes in force after ``step``, unless the latest one was the same.

        Args:
            order: None: DeepSpeed's 1F1B.
        """
        present = order.hash if order is not None else None
        if present != self._recorded_order:
            self.write({"kind": "schedule", "step": step, "orders": order.lines if order is not None else None})
            self._recorded_order = present

    def measured(self, report: MeasuredReport, samples: int) -> None:
        """Record a measurement of the present partition."""
        self._keep(self.measurements, report)
        self.write(report.as_record())
        self._send(
            {
                "bottleneck_seconds": report.bottleneck_seconds,
                "imbalance": report.imbalance,
                "batch_seconds": report.batch_seconds,
                "bubble_ratio": report.bubble_ratio,
            },
            samples,
        )

    def saved(self, report: SaveReport) -> None:
        """Record a checkpoint; log one that was written in the background. A thread may call this."""
        if report.background:
            self.inform(save_line(report))
        self.write(report.as_record())

    def warn(self, message: str) -> None:
        """Log a failure that does not end training."""
        if self.speaks:
            logger.warning(message)

    def inform(self, message: str) -> None:
        """Log an action, if logging is configured."""
        if self._log:
            logger.info(message)

    def _keep(self, reports: deque[Any], report: Any) -> None:
        if self.speaks:
            reports.append(report)

    def _send(self, numbers: Mapping[str, float | None], samples: int) -> None:
        if self._monitor is not None:
            self._monitor.write_events(
                [(f"DynMo/{name}", value, samples) for name, value in numbers.items() if value is not None]
            )


def _boundaries(placement: Placement) -> dict[str, float]:
    """Return the first layer of every chunk except the first, by name."""
    return {f"boundary_{number}": placement.chunk(number).start for number in range(1, placement.num_chunks)}


def _stage_loads(profile: Profile) -> dict[str, float]:
    """Return the seconds per micro-batch of every stage, by name."""
    seconds, placement = profile.costs("time"), profile.placement
    of_stages = ((stage, placement.layers_of(stage)) for stage in placement.stages)
    return {f"stage_{stage}_load_seconds": math.fsum(seconds[layer] for layer in layers) for stage, layers in of_stages}


def _write_nothing(record: dict[str, Any]) -> None:
    """Drop ``record``: there is no report, or another rank writes it."""
