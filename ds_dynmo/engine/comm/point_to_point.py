"""Messages from rank to rank: byte strings between stages, and the tensors of layers, apart from a batch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import default_timeout
from ds_dynmo.engine.comm.device_group import device_group
from ds_dynmo.engine.comm.host_links import HostLinks, PeerTensor
from ds_dynmo.engine.comm.pending import PendingExchange
from ds_dynmo.engine.comm.rounds import Message, Messages, Round, Rounds, RoundsInThread, RoundsOnStream, rounds_of
from ds_dynmo.engine.comm.transfer_stream import TransferStream

SMALL_BYTES = 1 << 16  # tensors up to this size are packed into one message
_LAYERS = 1  # tag of the messages with layers


class PointToPoint:
    """One rank's messages to others. Construction is collective.

    Byte strings travel on the links of small numbers, on the CPU, and wait as long as a batch does. Tensors travel on
    the default group with a tag of their own on gloo, which connects all ranks anyway. Other backends know no tags, and
    run the messages of a group in the order of posting: there, layers have a process group of their own, or they would
    delay, or be mistaken for, the activations of a batch that runs meanwhile.

    Args:
        rank_of: returns the rank that holds a stage.
        control: the links of small numbers.
        device: the engine's device.
        timeout_seconds: that an operation waits for the other ranks.
    """

    def __init__(
        self,
        rank_of: Callable[[int], int],
        control: HostLinks,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._rank_of, self._control, self._device = rank_of, control, device
        self._timeout = timedelta(seconds=timeout_seconds)
        self._timeout_of_batch = max(self._timeout, default_timeout())  # NCCL ends a rank that waits longer
        is_gloo = dist.get_backend() == "gloo"
        self._layers = None if is_gloo else device_group(device, self._timeout_of_batch, timeout_seconds)
        self._stream = TransferStream(device)

    # -- byte strings ---------------------------------------------------------------------------------

    def exchange_headers(self, outgoing: dict[int, bytes], sources: Sequence[int]) -> dict[int, bytes]:
        """Send one byte string to each stage of ``outgoing``; receive one from each stage of ``sources``."""
        rank_of = self._rank_of
        stages = {rank_of(stage): stage for stage in sources}
        received = self.exchange_bytes({rank_of(stage): header for stage, header in outgoing.items()}, list(stages))
        return {stages[rank]: header for rank, header in received.items()}

    def exchange_bytes(self, outgoing: dict[int, bytes], sources: Sequence[int]) -> dict[int, bytes]:
        """Send one byte string to each rank of ``outgoing``; receive one from each rank of ``sources``."""
        sizes_out = {rank: torch.tensor([len(data)], device="cpu") for rank, data in outgoing.items()}
        sizes_in = {rank: torch.zeros(1, dtype=torch.int64, device="cpu") for rank in sources}
        self._swap(sizes_out, sizes_in)
        out = {rank: torch.frombuffer(bytearray(data), dtype=torch.uint8) for rank, data in outgoing.items() if data}
        arriving = {rank: torch.empty(int(size), dtype=torch.uint8, device="cpu") for rank, size in sizes_in.items()}
        self._swap(out, arriving)
        return {rank: data.numpy().tobytes() for rank, data in arriving.items()}

    def _swap(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        sends, receives = ([both for both in tensors.items() if both[1].numel()] for tensors in (outgoing, incoming))
        self._control.connect(rank for rank, _ in [*sends, *receives])
        for work in self._control.post(sends, receives):
            work.wait(self._timeout_of_batch)

    # -- tensors --------------------------------------------------------------------------------------

    def post(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> PendingExchange:
        """Start to send contiguous tensors to ranks and to receive into others, in place, and return at once.

        Two ranks have to pass the same sizes in the same order, across calls too. Small tensors of a pair of ranks
        travel in one message; large ones are sent and received in place. Until the exchange is done, sent tensors must
        not be written to, and received ones must not be used.
        """
        return self._posted(Round(_messages(sends), _messages(receives)))

    def begin(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> Rounds:
        """Prepare to send and receive like :meth:`post`, but in rounds, beside a batch: :meth:`Rounds.advance` begins.

        A round waits for other ranks as long as the pipeline's messages do: they begin it during their batch.
        """
        post = partial(self._posted, timeout=self._timeout_of_batch)
        rounds = rounds_of(_messages(sends), _messages(receives))
        return RoundsOnStream(rounds, post, self._stream) if self._stream.is_queue else RoundsInThread(rounds, post)

    def begin_at_once(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> Rounds:
        """Prepare to send and receive like :meth:`begin`, in one round."""
        return Rounds([Round(_messages(sends), _messages(receives))], self._posted)

    def _posted(self, messages: Round, timeout: timedelta | None = None) -> PendingExchange:
        operations: list[Any] = []
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._stream.after_compute():
            for peer, message in messages.receives:
                whole = message[0] if len(message) == 1 else _staging(message)
                buffer = self._transportable(whole, copy=False)
                if buffer is not whole:
                    staged.append((whole, buffer))
                if len(message) > 1:
                    staged += zip(message, torch.split(whole, [tensor.numel() for tensor in message]))
                operations.append(dist.P2POp(dist.irecv, buffer, peer, self._layers, _LAYERS))
            for peer, message in messages.sends:
                whole = message[0] if len(message) == 1 else torch.cat(message)
                buffer = self._transportable(whole, copy=True)
                operations.append(dist.P2POp(dist.isend, buffer, peer, self._layers, _LAYERS))
            works = dist.batch_isend_irecv(operations) if operations else []
        buffers = [operation.tensor for operation in operations]
        return PendingExchange(works, buffers, staged, self._stream, timeout or self._timeout)

    def exchange(
        self,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Send and receive like :meth:`post`, and wait; call ``meanwhile`` while tensors are under way."""
        pending = self.post(sends, receives)
        if meanwhile is not None:
            meanwhile()
        pending.wait()

    def _transportable(self, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
        """Return ``tensor``, or a copy on the device of the group's backend (NCCL: the accelerator)."""
        if tensor.device.type == self._device.type:
            return tensor
        return tensor.to(self._device) if copy else torch.empty_like(tensor, device=self._device)


def _messages(tensors: Sequence[PeerTensor]) -> Messages:
    """Sort tensors into messages, as bytes: per peer one of all small tensors, and one for each large one."""
    small: dict[tuple[int, str], list[torch.Tensor]] = {}
    large: Messages = []
    for peer, tensor in tensors:
        flat = tensor.detach().view(torch.uint8)
        if flat.numel() > SMALL_BYTES:
            large.append((peer, [flat]))
        elif flat.numel():
            small.setdefault((peer, flat.device.type), []).append(flat)
    return [(peer, flats) for (peer, _), flats in small.items()] + large


def _staging(message: Message) -> torch.Tensor:
    return torch.empty(sum(t.numel() for t in message), dtype=torch.uint8, device=message[0].device)
