"""Names and docstrings of the package: one class per name, and first lines that say what a function does."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.sources import nodes_of

PACKAGE = Path(__file__).parents[2] / "ds_dynmo"

# Words that begin a question, a noun phrase or an inverted sentence, and verbs that have a better word: "Return".
NO_IMPERATIVES = {
    "A", "After", "All", "An", "Any", "Are", "As", "At", "Before", "Both", "By", "Can", "Did", "Does", "Each",
    "Every", "For", "From", "Give", "Given", "Gives", "Has", "Have", "Here", "How", "If", "In", "Inside", "Is",
    "Its", "Like", "May", "Most", "No", "None", "Of", "On", "One", "Only", "Other", "Per", "Should", "Tell",
    "Tells", "That", "The", "Their", "There", "These", "This", "Those", "To", "Under", "Was", "Were", "What",
    "When", "Where", "Whether", "Which", "While", "Who", "Whose", "Why", "Will", "With", "Without",
}  # fmt: skip
VERBS_IN_S = frozenset({"Address", "Compress", "Cross", "Discuss", "Dismiss", "Express", "Focus", "Pass", "Process"})
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")


def problem(line: str) -> str | None:
    """Return why a docstring's first line is no imperative; None: it is one."""
    first = line.partition(" ")[0].rstrip(",:")
    if not line:
        return None
    if line.endswith("?"):
        return "a question"
    if not (first[0].isalpha() and first[0].isupper()):
        return "does not begin with a word"
    if first in NO_IMPERATIVES:
        return f'begins with "{first}"'
    if first.endswith("s") and first not in VERBS_IN_S:
        return f'"{first}" is no imperative'
    return None


def problem_of_noun(line: str) -> str | None:
    """Return what is wrong with the first line of a class or a property, which may be a noun phrase; None: nothing."""
    if line.endswith("?"):
        return "a question"
    return "an imperative" if line.split(" ")[0] in ("Give", "Return", "Tell") else None


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("room", [*ROOMS, "."])
def test_first_lines_of_docstrings(room: str) -> None:
    found = []
    for path in sorted((PACKAGE / room).glob("*.py" if room == "." else "**/*.py")):
        for node in nodes_of(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            line = (ast.get_docstring(node) or "").partition("\n")[0]
            is_function = not isinstance(node, ast.ClassDef) and not is_property(node)
            why = problem(line) if is_function else problem_of_noun(line)
            if line and why:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {why}: {line}")
    assert not found, "\n".join(found)


def test_names_of_classes_differ() -> None:
    """Also private ones, and those that only an underscore tells apart."""
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared
