"""Log lines of reports."""

from __future__ import annotations

from ds_dynmo.errors import counted
from ds_dynmo.plan import RebalanceReport, RepackReport, SaveReport


def rebalance_line(report: RebalanceReport) -> str:
    """Write the log line of a rebalance."""
    text = (
        f"DynMo step {report.step} ({report.reason}): {list(report.old_partition)} -> {list(report.new_partition)}, "
        f"{_moved(report)} in {report.migrate_seconds * 1e3:.0f} ms"
    )
    if report.background_seconds is not None:
        text += f" beside a batch, {report.background_seconds * 1e3:.0f} ms from beginning to end"
    if report.bottleneck_seconds_before is not None and report.bottleneck_seconds_after is not None:
        text += (
            f"; predicted bottleneck {report.bottleneck_seconds_before * 1e3:.2f} -> "
            f"{report.bottleneck_seconds_after * 1e3:.2f} ms, imbalance {report.imbalance_before:.2f} -> "
            f"{report.imbalance_after:.2f}"
        )
    if report.schedule_splits is not None:
        text += f"; {report.schedule}"
    return text


def repack_line(report: RepackReport) -> str:
    """Write the log line of a re-packing."""
    text = f"DynMo step {report.step} ({report.reason}): "
    if report.old_stages == report.new_stages:
        return text + f"{counted(report.old_stages, 'stage')} kept ({report.verdict})"
    text += f"{report.old_stages} -> {counted(report.new_stages, 'stage')}, {list(report.new_partition)}"
    if report.released_ranks:
        text += f", ranks {list(report.released_ranks)} released"
    text += (
        f"; {_moved(report)} in {report.migrate_seconds * 1e3:.0f} ms, new world in {report.world_seconds * 1e3:.0f} ms"
    )
    if report.iteration_seconds_before is not None and report.iteration_seconds_after is not None:
        text += (
            f"; predicted batch {report.iteration_seconds_before * 1e3:.0f} -> "
            f"{report.iteration_seconds_after * 1e3:.0f} ms"
        )
    return text


def save_line(report: SaveReport) -> str:
    """Write the log line of a checkpoint that was saved in the background."""
    return (
        f"DynMo step {report.step}: checkpoint {report.path} is whole, {report.bytes_saved / 2**20:.1f} MiB in "
        f"{report.save_seconds:.2f} s, of which training waited {report.wait_seconds:.2f} s"
    )


def _moved(report: RebalanceReport | RepackReport) -> str:
    return f"{counted(report.layers_moved, 'layer')}, {report.bytes_moved / 2**20:.1f} MiB"
