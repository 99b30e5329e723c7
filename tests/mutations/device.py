"""Breakages that only a device shows: a missing wait, a needless one, the device's random numbers."""

from __future__ import annotations

from functools import partial

from tests.emulated import NAME
from tests.mutations.mutation import Mutation

on_device = partial(Mutation, accelerator=NAME)

MUTATIONS = [
    on_device(
        "transfers do not wait for the layers' work",
        "TransferStream.after_compute",
        "self._stream.wait_stream(get_accelerator().current_stream())",
        "pass",
        "tests/accelerator/test_transfers.py",
    ),
    on_device(
        "messages between stages are not waited for",
        "_PostedOperations.wait",
        "work.wait()",
        "pass",
        "tests/accelerator/test_schedules.py -k two_stages",
    ),
    on_device(
        "the host waits for the gradient norm",
        "clipping.scale_gradients",
        "factor.masked_fill_(~(factor < 1.0), 1.0)",
        "factor.fill_(min(factor.item(), 1.0))",
        "tests/emulated/test_synchronisations.py",
    ),
    on_device(
        "layers draw from the stage's generator on the device",
        "TorchGenerators.__init__",
        "accelerator.device_name() != 'cpu'",
        "False",
        "tests/accelerator/test_several_devices.py::test_moves_change_nothing -k fp32",
    ),
]
