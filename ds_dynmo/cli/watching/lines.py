"""A report in plain lines: one for each event, and one for where the run stands. Pure; ASCII unless a reason is not."""

from __future__ import annotations

from typing import Any

from ds_dynmo.errors import counted

Record = dict[str, Any]


def start_line(record: Record) -> str:
    return (
        f"step {record['first_step']}: a run to step {record['stop_at']} in {counted(record['stages'], 'stage')} begins"
    )


def end_line(record: Record) -> str:
    return (
        f"step {record['steps']}: the run has ended: {record['tokens_per_second']:,.0f} tokens/s, training loss "
        f"{record['train_loss']:.3f}, validation loss {record['validation_loss']:.3f}, partition {record['partition']}"
    )


def move_line(record: Record) -> str:
    """Write a move; what matters most comes first, since a terminal may be narrow."""
    text = (
        f"step {record['step']}: {record['old_partition']} -> {record['new_partition']}, "
        f"{record['reason']}: {_moved(record)} in {duration(record['migrate_seconds'])}"
    )
    before, after = record["bottleneck_seconds_before"], record["bottleneck_seconds_after"]
    if before is None or after is None:
        return text
    return f"{text}, predicted bottleneck {duration(before)} -> {duration(after)}"


def repack_line(record: Record) -> str:
    text = f"step {record['step']}: {record['old_partition']} -> {record['new_partition']}, "
    text += f"{record['reason']}: re-packed"
    for which, what in (("released_ranks", "released"), ("recalled_ranks", "taken back")):
        if record[which]:
            text += f", ranks {record[which]} {what}"
    return f"{text}, {_moved(record)} in {duration(record['migrate_seconds'] + record['world_seconds'])}"


def decision_line(record: Record) -> str:
    """Write why a decision moved layers or kept them."""
    outcome = "moved" if record["old_partition"] != record["new_partition"] else "kept"
    verdict = record.get("verdict")
    return f"step {record['step']}, {record['reason']}: {outcome}" + (f": {verdict}" if verdict else "")


def duration(seconds: float) -> str:
    """Write seconds with three digits and a unit.

    >>> duration(12.34), duration(0.0193), duration(2e-5), duration(0)
    ('12.3 s', '19.3 ms', '20 us', '0 us')
    """
    value, unit = (
        (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms") if seconds >= 1e-3 else (1e6 * seconds, "us")
    )
    return f"{value:,.0f} {unit}" if value >= 100 or unit == "us" else f"{value:.1f} {unit}"


def printable(text: str) -> str:
    """Replace what would control a terminal: a model may give any reason."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _moved(record: Record) -> str:
    layers = record["layers_moved"]
    return f"{layers} layer{'s' if layers != 1 else ''}, {record['bytes_moved'] / 2**20:.1f} MiB"
