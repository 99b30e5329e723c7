"""A small breakage of the code, and the tests that catch it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A breakage.

    Attributes:
        name: what is wrong, in a few words.
        file: below the checkout.
        old, new: text that occurs once in the file, and what it becomes.
        tests: pytest's arguments: those that should fail.
        accelerator: what DS_ACCELERATOR is for them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    accelerator: str = "emulated"
