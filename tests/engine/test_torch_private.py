"""A torch that lacks a private name is refused by that name, and its settings stay the user's."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ds_dynmo.errors import ConfigError
from ds_dynmo.torch_private import NEEDED, check_torch, lazy_gloo


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


@pytest.mark.parametrize("setting", [None, "0"])
def test_when_groups_of_the_users_connect_stays_as_it_was_set(
    monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    name = "TORCH_GLOO_LAZY_INIT"
    monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(name, setting)
    lazy_gloo(dist.HashStore(), 0, 1, timedelta(seconds=60.0))
    assert os.environ.get(name) == setting
