"""DeepSpeed's view of the emulated device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

import tests.emulated.backend
from tests.emulated import NAME
from tests.emulated.torch_device import MEMORY

DEVICE: Any = torch.emulated  # type: ignore[attr-defined]


def _tensor(dtype: torch.dtype) -> Any:
    return staticmethod(partial(torch.tensor, dtype=dtype, device=NAME))


class EmulatedAccelerator(DeepSpeedAccelerator):
    """Answers as DeepSpeed's accelerator for CUDA does, by ``torch.emulated``. There are no graphs and no Triton."""

    def __init__(self) -> None:
        self._name = NAME
        self._communication_backend_name = "emulated_nccl"
        self._compile_backend = "eager"

    # Devices
    device = staticmethod(DEVICE.device)
    set_device = staticmethod(DEVICE.set_device)
    current_device = staticmethod(DEVICE.current_device)
    device_count = staticmethod(DEVICE.device_count)
    synchronize = staticmethod(DEVICE.synchronize)
    is_available = staticmethod(DEVICE.is_available)

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    def visible_devices_envs(self) -> list[str]:
        return ["EMULATED_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Leave a launched rank all devices: it takes the one of its local rank. DeepSpeed's launcher reads the key."""
        current_env["EMULATED_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))

    # Order of work: the host runs ahead of the device
    def is_synchronized_device(self) -> bool:
        return False

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device
    Stream = staticmethod(DEVICE.Stream)
    Event = staticmethod(DEVICE.Event)
    stream = staticmethod(DEVICE.stream)
    current_stream = staticmethod(DEVICE.current_stream)
    default_stream = staticmethod(DEVICE.default_stream)

    def lazy_call(self, callback: Any) -> None:
        callback()

    # Random numbers
    get_rng_state = staticmethod(DEVICE.get_rng_state)
    set_rng_state = staticmethod(DEVICE.set_rng_state)
    manual_seed = staticmethod(DEVICE.manual_seed)
    manual_seed_all = staticmethod(DEVICE.manual_seed_all)
    initial_seed = staticmethod(DEVICE.initial_seed)

    def random(self) -> Any:
        return torch.random

    def default_generator(self, device_index: int) -> torch.Generator:
        return tests.emulated.torch_device.library.default_generator(device_index)

    # Memory
    empty_cache = staticmethod(DEVICE.empty_cache)
    memory_allocated = memory_reserved = memory_cached = staticmethod(DEVICE.memory_allocated)
    max_memory_allocated = max_memory_reserved = max_memory_cached = staticmethod(DEVICE.max_memory_allocated)
    reset_peak_memory_stats = staticmethod(DEVICE.reset_peak_memory_stats)
    reset_max_memory_allocated = reset_max_memory_cached = staticmethod(DEVICE.reset_peak_memory_stats)

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(device_index),
            "allocated_bytes.all.peak": self.max_memory_allocated(device_index),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        return MEMORY

    def available_memory(self, device_index: int | None = None) -> int:
        return MEMORY - self.memory_allocated(device_index)

    # Types
    BFloat16Tensor = _tensor(torch.bfloat16)
    ByteTensor = _tensor(torch.uint8)
    DoubleTensor = _tensor(torch.double)
    FloatTensor = _tensor(torch.float)
    HalfTensor = _tensor(torch.half)
    IntTensor = _tensor(torch.int)
    LongTensor = _tensor(torch.long)

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    is_fp16_supported = is_bf16_supported

    # Communication
    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def communication_backend_version(self) -> tuple[int, int]:
        return 2, 0

    # What DeepSpeed and torch compile
    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder.cpu"

    def get_op_builder(self, class_name: str) -> type:
        from tests.emulated.operators import builder_of  # imports what asks for the accelerator

        return builder_of(class_name)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    def is_triton_supported(self) -> bool:
        return False

    def export_envs(self) -> list[str]:
        return ["DS_ACCELERATOR"]

    # Ranges of profilers and graphs
    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Mark nothing: no profiler reads ranges of this device."""

    def range_pop(self, domain: Any = None) -> None:
        """Mark nothing."""

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        raise NotImplementedError("the emulated device has no graphs")

    def replay_graph(self, graph: Any) -> None:
        raise NotImplementedError("the emulated device has no graphs")
