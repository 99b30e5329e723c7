"""What was withdrawn, by the name that a user wrote, and what to do instead.

Whoever reads such a name refuses it: :func:`refusal` says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_dynmo.errors import ConfigError

_ELASTIC_LAUNCH = "launch by torchrun --nnodes MIN:MAX with --resume, see docs/elastic.md"

_TOKEN_IDS = "give rows with input_ids, as JSON lines, Parquet or by Dataset.save_to_disk, see docs/data.md"

_CASES = ("moe", "pruning", "freezing", "mod", "early_exit")

WITHDRAWN = {
    "dynmo.repack.accept_joins": _ELASTIC_LAUNCH,
    "dynmo.repack.release_attempts": "each re-packing releases what earlier ones could not; a program can try longer",
    'dynmo.repack.release = "slurm"': '"release": "command" with a program that calls scontrol, see docs/elastic.md',
    **{f"model.{kind}": f'write "case": {{"kind": "{kind}", ...}}, see docs/cases.md' for kind in _CASES},
    "model.sparse_attention": 'write "case": {"kind": "sparse_attention", "pattern": ...}, see docs/cases.md',
    "model.case.cache_bytes": "outputs of frozen layers are not kept; remove it",
    "model.case.block_size": "single weights are pruned, which is as fast; remove it",
    "model.case.loss_tokens": "the loss of an exit counts all tokens; remove it",
    "engine.join": _ELASTIC_LAUNCH,
    "data.dtype": _TOKEN_IDS,
    "data.end_of_document": _TOKEN_IDS,
    "files of token ids": _TOKEN_IDS,
}
"""Keys of the configuration, keys with a value as in JSON, calls, and files."""

WITHDRAWN_FLAGS = {
    "ds-dynmo-train": {
        "--join": _ELASTIC_LAUNCH,
        "--model": "--set model.huggingface=FOLDER",
        "--peft": "--set model.peft={}, or with keys of peft's LoraConfig in it",
        "--seed": "--set model.seed=N",
        "--trace": '--set \'dynmo.trace={"path": "FILE", "steps": [FIRST, LAST]}\'',
    },
    "ds-dynmo-plot": {
        "--routers": "commit 66bdfef has it, and scripts/routers.py, which wrote such files",
        "--rows": "python scripts/draw.py rows FILE PICTURE, in a checkout",
        "--schedules": "python scripts/draw.py schedules STAGES MICRO_BATCHES PICTURE, in a checkout",
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
