"""Breakages that only a device shows: a missing wait, a wrong stream, memory that is let go, the wrong device."""

from __future__ import annotations

from functools import partial

from tests.emulated import NAME
from tests.mutations.mutation import Mutation

COMM = "ds_dynmo/engine/comm"
MOVES = "tests/accelerator/test_several_devices.py::test_moves_change_nothing"
PHASES = "tests/accelerator/test_transfers.py"
SCHEDULES = "tests/accelerator/test_schedules.py"
WAITS = "tests/emulated/test_synchronisations.py"
LOSSES = "tests/emulated/test_communication.py -k loss"

on_device = partial(Mutation, accelerator=NAME)

MUTATIONS = [
    on_device(
        "transfers do not wait for the layers' work",
        f"{COMM}/transfer_stream.py",
        "        self._stream.wait_stream(get_accelerator().current_stream())\n",
        "",
        PHASES,
    ),
    on_device(
        "layers do not wait for transfers",
        f"{COMM}/transfer_stream.py",
        "        get_accelerator().current_stream().wait_stream(self._stream)\n",
        "",
        PHASES,
    ),
    on_device(
        "what has arrived is copied without a wait",
        f"{COMM}/pending.py",
        "                work.wait(self._timeout)\n            for tensor",
        "                pass\n            for tensor",
        PHASES,
    ),
    on_device(
        "messages between stages are not waited for",
        f"{COMM}/channels.py",
        "        for work in self.works:\n            work.wait()\n",
        "",
        SCHEDULES + " -k two_stages",
    ),
    on_device(
        "the loss is read before it has arrived",
        f"{COMM}/posted.py",
        "            work.wait()\n            self._work = None",
        "            self._work = None",
        LOSSES,
    ),
    on_device(
        "two neighbours use different groups",
        f"{COMM}/neighbour_links.py",
        "group, rank = self._groups[min(stage, self._stage) % 2]",
        "group, rank = self._groups[self._stage % 2]",
        SCHEDULES + " -k dynamic_shapes",
    ),
    on_device(
        "two messages of one stage are posted in the other order",
        f"{COMM}/channels.py",
        "        for batch in [operations] if fixed else [[operation] for operation in operations]:",
        "        for batch in [operations[::-1]] if fixed else [[operation] for operation in operations[::-1]]:",
        SCHEDULES + " -k several_tensors",
    ),
    on_device(
        "a group's first operation is between two ranks",
        f"{COMM}/device_group.py",
        "        dist.all_reduce(torch.zeros(1, device=device), group=group)\n",
        "",
        SCHEDULES + " -k four_stages",
    ),
    on_device(
        "a group is connected by a tensor of the CPU",
        f"{COMM}/device_group.py",
        "torch.zeros(1, device=device)",
        "torch.zeros(1)",
        SCHEDULES + " -k dynamic_shapes",
    ),
    on_device(
        "a group is connected by a tensor of the first device",
        f"{COMM}/device_group.py",
        "torch.zeros(1, device=device)",
        "torch.zeros(1, device=torch.device(device.type, 0))",
        SCHEDULES + " -k dynamic_shapes",
    ),
    on_device(
        "sums over the world are taken of tensors of the CPU",
        f"{COMM}/communicator.py",
        "        moved = numbers.to(self.device, copy=True)\n        dist.all_reduce(moved)\n",
        "        moved = numbers.cpu()\n        dist.all_reduce(moved)\n",
        MOVES + " -k zero1",
    ),
    on_device(
        "which gradients go back is announced in the CPU's memory",
        "ds_dynmo/engine/run/gradient_flags.py",
        "announced = torch.zeros(_MOST, dtype=torch.uint8, device=engine.device)",
        "announced = torch.zeros(_MOST, dtype=torch.uint8)",
        SCHEDULES + " -k masks",
    ),
    on_device(
        "sums over the model are taken of tensors of the CPU",
        f"{COMM}/communicator.py",
        "        moved = numbers.to(self.device, copy=True)\n"
        "        dist.all_reduce(moved, group=self.grid.get_model_parallel_group())",
        "        moved = numbers.cpu()\n        dist.all_reduce(moved, group=self.grid.get_model_parallel_group())",
        MOVES + " -k fp32",
    ),
    on_device(
        "small numbers travel on the device's group",
        f"{COMM}/communicator.py",
        "PostedMaximum(numbers, self._control, timeout)",
        "PostedMaximum(numbers, dist.group.WORLD, timeout)",
        MOVES + " -k fp32",
    ),
    on_device(
        "a layer arrives in the CPU's memory",
        "ds_dynmo/engine/move/arriving.py",
        'where = torch.device("cpu") if meta.on_cpu else device',
        'where = torch.device("cpu")',
        MOVES + " -k fp32",
    ),
    on_device(
        "a layer arrives on the first device",
        "ds_dynmo/engine/move/arriving.py",
        'where = torch.device("cpu") if meta.on_cpu else device',
        "where = torch.device(device.type, 0)",
        MOVES + " -k fp32",
    ),
    on_device(
        "placeholders of empty parameter groups lie on the CPU",
        "ds_dynmo/engine/state/parameter_groups.py",
        "nn.Parameter(torch.zeros(1, dtype=dtype, device=device))",
        "nn.Parameter(torch.zeros(1, dtype=dtype))",
        MOVES + " -k zero1",
    ),
    on_device(
        "trackers of tensor-parallel random states forget the device",
        "ds_dynmo/engine/run/rng_trackers.py",
        '        if get_accelerator().device_name() != "cpu":',
        "        if False:",
        "tests/engine/run/test_trackers.py",
    ),
    on_device(
        "squares are summed on the CPU",
        "ds_dynmo/engine/state/clipping.py",
        "squares = torch.zeros(num_layers, location.tp_size, location.replicas, dtype=torch.float64, device=device)",
        "squares = torch.zeros(num_layers, location.tp_size, location.replicas, dtype=torch.float64)",
        WAITS,
    ),
    on_device(
        "the host waits for the gradient norm",
        "ds_dynmo/engine/state/clipping.py",
        "    factor.masked_fill_(~(factor < 1.0), 1.0)\n",
        "    factor.fill_(min(factor.item(), 1.0))\n",
        WAITS,
    ),
    on_device(
        "the host waits in every block and micro-batch of mixture of depths",
        "ds_dynmo/models/mixture_of_depths/block.py",
        "        taken = members.sum()",
        "        taken = torch.tensor(int(members.sum()), device=members.device)",
        WAITS,
    ),
    on_device(
        "layers draw from the stage's generator on the device",
        "ds_dynmo/engine/run/random_streams.py",
        '        if accelerator.device_name() != "cpu":\n            self._generators.append',
        "        if False:\n            self._generators.append",
        MOVES + " -k fp32",
    ),
    on_device(
        "the device's generator is not restored from a checkpoint",
        "ds_dynmo/engine/save/progress.py",
        '        get_accelerator().set_rng_state(saved["accelerator"])',
        "        pass",
        "tests/emulated/test_device.py -k checkpoint",
    ),
    on_device(
        "events are read before they have passed",
        "ds_dynmo/engine/measure/profiler.py",
        "            times[-1].synchronize()\n",
        "            pass\n",
        "tests/accelerator/test_clocks.py tests/emulated/test_bitwise.py",
    ),
    on_device(
        "a share's counts are gathered in the CPU's memory",
        "ds_dynmo/models/moe/expert_parallel.py",
        "mine = integers(numbers, device)",
        'mine = integers(numbers, torch.device("cpu"))',
        "tests/emulated/test_bitwise.py tests/models/test_expert_parallel.py",
    ),
    on_device(
        "experts wait for the device to count",
        "ds_dynmo/models/host_numbers.py",
        "return flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))",
        "return torch.bincount(flat, minlength=size)",
        WAITS + " -k experts",
    ),
    on_device(
        "what a process group holds would have to move",
        "ds_dynmo/engine/move/references.py",
        "if key in nameless and _travels(value, layer, roots, outside)",
        "if key in nameless and can_be_sent(value, outside.references)",
        "tests/engine/move/test_references.py",
    ),
]
