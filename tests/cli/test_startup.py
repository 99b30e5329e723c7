"""What a rank finds out before its process group exists."""

from __future__ import annotations

import os
import re
import socket

import pytest

from ds_dynmo.cli import startup
from ds_dynmo.engine.comm.same_facts import differences
from ds_dynmo.errors import ConfigError


class Accelerator:
    def __init__(self, name: str, devices: int) -> None:
        self._name, self._devices = name, devices
        self.taken: list[int] = []

    def device_name(self) -> str:
        return self._name

    def device_count(self) -> int:
        return self._devices

    def set_device(self, number: int) -> None:
        self.taken.append(number)


@pytest.mark.parametrize("accelerator", [Accelerator("cuda", 2), Accelerator("cpu", 1)])
def test_a_rank_takes_the_accelerator_with_its_number(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU ranks share what there is, and see no GPU, although DeepSpeed's launcher shows them some."""
    monkeypatch.setattr(startup, "get_accelerator", lambda: accelerator)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    startup.take_device(1)
    assert accelerator.taken == [1]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if accelerator.device_name() == "cpu" else "0,1")


def test_a_rank_that_sees_one_accelerator_of_its_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator("cuda", 1)
    monkeypatch.setattr(startup, "get_accelerator", lambda: accelerator)
    with pytest.raises(ConfigError, match="LOCAL_RANK = 1: this process sees 1 accelerators") as refused:
        startup.take_device(1)
    assert "all of a host's" in str(refused.value) and not accelerator.taken


def test_what_differs_between_ranks_is_named() -> None:
    assert differences([{"a": "1", "b": "2"}] * 3) == []
    found = differences([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"b": "2"}])
    assert found == ["a: 1 on ranks [0, 1], nothing on ranks [2]", "b: 2 on ranks [0, 2], 3 on ranks [1]"]


def test_a_port_of_another_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        named = re.escape(f"MASTER_ADDR = 127.0.0.1, MASTER_PORT = {port}: ranks cannot meet there: ")
        with pytest.raises(ConfigError, match=f"{named}.*address already in use"):
            startup.init_distributed()
