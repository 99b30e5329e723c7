"""What is known about breakages of random lines, by their names: those that nobody can see, and tests of others."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
"""Why a breakage changes nothing that anybody sees."""

CAUGHT_BY: dict[str, str] = {}
"""The quick tests that catch a breakage, with blanks between: they are tried before those that take less time."""
