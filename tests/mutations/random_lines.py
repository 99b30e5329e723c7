"""Breakages of random lines of the largest modules: a condition inverted, a statement dropped, a number off by one.

Which lines is decided by a hash of the seed and of what is broken, so that a change of one function chooses other lines
in that function alone.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 64
MODULES = 40
PER_MODULE = 6
LOGGERS = ("logger", "log", "warnings")
OFF_BY_ONE: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


@dataclass(frozen=True)
class Breakage:
    """One piece of a file, and what it becomes.

    Attributes:
        file: below the checkout.
        place: the qualified name of the function.
        kind: "inverted", "dropped" or "off by one".
        begin, end: offsets of the piece in the file's bytes.
        first, last: its lines, from 1.
        old, new: the piece, as text.
        statement: the text of the statement's first line.
    """

    file: str
    place: str
    kind: str
    begin: int
    end: int
    first: int
    last: int
    old: str
    new: str
    statement: str

    @property
    def name(self) -> str:
        """What is broken, without a line number: it is the same as long as the piece is."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        change = f"{old} -> {new} in {self.statement}" if self.kind == "off by one" else old
        return f"{self.file.removeprefix('ds_dynmo/')} {self.place}: {self.kind}: {change}"

    def broken(self, root: Path) -> tuple[Path, str]:
        """Return the file in a checkout, and its text with the breakage."""
        path = root / self.file
        text = path.read_bytes()
        return path, (text[: self.begin] + self.new.encode() + text[self.end :]).decode()


def breakages(root: Path, seed: int = SEED, modules: int = MODULES, per_module: int = PER_MODULE) -> list[Breakage]:
    """Choose breakages of the largest modules of the package, some of each."""
    files = sorted((root / "ds_dynmo").rglob("*.py"), key=lambda path: (-path.read_bytes().count(b"\n"), path))
    chosen: list[Breakage] = []
    for path in files[:modules]:
        of_file: list[Breakage] = []
        for each in sorted(_all_of(path, root), key=lambda each: _hash(seed, each)):
            if all(
                (each.last < other.first or each.first > other.last) and each.name != other.name for other in of_file
            ):
                of_file.append(each)
        chosen += sorted(of_file[:per_module], key=lambda each: each.first)
    return chosen


def _hash(seed: int, breakage: Breakage) -> bytes:
    return hashlib.sha256(f"{seed} {breakage.name}".encode()).digest()


def _all_of(path: Path, root: Path) -> Iterator[Breakage]:
    """Yield every breakage of a file, one of each statement and kind."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.decode().splitlines()
    for place, statement in _statements(ast.parse(text), ""):
        for kind, node, new in _of(statement, text, starts):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            old, head = text[begin:end].decode(), lines[statement.lineno - 1].strip()
            file, first, last = str(path.relative_to(root)), node.lineno, node.end_lineno
            yield Breakage(file, place, kind, begin, end, first, last, old, new, head)


def _statements(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the statements within functions, with the function's name."""
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield from _statements(child, f"{prefix}.{child.name}".strip("."))
        elif isinstance(child, ast.stmt):
            if prefix and isinstance(parent, ast.AST) and not isinstance(parent, ast.ClassDef | ast.Module):
                yield prefix, child
            yield from _statements(child, prefix)
        elif isinstance(child, ast.excepthandler | ast.match_case):
            yield from _statements(child, prefix)


def _of(statement: ast.stmt, text: bytes, starts: list[int]) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield how a statement can be broken: the kind, the node, and its new text."""
    if isinstance(statement, ast.Assert | ast.Import | ast.ImportFrom) or _logs(statement):
        return
    if isinstance(statement, ast.If | ast.While) and not _only_for_types(statement):
        yield "inverted", statement.test, f"(not ({_text(statement.test, text, starts)}))"
    if _can_be_dropped(statement):
        yield "dropped", statement, "pass"
    for node in _own_expressions(statement):
        if isinstance(node, ast.IfExp):
            yield "inverted", node.test, f"(not ({_text(node.test, text, starts)}))"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield "off by one", node, str(node.value + 1)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OFF_BY_ONE:
            left, right = (_text(each, text, starts) for each in (node.left, node.comparators[0]))
            yield "off by one", node, f"{left} {OFF_BY_ONE[type(node.ops[0])]} {right}"


def _text(node: ast.expr, text: bytes, starts: list[int]) -> str:
    assert node.end_lineno is not None and node.end_col_offset is not None
    piece = text[starts[node.lineno - 1] + node.col_offset : starts[node.end_lineno - 1] + node.end_col_offset]
    return piece.decode()


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions of a statement, without those of statements in it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr | ast.withitem | ast.keyword):
            yield from ast.walk(child)


def _can_be_dropped(statement: ast.stmt) -> bool:
    """Return whether what follows can still run without the statement: a name that is missing is found at once."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in statement.targets)
    return isinstance(statement, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break)


def _logs(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[0] in LOGGERS


def _only_for_types(statement: ast.If | ast.While) -> bool:
    return ast.unparse(statement.test) == "TYPE_CHECKING"
