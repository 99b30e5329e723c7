"""Memory limits: bytes, a fraction of the device's memory, or a string with a unit."""

from __future__ import annotations

import re
from typing import Any

_LEAST_BYTES = 2**20  # an int below is a mistaken unit
_UNITS = {"b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_ALLOWED = 'null, an int of bytes, a float in (0, 1], or a string such as "30GiB", "30GB" or "80%"'


def parse_memory_limit(limit: Any) -> int | float | None:
    """Return bytes as an int, or a fraction of the device's memory as a float in (0, 1].

    >>> parse_memory_limit("30GiB"), parse_memory_limit("1.5 MB"), parse_memory_limit("80%")
    (32212254720, 1500000, 0.8)

    Raises:
        ValueError: says what is allowed, and what an int below a mebibyte was probably meant to be.
    """
    if type(limit) is int and 0 < limit < _LEAST_BYTES:
        meant = f'"{limit}GiB"' + (f' or "{limit}%"' if 1 < limit <= 100 else "")
        raise ValueError(f"is {limit} bytes, and should be at least {_LEAST_BYTES}, 1 MiB; did you mean {meant}?")
    value = _with_unit(limit) if isinstance(limit, str) else limit
    if value is None or (type(value) is int and value > 0) or (type(value) is float and 0 < value <= 1):
        return value
    raise ValueError(f"should be {_ALLOWED}")


def _with_unit(text: str) -> int | float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+|%)", text.strip().lower())
    if match is None or match[2] not in (*_UNITS, "%"):
        raise ValueError(f"should be {_ALLOWED}")
    number = float(match[1])
    return number / 100 if match[2] == "%" else int(number * _UNITS[match[2]])
