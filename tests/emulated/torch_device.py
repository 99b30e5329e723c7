"""The emulated device as torch knows it: device type "emulated", module ``torch.emulated``.

Importing this compiles the device if need be, and registers it.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.emulated import NAME, build

MEMORY = 8 << 30  # bytes that a device says it has

library: Any = build.load()  # device/module.cpp
torch.utils.rename_privateuse1_backend(NAME)

_sync_debug_mode = "default"
before_synchronize: list[Callable[[], None]] = []  # finish what other threads were asked for


def index_of(device: Any = None) -> int:
    """Return a device's index, that of the current one for None."""
    if isinstance(device, int):
        return device
    if device is None or (device := torch.device(device)).index is None:
        return int(library.current_device())
    return int(device.index)


# torch refuses subclasses of its Stream and Event, so these are functions.
def Stream(device: Any = None, priority: int = 0, **identity: Any) -> torch.Stream:
    """Return a new stream, or the one of ``stream_id``, ``device_index`` and ``device_type``."""
    return (
        torch.Stream(**identity) if identity else torch.Stream(torch.device(NAME, index_of(device)), priority=priority)
    )


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> torch.Event:
    """Return a new event."""
    return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one of its device."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def current_stream(device: Any = None) -> torch.Stream:
    """Return the current stream of a device."""
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Any = None) -> torch.Stream:
    """Return the stream that is current where no other was chosen."""
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)
    return Stream(stream_id=0, device_index=index_of(device), device_type=kind)


def synchronize(device: Any = None) -> None:
    """Wait for all streams."""
    for finish in before_synchronize:
        finish()
    torch.accelerator.synchronize(index_of(device))


class device:
    """Make a device the current one."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = library.current_device()
        library.set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        library.set_device(self.before)


class device_of(device):
    """Make the device of a tensor the current one, if it is of this kind."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == NAME else None)


def set_sync_debug_mode(mode: str) -> None:
    """Let waits of the host fail with mode "error", as ``torch.cuda`` does."""
    global _sync_debug_mode
    _sync_debug_mode = mode
    library.refuse_syncs(mode == "error")


def _generator(device: Any = None) -> torch.Generator:
    generator: torch.Generator = library.default_generator(index_of(device))
    return generator


def _seed_all(seed: int) -> None:
    for index in range(library.device_count()):
        _generator(index).manual_seed(int(seed))


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name="emulated accelerator", total_memory=MEMORY, major=0, minor=0)


def _register() -> None:
    module = types.ModuleType(f"torch.{NAME}")
    functions = dict(
        Stream=Stream,
        Event=Event,
        stream=stream,
        current_stream=current_stream,
        default_stream=default_stream,
        synchronize=synchronize,
        get_sync_debug_mode=lambda: _sync_debug_mode,
        set_sync_debug_mode=set_sync_debug_mode,
        device=device,
        device_of=device_of,
        device_count=library.device_count,
        current_device=library.current_device,
        set_device=lambda device: library.set_device(index_of(device)),
        is_available=lambda: library.device_count() > 0,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _lazy_call=lambda call: call(),
        _is_in_bad_fork=lambda: False,  # a fork of this process can use it
        manual_seed=lambda seed: _generator().manual_seed(int(seed)),
        manual_seed_all=_seed_all,
        seed=lambda: _generator().seed(),
        initial_seed=lambda: _generator().initial_seed(),
        get_rng_state=lambda device=None: _generator(device).get_state(),
        set_rng_state=lambda state, device=None: _generator(device).set_state(state),
        memory_allocated=lambda device=None: library.allocated(index_of(device)),
        memory_reserved=lambda device=None: library.allocated(index_of(device)),
        max_memory_allocated=lambda device=None: library.peak(index_of(device)),
        max_memory_reserved=lambda device=None: library.peak(index_of(device)),
        reset_peak_memory_stats=lambda device=None: library.reset_peak(index_of(device)),
        empty_cache=lambda: None,
        is_bf16_supported=lambda: True,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
        get_device_name=lambda device=None: _properties(device).name,
        get_device_properties=_properties,
        get_device_capability=lambda device=None: (0, 0),
    )
    for name, value in functions.items():
        setattr(module, name, value)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _let_autograd_rest() -> None:
    """Wait until autograd's threads are idle: one that frees a graph while Python ends aborts the process."""
    end, looks = time.monotonic() + 10.0, 0
    while looks < 3 and time.monotonic() < end:
        time.sleep(0.01)
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in _threads_of_autograd()]
        looks = 0 if set(states) - {"S"} else looks + 1


def _threads_of_autograd() -> list[Path]:
    tasks = Path("/proc/self/task").iterdir()
    return [task / "stat" for task in tasks if (task / "comm").read_text().startswith("pt_autograd")]


_register()
atexit.register(_let_autograd_rest)
