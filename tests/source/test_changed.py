"""Which tests ``scripts/test.sh --changed`` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import changed
from tests.changed import changed_files, concerned

FILES = {
    "ds_dynmo/errors.py": "",
    "ds_dynmo/partitioners/__init__.py": "from ds_dynmo.partitioners.balanced import balanced",
    "ds_dynmo/partitioners/balanced.py": "from ds_dynmo.errors import PartitionError",
    "ds_dynmo/engine/run/executor.py": "def run():\n    from ds_dynmo.engine.run import parts",
    "ds_dynmo/engine/run/parts.py": "",
    "ds_dynmo/engine/alone.py": "",
    "ds_configs/gpt.json": "{}",
    "docs/api.md": "",
    "tests/support/small.py": "from tests.support import smaller",
    "tests/support/smaller.py": "import ds_dynmo.engine.alone",
    "tests/partitioners/test_balanced.py": "from ds_dynmo.partitioners import balanced",
    "tests/partitioners/test_other.py": "from ds_dynmo.errors import PartitionError",
    "tests/engine/run/test_executor.py": "import ds_dynmo.engine.run.executor\nimport tests.support.small",
    "tests/engine/test_bitwise.py": "from ds_dynmo.partitioners import balanced",
    "tests/engine/run/test_parts.py": "if True:\n    import ds_dynmo.engine.run.parts",
    "tests/cli/test_config.py": 'PATH = "ds_configs/gpt.json"',
    "tests/cli/test_other_file.py": 'PATH = "ds_configs/gpt.json.old"',
    "tests/source/test_docs.py": "",
}
CONCERNED = {
    "ds_dynmo/partitioners/balanced.py": ["tests/partitioners/test_balanced.py"],
    "ds_dynmo/partitioners/__init__.py": ["tests/partitioners/test_balanced.py"],
    "ds_dynmo/engine/run/executor.py": ["tests/engine/run/test_executor.py", "tests/engine/test_bitwise.py"],
    "ds_dynmo/engine/run/parts.py": [
        *("tests/engine/run/test_executor.py", "tests/engine/run/test_parts.py", "tests/engine/test_bitwise.py")
    ],
    "ds_dynmo/engine/alone.py": ["tests/engine/test_bitwise.py"],
    "ds_dynmo/errors.py": ["tests/partitioners/test_other.py"],  # its package has no tests of its own
    "tests/support/smaller.py": ["tests/engine/run/test_executor.py"],
    "tests/cli/test_config.py": ["tests/cli/test_config.py"],
    "ds_configs/gpt.json": ["tests/cli/test_config.py"],
    "docs/api.md": [],
    "tests/source/test_docs.py": [],
    "ds_dynmo/removed.py": [],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_change_concerns_its_package_its_importers_and_who_names_it(checkout: Path) -> None:
    for name, tests in CONCERNED.items():
        assert concerned([name], checkout) == ["tests/source", *tests], name
    several = concerned(["ds_configs/gpt.json", "ds_dynmo/errors.py"], checkout)
    assert several == ["tests/source", "tests/cli/test_config.py", "tests/partitioners/test_other.py"]
    assert concerned([], checkout) == []


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *arguments], cwd=folder, check=True)


def test_changed_is_what_differs_from_main_with_new_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").touch()
    for number, name in enumerate(("first", "committed", "edited", "new")):
        (tmp_path / name).write_text(name)
        if number < 3:
            git(tmp_path, "add", "--all")
            git(tmp_path, "commit", "--quiet", "--message", name)
        if name == "first":
            git(tmp_path, "checkout", "--quiet", "-b", "branch")
    (tmp_path / "edited").write_text("again")
    git(tmp_path, "stash", "--quiet")  # meanwhile main goes on
    git(tmp_path, "checkout", "--quiet", "main")
    git(tmp_path, "rm", "--quiet", "first")
    git(tmp_path, "commit", "--quiet", "--message", "of others")
    git(tmp_path, "checkout", "--quiet", "branch")
    git(tmp_path, "stash", "pop", "--quiet")
    assert changed_files(tmp_path, None) == ["committed", "edited", "new"]
    assert changed_files(tmp_path, "HEAD") == ["edited", "new"]
    with pytest.raises(SystemExit, match=r"git diff --name-only nothing: .*nothing"):
        changed_files(tmp_path, "nothing")


def test_the_command_prints_a_test_per_line(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Since a commit, or since HEAD where there is no branch main."""
    git(checkout, "init", "--quiet", "--initial-branch=trunk")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "all")
    monkeypatch.setattr(changed, "ROOT", checkout)
    for arguments in ([], ["HEAD"]):
        (checkout / "ds_dynmo" / "errors.py").write_text("")
        assert changed.main(arguments) == 0
        assert capsys.readouterr() == ("\n", "0 files changed; they concern 0 files or folders of tests\n")
        (checkout / "ds_dynmo" / "errors.py").write_text("# another")
        assert changed.main(arguments) == 0
        said = "1 files changed; they concern 2 files or folders of tests\n"
        assert capsys.readouterr() == ("tests/source\ntests/partitioners/test_other.py\n", said)
    git(checkout, "commit", "--quiet", "--all", "--message", "errors")
    assert changed.main(["HEAD~1"]) == 0
    assert capsys.readouterr().err == said
