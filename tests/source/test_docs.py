"""The documentation against the tree: links, length, paths, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, names

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MOST_README_LINES = 150


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_relative_link_and_anchor_resolves(page: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert not broken


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


def test_the_readmes_diff_is_an_excerpt_of_an_example() -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    shown = [line[2:].strip() for line in diff.splitlines() if not line.startswith("-")]
    lines = iter((ROOT / "examples" / "own_model.py").read_text().splitlines())  # in functions there: indented more
    missing = [line for line in shown if not any(line == there.strip() for there in lines)]
    assert len(shown) > 10 and not missing  # in the same order
    assert all("ds_dynmo" in line or "deepspeed" in line for line in diff.splitlines() if line.startswith("-"))


def test_nothing_tells_to_install_from_an_index_what_is_in_none() -> None:
    for path in (*PAGES, *(ROOT / "ds_dynmo").rglob("*.py"), *(ROOT / "scripts").glob("*")):
        if path.is_file():
            assert not re.search(r"pip install [\"']?ds[_-]dynmo", path.read_text()), path
    assert re.search(r"^Not on PyPI\.", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_every_page_is_in_the_sites_navigation() -> None:
    listed = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


def test_the_sites_first_page_has_the_readmes_list_of_pages() -> None:
    listed = (ROOT / "README.md").read_text().partition("\n## Documentation\n\n")[2].partition("\n\n")[0]
    assert listed.startswith("- ") and listed.replace("](docs/", "](") in (ROOT / "docs" / "index.md").read_text()


def test_the_page_of_the_design_lists_every_package() -> None:
    """Those of ds_dynmo and of its engine, and the modules beside them."""
    rows = re.findall(r"^\| (`ds_dynmo/.+?) \| ", (ROOT / "docs" / "internals" / "design.md").read_text(), re.MULTILINE)
    package = ROOT / "ds_dynmo"
    modules = {path for path in package.glob("*.py") if path.name != "__init__.py"}
    packages = {init.parent for folder in (package, package / "engine") for init in folder.glob("*/__init__.py")}
    assert sorted(name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)) == sorted(
        str(path.relative_to(ROOT)) for path in modules | packages
    )


def test_what_contributors_are_told_to_change_is_in_the_file() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    told = re.findall(r"`(\w+)`(?: and `(\w+)`)? in\s+`((?:ds_dynmo|scripts|tests)/[\w/]+\.py)`", page)
    assert len(told) >= 5
    missing = [(name, path) for *names, path in told for name in names if name not in (ROOT / path).read_text()]
    assert not missing


COMMANDS = "\n".join(page.read_text() for page in PAGES)


def test_every_configuration_is_launched_by_a_command() -> None:
    launched = set(re.findall(r"ds_configs/\w+\.json", COMMANDS))
    assert launched == {f"ds_configs/{path.name}" for path in (ROOT / "ds_configs").glob("*.json")}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_path_of_the_tree_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"(?:scripts|examples|ds_dynmo|tests|ds_configs)/[\w/.]*[\w/]", page.read_text())
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing
