"""The list of breakages can be applied to the code as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies(mutation: Mutation) -> None:
    assert mutation.anchor != mutation.new
    path, broken = mutation.broken(ROOT)
    compile(broken, path, "exec")
    tests = [word for word in shlex.split(mutation.tests) if word.startswith("tests/")]
    assert tests
    for file, _, function in (word.partition("::") for word in tests):
        assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text()


def test_names_of_mutations_differ() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
