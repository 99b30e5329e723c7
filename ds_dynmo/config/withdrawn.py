"""What was withdrawn, by the name that a user wrote, and what to do instead.

Whoever reads such a name refuses it: :func:`refusal` says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_dynmo.errors import ConfigError

_ELASTIC_LAUNCH = "launch by torchrun --nnodes MIN:MAX with --resume, see docs/elastic.md"
_TOKEN_IDS = "give rows with input_ids, as JSON lines, Parquet or by Dataset.save_to_disk, see docs/data.md"
LOAD_UNIVERSAL = "checkpoint.load_universal = true"

WITHDRAWN = {
    "dynmo.decentralized": 'rank 0 decides for all stages; remove it, "balancer": "diffusion" finds the same partition',
    "dynmo.repack.freed_ranks": "freed ranks are released; remove it",
    'dynmo.repack.release = "park"': f'released ranks exit, "release": "exit"; to have more later, {_ELASTIC_LAUNCH}',
    "model.case.schedule": "all routed blocks have one capacity; for a load that changes give a threshold",
    "model.case.probe": "give csr_from, the sparsity from which CSR is faster on your machine",
    "data.dtype": _TOKEN_IDS,
    "data.end_of_document": _TOKEN_IDS,
    "files of token ids": _TOKEN_IDS,
    LOAD_UNIVERSAL: 'load it once without the "dynmo" section, save, and go on from that',
}
"""Keys of the configuration, keys with a value as in JSON, and files."""

WITHDRAWN_FLAGS: dict[str, dict[str, str]] = {
    "ds-dynmo-plot": {"--never": "draw each report by itself"},
    "ds-dynmo-simulate": {
        flag: "python scripts/simulate_runs.py has it, in a checkout"
        for flag in ("--case", "--recorded", "--layers", "--replicas", "--interval", "--phases", "--seeds")
    },
}
"""Flags, by command."""


def refusal(name: str) -> str | None:
    """Return why ``name`` is refused; None: it was not withdrawn."""
    return f"{name}: withdrawn; {WITHDRAWN[name]}" if name in WITHDRAWN else None


def check_withdrawn(given: Iterable[str], command: str) -> None:
    """Refuse flags that ``command`` no longer has.

    Raises:
        ConfigError: naming the flag, and what to do instead.
    """
    flags = WITHDRAWN_FLAGS[command]
    for word in given:
        flag = word.partition("=")[0]
        if flag in flags:
            raise ConfigError(f"{flag}: withdrawn; {flags[flag]}")
