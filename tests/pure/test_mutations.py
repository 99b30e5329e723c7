"""The list of breakages can be applied to the code as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.device import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1 and mutation.new != mutation.old
    files = [word.partition("::")[0] for word in mutation.tests.split() if word.startswith("tests/")]
    assert files and all((ROOT / file).is_file() for file in files)


def test_names_of_mutations_differ() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
