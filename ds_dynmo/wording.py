"""Words for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> counted(1, "stage"), counted(0, "stage")
    ('1 stage', '0 stages')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
