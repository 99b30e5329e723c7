"""What the default process group tells, whatever its backend is called and whichever devices it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_dynmo.engine.comm import bounded

TIMEOUT = timedelta(seconds=77)
OTHER = "ds_dynmo_other"  # as xccl or hccl: no backend of torch's, for devices that are neither "cuda" nor "cpu"

dist.Backend.register_backend(
    OTHER, lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["hpu"]
)


@contextmanager
def default_group(backend: str) -> Iterator[None]:
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "devices"),
    [
        ("gloo", {"cpu", "cuda"}),
        ("cpu:gloo,cuda:gloo", {"cpu", "cuda"}),
        (f"cpu:gloo,hpu:{OTHER}", {"cpu", "hpu"}),
        (OTHER, {"hpu"}),
    ],
)
def test_the_backend_of_a_device_that_the_group_serves_tells_the_time_out(backend: str, devices: set[str]) -> None:
    with default_group(backend):
        assert set(bounded.served_devices()) == devices
        assert bounded.default_timeout() == TIMEOUT


def test_a_backend_that_does_not_tell_has_torchs_default() -> None:
    with default_group("fake"):
        assert bounded.default_timeout() == dist.default_pg_timeout


@pytest.mark.parametrize(
    ("backend", "name", "is_bound"),
    [
        ("gloo", "cuda:1", True),
        ("gloo", "cpu", False),
        ("cpu:gloo", "cuda:1", False),
        (f"cpu:gloo,hpu:{OTHER}", "hpu:1", False),  # torch could, but then refuses the control plane's group
    ],
)
def test_a_world_is_bound_to_a_device_that_all_its_groups_can_serve(
    backend: str, name: str, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "get_accelerator", lambda: SimpleNamespace(current_device_name=lambda: name))
    with default_group(backend):
        assert bounded.bindable_device() == (torch.device(name) if is_bound else None)
