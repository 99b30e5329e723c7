"""The report of a run as one HTML file, with tables and embedded pictures."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape

from ds_dynmo.cli.plotting.data import Record, Report

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h2 { margin-top: 2em } img { max-width: 100% } .wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .3em .8em; border-bottom: 1px solid #ddd }
th { text-align: left; vertical-align: bottom } td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto }
"""
Rows = Sequence[Sequence[str]]


def page(report: Report, pictures: Mapping[str, bytes]) -> str:
    """Make the HTML; ``pictures``: PNGs by title."""
    parts = [f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title(report))}</title>']
    parts += [f"<style>{STYLE}</style></head><body><h1>{escape(title(report))}</h1>"]
    if report.end is not None:
        parts.append(_table(("of the whole run", ""), summary_rows(report.end)))
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        parts.append(f'<h2>{escape(name)}</h2><img alt="{escape(name)}" src="data:image/png;base64,{data}">')
    parts += ["<h2>Decisions</h2>", _table(REBALANCE_HEAD, rebalance_rows(report.rebalances))]
    if report.start is not None:
        settings = json.dumps(report.start["config"], indent=2)
        parts.append(f"<h2>Configuration</h2><details><summary>JSON</summary><pre>{escape(settings)}</pre></details>")
    return "\n".join([*parts, "</body></html>\n"])


def title(report: Report) -> str:
    """Describe the run in one line."""
    if report.start is None:
        return "A run"
    return f"{report.start['stop_at'] - report.start['first_step']} steps in {report.start['stages']} stages"


def summary_rows(end: Record) -> Rows:
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


def rebalance_rows(rebalances: Sequence[Record]) -> Rows:
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


def _table(head: Sequence[str], rows: Rows) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ["".join(_cell(value) for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def _cell(value: str) -> str:
    kind = ' class="n"' if value[:1].isdigit() else ""
    return f"<td{kind}>{escape(value)}</td>"
