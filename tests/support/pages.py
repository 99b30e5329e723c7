"""Read the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_blocks(page: str, heading: str, language: str) -> list[str]:
    """Return the code blocks of ``language`` under a heading of a page in docs/."""
    text = (ROOT / "docs" / page).read_text()
    marks = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert marks is not None, heading
    section = re.split(rf"^#{{1,{len(marks[1])}}} ", text[marks.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]
