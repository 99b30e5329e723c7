"""The documentation of the "model" block, whose models need torch."""

from __future__ import annotations

import re
from pathlib import Path

from ds_dynmo.models.config import ModelConfig
from tests.pure.test_docs import keys

CASES = Path(__file__).resolve().parents[2] / "docs" / "cases.md"


def test_the_page_of_cases_lists_the_keys_of_the_block() -> None:
    listed = re.findall(r"^\| `([\w.]+)` \| (?:required|`)", CASES.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(keys(ModelConfig))
