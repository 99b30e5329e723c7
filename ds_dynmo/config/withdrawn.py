"""What was withdrawn, by the name that a user wrote, and what to do instead.

Whoever reads such a name refuses it: :func:`refusal` says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_dynmo.errors import ConfigError

_ELASTIC_LAUNCH = "launch by torchrun --nnodes MIN:MAX with --resume, see docs/elastic.md"

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
    "--join": _ELASTIC_LAUNCH,
    "--routers": "commit 66bdfef has it, and scripts/routers.py, which wrote such files",
    "engine.join": _ELASTIC_LAUNCH,
}
"""Keys of the configuration, keys with a value as in JSON, flags and calls."""


def refusal(name: str) -> str | None:
    """Return why ``name`` is refused; None: it was not withdrawn."""
    return f"{name}: withdrawn; {WITHDRAWN[name]}" if name in WITHDRAWN else None


def check_withdrawn(given: Iterable[str]) -> None:
    """Refuse flags that commands no longer have.

    Raises:
        ConfigError: naming the flag, and what to do instead.
    """
    for word in given:
        if said := refusal(word.partition("=")[0]):
            raise ConfigError(said)
