"""A small breakage of the code, and the tests that catch it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A breakage.

    Attributes:
        name: the behaviour that is wrong, in a few words. It holds wherever the code is.
        file: below the checkout.
        old, new: text that occurs once in the file, and what it becomes.
        tests: pytest's arguments, as a shell would split them: those that should fail, of what a user sees.
        accelerator: what DS_ACCELERATOR is for them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    accelerator: str = "cpu"
