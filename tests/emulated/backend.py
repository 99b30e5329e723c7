"""The process-group backend "emulated_nccl": NCCL's manners over gloo, for tensors of the emulated device.

- It takes contiguous tensors of the device alone, and reports those of another device index than the current one.
- An operation runs on a stream of its communicator, behind what the current stream held when it was posted;
  ``Work.wait`` makes the current stream wait (:mod:`tests.emulated.communicator`).
- Tags do not count. A single send or receive uses a communicator of its two ranks. A batch of them uses the group's, as
  single ones do where the group is bound to a device (``init_process_group(device_id=...)``, or ``EMULATED_BOUND=1``).
- The first operation of a group of more than two ranks connects it, so it must not be between two ranks: reported.
- Every operation is logged (:mod:`tests.emulated.operation_log`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.emulated import torch_device
from tests.emulated.communicator import Communicator, Work

warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")  # DeepSpeed binds CUDA's groups alone

NAME = "emulated_nccl"
TYPE = torch_device.NAME
library = torch_device.library
_groups = count()
_PAIR_TAG = 1  # of gloo's messages on communicators of two ranks; those on the group's have 0

Tensors = Sequence[torch.Tensor]


class Group(dist.ProcessGroup):
    """A process group: gloo's, the communicators, and torch's interface of a group."""

    supports_splitting = True  # so torch calls eager_connect_single_device where a device is bound
    supports_coalescing = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._timeout = timeout
        if rank == 0:
            store.set("name", f"{name or 'world'}#{os.getpid()}.{next(_groups)}")
        self._name = store.get("name").decode()
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._communicators: dict[str, Communicator] = {}
        self._connected = size <= 2
        self._batch: list[tuple[str, torch.Tensor, int]] | None = None  # sends and receives to be launched together
        self._last: Work | None = None

    # -- what torch asks of a group -------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name

    def _set_group_name(self, name: str) -> None:
        self._given_name = name

    @property
    def group_name(self) -> str:
        return self._given_name

    @property
    def options(self) -> SimpleNamespace:
        return SimpleNamespace(_timeout=self._timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(TYPE)]

    def _get_backend(self, device: torch.device) -> Group:
        if torch.device(device).type != TYPE:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take no part in a group that is split from this one: there is nothing to do."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._gloo.set_timeout(timeout)

    def shutdown(self) -> None:
        """Finish what was posted, and end the threads."""
        for communicator in self._communicators.values():
            communicator.close()
        self._gloo = None  # which closes its connections

    def abort(self) -> None:
        """End what was posted, and the threads."""
        if self._gloo is not None:
            self._gloo.abort()
        self.shutdown()

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        return 0

    # -- posting --------------------------------------------------------------------------------------

    def _check(self, what: str, tensors: Tensors) -> torch.device:
        """Refuse what NCCL refuses, and return the tensors' device."""
        for tensor in tensors:
            if tensor.device.type != TYPE:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if tensor.layout is not torch.strided or not tensor.is_contiguous():
                raise ValueError(f"Tensors must be contiguous ({what})")
        current = torch.device(TYPE, library.current_device())
        for device in {tensor.device for tensor in tensors} - {current}:
            library.report(f"{what} of a tensor on {device} while the current device is {current}")
        return tensors[0].device

    def _is_bound(self) -> bool:
        return self.bound_device_id is not None or os.environ.get("EMULATED_BOUND") == "1"

    def _communicator(self, members: str, device: torch.device) -> Communicator:
        if members not in self._communicators:
            name = f"{self._name} {members}".rstrip()
            self._communicators[members] = Communicator(name, self._rank, self._size, device)
        return self._communicators[members]

    def _collective(
        self, what: str, reads: Tensors, writes: Tensors, begin: Any, options: Any = None, is_barrier: bool = False
    ) -> Work:
        """Post a collective, which ``begin`` begins on gloo. Its text holds what the ranks must agree on."""
        tensors = [*reads, *writes]
        device = self._check(what, tensors)
        self._connected = True
        divisor = 1
        if hasattr(options, "reduceOp"):
            what += f" {options.reduceOp.op.name}"
            if options.reduceOp == dist.ReduceOp.AVG:
                options.reduceOp, divisor = dist.ReduceOp.SUM, self._size
        if hasattr(options, "rootRank"):
            what += f", root {options.rootRank}"
        what += f", {sorted({tensor.numel() for tensor in tensors})} {tensors[0].dtype}"
        communicator = self._communicator("", device)
        self._last = communicator.post(Work(communicator, what, reads, writes, begin, divisor, is_barrier))
        return self._last

    def _launch(self, what: str, messages: list[tuple[str, torch.Tensor, int]], *, together: bool) -> Work:
        """Post messages to and from other ranks as one operation."""
        device = self._check(what, [tensor for _, tensor, _ in messages])
        pair = not together and not self._is_bound()
        if not pair and not self._connected:
            library.report(f"the first operation of a group of {self._size} ranks is a {what}: not all ranks connect")
            self._connected = True
        tag = _PAIR_TAG if pair else 0
        sent = [(tensor, peer) for kind, tensor, peer in messages if kind == "send"]
        received = [(tensor, peer) for kind, tensor, peer in messages if kind == "recv"]

        def begin(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[Any]:
            to_itself = [copy for copy, (_, peer) in zip(inputs, sent) if peer == self._rank]
            for copy, (_, peer) in zip(outputs, received):
                if peer == self._rank:
                    copy.copy_(to_itself.pop(0))
            out = [(copy, peer) for copy, (_, peer) in zip(inputs, sent) if peer != self._rank]
            into = [(copy, peer) for copy, (_, peer) in zip(outputs, received) if peer != self._rank]
            sends = [self._gloo.send([copy], peer, tag) for copy, peer in out]
            return sends + [self._gloo.recv([copy], peer, tag) for copy, peer in into]

        first, second = sorted((self._rank, messages[0][2]))
        communicator = self._communicator(f"{first}:{second}" if pair else "", device)
        work = Work(communicator, what, [tensor for tensor, _ in sent], [tensor for tensor, _ in received], begin)
        noted = [(kind, peer, tensor.nbytes) for kind, tensor, peer in messages if peer != self._rank]
        self._last = communicator.post(work, noted)
        return self._last

    # -- messages between two ranks -------------------------------------------------------------------

    def _message(self, kind: str, tensor: torch.Tensor, peer: int) -> Work | None:
        if self._batch is None:
            return self._launch(kind, [(kind, tensor, peer)], together=False)
        self._check(kind, [tensor])
        self._batch.append((kind, tensor, peer))
        return None

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work | None:
        return self._message("send", tensors[0], dst)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work | None:
        return self._message("recv", tensors[0], src)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work | None:
        messages, self._batch = self._batch, None
        return self._launch("batch", messages, together=True) if messages else self._last

    # -- collectives ----------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        return self._collective(
            "all_reduce", tensors, tensors, lambda given, _: [self._gloo.allreduce(given, opts)], opts
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Work:
        each = dist.AllreduceOptions()

        def begin(inputs: list[torch.Tensor], _: Any) -> list[Any]:
            each.reduceOp = opts.reduceOp
            return [self._gloo.allreduce([tensor], each) for tensor in inputs]

        return self._collective("all_reduce_coalesced", tensors, tensors, begin, opts)

    def barrier(self, opts: Any = None) -> Work:
        zero = [torch.zeros(1, device=torch.device(TYPE, library.current_device()))]
        return self._collective("barrier", zero, zero, lambda given, _: [self._gloo.allreduce(given)], is_barrier=True)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        is_root = opts.rootRank == self._rank
        reads, writes = (tensors, []) if is_root else ([], tensors)
        return self._collective(
            "broadcast", reads, writes, lambda given, into: [self._gloo.broadcast(given or into, opts)], opts
        )

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        writes = tensors if opts.rootRank == self._rank else []
        return self._collective("reduce", tensors, writes, lambda given, _: [self._gloo.reduce(given, opts)], opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self._collective(
            "all_gather", inputs, outputs[0], lambda given, into: [self._gloo.allgather([into], given)]
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        writes = outputs[0] if outputs else []
        return self._collective(
            "gather", inputs, writes, lambda given, into: [self._gloo.gather([into] if into else [], given, opts)], opts
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        reads = inputs[0] if inputs else []
        return self._collective(
            "scatter",
            reads,
            outputs,
            lambda given, into: [self._gloo.scatter(into, [given] if given else [], opts)],
            opts,
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        return self._collective(
            "reduce_scatter",
            inputs[0],
            outputs,
            lambda given, into: [self._gloo.reduce_scatter(into, [given], opts)],
            opts,
        )

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        def begin(given: list[torch.Tensor], into: list[torch.Tensor]) -> list[Any]:
            return [
                self._gloo.allgather([list(whole.view(-1).chunk(self._size))], [part.view(-1)])
                for whole, part in zip(into, given)
            ]

        return self._collective("all_gather_single", inputs, outputs, begin)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()

        def begin(given: list[torch.Tensor], into: list[torch.Tensor]) -> list[Any]:
            return [self._gloo._reduce_scatter_base(part, whole, opts) for part, whole in zip(into, given)]

        return self._collective("reduce_scatter_single", inputs, outputs, begin, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Exchange tensors as NCCL does: by messages between each two ranks, launched together."""
        self._connected = True
        messages = [("send", tensor, peer) for peer, tensor in enumerate(inputs)]
        messages += [("recv", tensor, peer) for peer, tensor in enumerate(outputs)]
        return self._launch("all_to_all", messages, together=True)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        def split(tensor: torch.Tensor, rows: list[int]) -> Tensors:
            return tensor.split(rows or [len(tensor) // self._size] * self._size)

        self._check("all_to_all_single", [output, input])
        return self.alltoall(split(output, output_splits), split(input, input_splits))


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
    """Launch messages together as torch does for NCCL; it does so for groups of its own class alone."""
    group = operations[0].group or c10d._get_default_group()
    if not isinstance(group, Group):
        return _torch_batch_isend_irecv(operations)
    c10d._check_p2p_op_list(operations)
    with c10d._coalescing_manager(group, operations[0].tensor.device, async_ops=True) as launched:
        for operation in operations:
            peer = "group_dst" if operation.op is dist.isend else "group_src"
            operation.op(operation.tensor, group=operation.group, tag=operation.tag, **{peer: operation.group_peer})
    return launched.works


def _make(options: Any, _: Any) -> Group:
    return Group(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)


_torch_batch_isend_irecv = c10d.batch_isend_irecv
dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
dist.Backend.register_backend(NAME, _make, extended_api=True, devices=[TYPE])
