"""Which tests ``scripts/test.sh --changed`` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.changed import changed_files, concerned

FILES = {
    "ds_dynmo/errors.py": "",
    "ds_dynmo/partitioners/__init__.py": "from ds_dynmo.partitioners.balanced import balanced",
    "ds_dynmo/partitioners/balanced.py": "from ds_dynmo.errors import PartitionError",
    "ds_dynmo/engine/run/executor.py": "def run():\n    from ds_dynmo.engine.run import parts",
    "ds_dynmo/engine/run/parts.py": "",
    "ds_configs/gpt.json": "{}",
    "docs/api.md": "",
    "tests/support/small.py": "",
    "tests/partitioners/test_balanced.py": "from ds_dynmo.partitioners import balanced",
    "tests/partitioners/test_other.py": "from ds_dynmo.errors import PartitionError",
    "tests/engine/run/test_executor.py": "import ds_dynmo.engine.run.executor\nimport tests.support.small",
    "tests/engine/test_bitwise.py": "from ds_dynmo.partitioners import balanced",
    "tests/cli/test_config.py": 'PATH = "ds_configs/gpt.json"',
    "tests/source/test_docs.py": "",
}
CONCERNED = {
    "ds_dynmo/partitioners/balanced.py": ["tests/partitioners/test_balanced.py"],
    "ds_dynmo/engine/run/parts.py": ["tests/engine/run/test_executor.py", "tests/engine/test_bitwise.py"],
    "ds_dynmo/errors.py": ["tests/partitioners/test_other.py"],  # its package has no tests of its own
    "tests/support/small.py": ["tests/engine/run/test_executor.py"],
    "tests/cli/test_config.py": ["tests/cli/test_config.py"],
    "ds_configs/gpt.json": ["tests/cli/test_config.py"],
    "docs/api.md": [],
}


def test_a_change_concerns_its_package_its_importers_and_who_names_it(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, tests in CONCERNED.items():
        assert concerned([name], tmp_path) == ["tests/source", *tests], name
    assert concerned([], tmp_path) == []


def test_changed_is_what_differs_from_main_with_new_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet", "--initial-branch=main")
    for number, name in enumerate(("first", "committed", "edited", "new")):
        (tmp_path / name).write_text(name)
        if number < 3:
            git("add", "--all")
            git("commit", "--quiet", "--message", name)
        if name == "first":
            git("checkout", "--quiet", "-b", "branch")
    (tmp_path / "edited").write_text("again")
    assert changed_files(tmp_path, None) == ["committed", "edited", "new"]
    assert changed_files(tmp_path, "HEAD") == ["edited", "new"]
