"""A small breakage of the code, and the tests that catch it."""

from __future__ import annotations

import ast
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Mutation:
    """A breakage.

    Attributes:
        name: the behaviour that is wrong, in a few words. It holds wherever the code is.
        place: the function or class that is broken: the end of its qualified name, as much as no other has.
        anchor, new: a piece that occurs once there, and what it becomes. It is looked for in the place as
            :func:`ast.unparse` writes it: comments, quotes and how lines are wrapped do not matter.
        tests: pytest's arguments, as a shell would split them: those that should fail, of what a user sees.
        accelerator: what DS_ACCELERATOR is for them.
    """

    name: str
    place: str
    anchor: str
    new: str
    tests: str
    accelerator: str = "cpu"

    @property
    def names(self) -> list[str]:
        """The files and tests of ``tests``."""
        return [word for word in shlex.split(self.tests) if word.startswith("tests/")]

    def broken(self, root: Path) -> tuple[Path, str]:
        """Find the place in the package of a checkout; return its file, and the file's text with the breakage.

        Raises:
            LookupError: none or several have the name, or the anchor does not occur once.
        """
        path, definition = self._found(root)
        written = ast.unparse(definition)
        if (times := written.count(self.anchor)) != 1:
            raise LookupError(f"{self.anchor} occurs {times} times, not once, in {path}:\n{written}")
        lines = path.read_text().split("\n")
        first = min(node.lineno for node in (definition, *definition.decorator_list))
        new = textwrap.indent(written.replace(self.anchor, self.new), " " * definition.col_offset)
        lines[first - 1 : definition.end_lineno] = new.split("\n")
        return path, "\n".join(lines)

    def lines(self, root: Path) -> tuple[int, int]:
        """Return the first and the last line of the place."""
        _, definition = self._found(root)
        assert definition.end_lineno is not None
        return definition.lineno, definition.end_lineno

    def _found(self, root: Path) -> tuple[Path, Definition]:
        found = [each for name, *each in _package(root) if name.endswith(f".{self.place}")]
        if len(found) != 1:
            raise LookupError(f"{self.place} is in {[str(path) for path, _ in found]}, not in one place")
        path, definition = found[0]
        return path, definition


@cache
def _package(root: Path) -> list[tuple[str, Path, Definition]]:
    """Return the functions and classes of a checkout's package, with their qualified names and files."""
    return [
        (name, path, definition)
        for path in sorted((root / "ds_dynmo").rglob("*.py"))
        for name, definition in _definitions(ast.parse(path.read_text()), ".".join(path.with_suffix("").parts))
    ]


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    """Yield the functions and classes below ``parent``, with their qualified names."""
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, Definition):
            yield (name := f"{prefix}.{child.name}"), child
            yield from _definitions(child, name)
