"""What the engine says of what it did: a log line, DeepSpeed's monitor, JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.balancing.policy import Decision
from ds_dynmo.engine.deepspeed_adapter.logs import logger_named
from ds_dynmo.engine.files import guard_monitors, record_writer
from ds_dynmo.plan import MeasuredReport, MigrationPlan, Profile, RebalanceReport, RepackReport

# DeepSpeed's own logger starts at WARNING, which would hide the one line per rebalance.
logger = logger_named("DynMo")


class Reporter:
    """Keeps every report; on rank 0 logs, writes and monitors them as the config says.

    Where rank 0 cannot write, it warns once, and training goes on.
    """

    def __init__(self, config: DynMoConfig, is_first_rank: bool, monitor: Any) -> None:
        self.rebalances: list[RebalanceReport] = []
        self.repacks: list[RepackReport] = []
        self.measurements: list[MeasuredReport] = []
        self._profiled_step: int | None = None
        self._is_first_rank = is_first_rank
        self._log = config.log and is_first_rank
        writes = config.report is not None and is_first_rank
        self._write = record_writer(Path(str(config.report)), self.warn) if writes else _write_nothing
        self._monitor = monitor if config.monitor and is_first_rank and monitor.enabled else None
        guard_monitors(monitor, self.warn)

    def mute(self) -> None:
        """Another rank reports from now on, of another job."""
        self._is_first_rank = self._log = False
        self._write, self._monitor = _write_nothing, None

    def rebalanced(self, report: RebalanceReport, samples: int) -> None:
        """Record a decision. ``samples`` is DeepSpeed's x-axis for monitors."""
        self.rebalances.append(report)
        if self._log and report.moved:
            logger.info(rebalance_line(report))
        self._write(report.as_record())
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
            },
            samples,
        )

    def repacked(self, report: RepackReport, samples: int) -> None:
        """Record a re-packing."""
        self.repacks.append(report)
        if self._log:
            logger.info(repack_line(report))
        self._write(report.as_record())
        self._send(
            {
                "num_stages": float(report.new_stages),
                "repack_seconds": report.decide_seconds + report.migrate_seconds + report.world_seconds,
            },
            samples,
        )

    def profiled(self, profile: Profile | None) -> None:
        """Write ``profile``, the latest one, once, as it was measured."""
        if profile is not None and profile.step != self._profiled_step:
            self._write(profile.as_record())
            self._profiled_step = profile.step

    def measured(self, report: MeasuredReport, samples: int) -> None:
        """Record what was measured under the present partition."""
        self.measurements.append(report)
        self._write(report.as_record())
        self._send(
            {
                "bottleneck_seconds": report.bottleneck_seconds,
                "imbalance": report.imbalance,
                "batch_seconds": report.batch_seconds,
                "bubble_ratio": report.bubble_ratio,
            },
            samples,
        )

    def warn(self, message: str) -> None:
        """Log what went wrong, without an end of training."""
        if self._is_first_rank:
            logger.warning(message)

    def inform(self, message: str) -> None:
        """Log what was done."""
        if self._log:
            logger.info(message)

    def _send(self, numbers: dict[str, float | None], samples: int) -> None:
        if self._monitor is not None:
            self._monitor.write_events(
                [(f"DynMo/{name}", value, samples) for name, value in numbers.items() if value is not None]
            )


def _write_nothing(record: dict[str, Any]) -> None:
    """No report is asked for, or another rank writes it."""


def rebalance_report(
    plan: MigrationPlan,
    decision: Decision | None,
    *,
    step: int,
    reason: str,
    bytes_moved: int,
    seconds: tuple[float, float, float],
    load_signals: tuple[float | None, ...],
) -> RebalanceReport:
    """What was decided and carried out.

    Args:
        decision: None where there was no profile to predict from.
        seconds: of profile, decide and migrate.
    """
    return RebalanceReport(
        step=step,
        reason=reason,
        old_placement=plan.old,
        new_placement=plan.new,
        bottleneck_seconds_before=decision.bottleneck_seconds_before if decision else None,
        bottleneck_seconds_after=decision.bottleneck_seconds_after if decision else None,
        imbalance_before=decision.imbalance_before if decision else None,
        imbalance_after=decision.imbalance_after if decision else None,
        iteration_seconds_before=decision.iteration_seconds_before if decision else None,
        iteration_seconds_after=decision.iteration_seconds_after if decision else None,
        verdict=decision.verdict if decision else "",
        layers_moved=len(plan.moves),
        bytes_moved=bytes_moved,
        profile_seconds=seconds[0],
        decide_seconds=seconds[1],
        migrate_seconds=seconds[2],
        load_signals=load_signals,
    )


def rebalance_line(report: RebalanceReport) -> str:
    """The one line that is logged per rebalance."""
    text = (
        f"DynMo step {report.step} ({report.reason}): {list(report.old_partition)} -> {list(report.new_partition)}, "
        f"{_moved(report)} in {report.migrate_seconds * 1e3:.0f} ms"
    )
    if report.bottleneck_seconds_before is not None and report.bottleneck_seconds_after is not None:
        text += (
            f"; predicted bottleneck {report.bottleneck_seconds_before * 1e3:.2f} -> "
            f"{report.bottleneck_seconds_after * 1e3:.2f} ms, imbalance {report.imbalance_before:.2f} -> "
            f"{report.imbalance_after:.2f}"
        )
    return text


def repack_line(report: RepackReport) -> str:
    """The one line that is logged per re-packing."""
    text = f"DynMo step {report.step} ({report.reason}): "
    if report.old_stages == report.new_stages:
        return text + f"{report.old_stages} stages kept ({report.verdict})"
    text += f"{report.old_stages} -> {report.new_stages} stages, {list(report.new_partition)}"
    if report.released_ranks:
        text += f", ranks {list(report.released_ranks)} released"
    if report.copies > 1:
        text += f", {report.copies} times as many replicas as at the launch"
    if report.recalled_ranks:
        text += f", ranks {list(report.recalled_ranks)} taken back"
    text += (
        f"; {_moved(report)} in {report.migrate_seconds * 1e3:.0f} ms, new world in {report.world_seconds * 1e3:.0f} ms"
    )
    if report.iteration_seconds_before is not None and report.iteration_seconds_after is not None:
        text += (
            f"; predicted batch {report.iteration_seconds_before * 1e3:.0f} -> "
            f"{report.iteration_seconds_after * 1e3:.0f} ms"
        )
    return text


def _moved(report: RebalanceReport | RepackReport) -> str:
    layers = "1 layer" if report.layers_moved == 1 else f"{report.layers_moved} layers"
    return f"{layers}, {report.bytes_moved / 2**20:.1f} MiB"
