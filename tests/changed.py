"""Print the tests that concern what changed: ``python -m tests.changed [COMMIT]``, for ``scripts/test.sh --changed``.

Changed is what differs from where the branch left main (or from COMMIT), and what git does not know yet. By the table
of imports, these tests concern a module of the package: those of its own package that reach it, and the bitwise table
if it is of the engine; if its package has no tests of its own, those that import it. A file of tests/support concerns
the tests that reach it, another file those that name it. Whatever changes, the source is tested: imports, names, pages.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BITWISE = "tests/engine/test_bitwise.py"
ALWAYS = "tests/source"


def changed_files(root: Path, since: str | None) -> list[str]:
    """Return what differs from a commit, or from where the branch left main, with files that git does not know."""
    base = since or _git(root, "merge-base", "HEAD", "main", check=False).strip() or "HEAD"
    differing = _git(root, "diff", "--name-only", base).splitlines()
    return sorted({*differing, *_git(root, "ls-files", "--others", "--exclude-standard").splitlines()})


def _git(root: Path, *arguments: str, check: bool = True) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def imports_of(path: Path, modules: Mapping[str, str]) -> set[str]:
    """Return the files, of those in ``modules`` by name, that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {modules[name] for name in names if name in modules}
    return found


def table_of_imports(root: Path) -> dict[str, set[str]]:
    """Return, by file of the package and of tests, the files of these that it imports."""
    files = [path for folder in ("ds_dynmo", "tests") for path in sorted((root / folder).rglob("*.py"))]
    names = {path: str(path.relative_to(root)) for path in files}
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in names.values()}
    return {name: imports_of(path, modules) for path, name in names.items()}


def reached(table: Mapping[str, set[str]], file: str, within: str) -> set[str]:
    """Return what a file reaches by imports, through files below the folder ``within``."""
    found, left = set(), [file]
    while left:
        for imported in table.get(left.pop(), set()) - found:
            found.add(imported)
            if imported.startswith(within):
                left.append(imported)
    return found


def concerned(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the files and folders of tests that concern the changed files."""
    table = table_of_imports(root)
    tests = [name for name in table if Path(name).name.startswith("test_")]
    by_support = {test: {test} | reached(table, test, "tests/") for test in tests}
    chosen: set[str] = set()
    for name in changed:
        if name.startswith("tests/") and name.endswith(".py"):
            chosen |= {test for test in tests if name in by_support[test]}
        elif name.startswith("ds_dynmo/") and name.endswith(".py"):
            folder = Path("tests", Path(name).parent.relative_to("ds_dynmo"))
            near = {test for test in tests if Path(test).parent == folder and name in reached(table, test, "")}
            chosen |= near or {test for test in tests if name in table[test]}
            chosen |= {BITWISE} if name.startswith("ds_dynmo/engine/") else set()
        else:
            chosen |= {test for test in tests if f'{Path(name).name}"' in (root / test).read_text()}
    chosen = {test for test in chosen if not test.startswith(f"{ALWAYS}/")}
    return [ALWAYS, *sorted(chosen)] if changed else []


def main(arguments: Sequence[str]) -> int:
    """Print the tests, one per line, and say on standard error how many files changed."""
    changed = changed_files(ROOT, arguments[0] if arguments else None)
    tests = concerned(changed, ROOT)
    print(f"{len(changed)} files changed; they concern {len(tests)} files or folders of tests", file=sys.stderr)
    print("\n".join(tests))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
