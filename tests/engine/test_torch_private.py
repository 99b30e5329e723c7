"""A torch that lacks a private name is refused by that name."""

from __future__ import annotations

import pytest
import torch

from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import NEEDED, check_torch


def test_this_torch_has_all_names() -> None:
    check_torch()


def test_missing_names_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    wanted = (*NEEDED, "torch:Tensor._of_next_year", "torch._next_year:name")
    with pytest.raises(ConfigError) as caught:
        check_torch(wanted)
    assert f"torch {torch.__version__} has no torch._C._current_graph_task_id, torch.Tensor._of_next_year, " in str(
        caught.value
    )
    assert "torch._next_year.name, which ds_dynmo relies on: install a version" in str(caught.value)
