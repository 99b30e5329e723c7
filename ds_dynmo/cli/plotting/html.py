"""Write the report of a run as one HTML file, with tables and embedded pictures."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from ds_dynmo.cli.plotting.data import Record, RunRecords
from ds_dynmo.errors import counted

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h1, summary { overflow-wrap: anywhere } h2 { margin-top: 2em }
.wide { overflow-x: auto } img { display: block; width: 100% }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .3em .8em; border-bottom: 1px solid #ddd }
th { text-align: left; vertical-align: bottom } td { white-space: nowrap }
td.long { white-space: normal; min-width: 30em }
td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto }
"""
LEAST_SCALE = 0.7  # of a picture: on a narrow screen it is scrolled rather than made so small that nobody can read it
CSS_PIXELS = 96  # per inch
LONG_CELL = 60  # characters
TableRows = Sequence[Sequence[str]]


class Picture(NamedTuple):
    """An SVG, and how wide it is drawn."""

    svg: bytes
    inches: float


def page(report: RunRecords, pictures: Mapping[str, Picture]) -> str:
    """Make the HTML. Tables and pictures that are wider than the screen scroll by themselves.

    Args:
        pictures: by title.
    """
    parts = ['<!doctype html><html lang="en"><head><meta charset="utf-8">']
    parts += [f'<meta name="viewport" content="width=device-width"><title>{escape(title(report))}</title>']
    parts += [f"<style>{STYLE}</style></head><body><h1>{escape(title(report))}</h1>"]
    if report.end is not None:
        parts.append(_table(("of the whole run", ""), summary_rows(report.end)))
    parts += [f"<h2>{escape(name)}</h2>{_image(name, picture)}" for name, picture in pictures.items()]
    parts += ["<h2>Decisions</h2>", _table(REBALANCE_HEAD, rebalance_rows(report.rebalances))]
    if report.start is not None:
        settings = json.dumps(report.start["config"], indent=2)
        parts.append(f"<h2>Configuration</h2><details><summary>JSON</summary><pre>{escape(settings)}</pre></details>")
    return "\n".join([*parts, "</body></html>\n"])


def _image(name: str, picture: Picture) -> str:
    data, pixels = base64.b64encode(picture.svg).decode(), CSS_PIXELS * picture.inches
    size = f"min-width: {LEAST_SCALE * pixels:.0f}px; max-width: {pixels:.0f}px"
    source = f"data:image/svg+xml;base64,{data}"
    return f'<div class="wide"><img alt="{escape(name)}" src="{source}" style="{size}"></div>'


def title(report: RunRecords) -> str:
    """Describe the run in one line."""
    if report.start is None:
        return "A run"
    steps, stages = report.start["stop_at"] - report.start["first_step"], report.start["stages"]
    return f"{counted(steps, 'step')} in {counted(stages, 'stage')}"


def summary_rows(end: Record) -> TableRows:
    return [
        ("tokens/s", f"{end['tokens_per_second']:,.0f}"),
        ("time of training", f"{end['train_seconds']:,.1f} s"),
        ("step, median", f"{1e3 * end['median_step_seconds']:,.0f} ms"),
        ("training loss, first and last", f"{end['first_train_loss']:.3f}, {end['train_loss']:.3f}"),
        ("validation loss", f"{end['validation_loss']:.3f}"),
        ("partition at the end", str(end["partition"])),
    ]


REBALANCE_HEAD = (
    *("step", "reason", "partition", "layers moved", "MiB moved", "bottleneck, predicted (ms)"),
    *("imbalance, predicted", "profile (ms)", "decide (ms)", "migrate (ms)"),
)


def rebalance_rows(rebalances: Sequence[Record]) -> TableRows:
    rows = []
    for record in rebalances:
        old, new = record["old_partition"], record["new_partition"]
        moved = old != new
        rows.append(
            (
                str(record["step"]),
                record["reason"],
                f"{old} → {new}" if moved else f"{old} kept",
                str(record["layers_moved"]),
                f"{record['bytes_moved'] / 2**20:.1f}",
                _change(record, "bottleneck_seconds", 1e3, moved),
                _change(record, "imbalance", 1, moved),
                *(f"{1e3 * record[f'{part}_seconds']:.1f}" for part in ("profile", "decide", "migrate")),
            )
        )
    return rows


def _change(record: Record, key: str, scale: float, moved: bool) -> str:
    before, after = record[f"{key}_before"], record[f"{key}_after"]
    if before is None:
        return "-"
    return f"{scale * before:.2f} → {scale * after:.2f}" if moved else f"{scale * before:.2f}"


def _table(head: Sequence[str], rows: TableRows) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ["".join(_cell(value) for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def _cell(value: str) -> str:
    kind = ' class="n"' if value[:1].isdigit() else ' class="long"' if len(value) > LONG_CELL else ""
    return f"<td{kind}>{escape(value)}</td>"
