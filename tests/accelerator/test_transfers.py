"""Layers that travel during a batch, on a stream of their own: the streams wait for each other where they must."""

from __future__ import annotations

import torch

from ds_dynmo.engine.comm.rounds import PER_CALL, Round, RoundsOnStream
from ds_dynmo.engine.comm.transfer_stream import TransferStream
from tests.accelerator.devices import ACCELERATOR, BUSY_WIDTH, all_precisions, each, needs, run_on_devices, variants
from tests.support.configs import Case
from tests.support.training import train_in_phases, whole


def long_work(device: torch.device) -> None:
    """Keep the compute stream busy, on a real device for some tens of milliseconds."""
    matrix = torch.ones(BUSY_WIDTH, BUSY_WIDTH, device=device)
    for _ in range(50):
        matrix = matrix @ matrix / BUSY_WIDTH


def pass_through_the_stream() -> tuple[float, float]:
    """Write a tensor on the compute stream, copy it on the transfer stream, and read it on the compute stream."""
    device = torch.device(ACCELERATOR.current_device_name())
    stream = TransferStream(device)
    source = torch.zeros(BUSY_WIDTH, device=device)
    arrived = torch.zeros(BUSY_WIDTH, device=device)
    long_work(device)
    source.fill_(1.0)
    with stream.after_compute():
        sent = source.clone()
    long_work(device)
    with stream.before_compute():
        long_work(device)
        arrived.copy_(sent)
    read = arrived.clone()
    return read.min().item(), read.max().item()


@needs(1)
def test_transfers_wait_for_compute_and_compute_for_arrivals() -> None:
    assert run_on_devices(1, pass_through_the_stream) == [(1.0, 1.0)]


class Copied:
    """A round that copies a tensor on the stream of transfers. The host does not ask whether it is over."""

    def __init__(self, stream: TransferStream, device: torch.device) -> None:
        self.stream = stream
        with stream.after_compute():
            self.sent = torch.ones(BUSY_WIDTH, device=device)

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        with self.stream.before_compute():
            self.sent.clone()


def in_time() -> float:
    """Exchange rounds while the device computes for long, and return the share that was there in time."""
    device = torch.device(ACCELERATOR.current_device_name())
    stream = TransferStream(device)
    rounds = RoundsOnStream([Round([], [])] * PER_CALL, lambda _: Copied(stream, device), stream)  # type: ignore[arg-type, return-value]
    rounds.advance()
    for _ in range(4):
        long_work(device)
    rounds.wait()
    return rounds.share_in_time


@needs(1)
def test_what_arrives_while_the_device_computes_is_in_time() -> None:
    (share,) = run_on_devices(1, in_time)
    assert share > 0.5


@needs(2)
@all_precisions
@variants("overlapped", [True, False], [True])
def test_a_move_in_phases_changes_nothing(precision: str, overlapped: bool) -> None:
    case, moves = Case(stages=2, precision=precision), ([0, 2, 8], [0, 7, 8], [0, 4, 8])
    ranks = run_on_devices(
        2, each, train_in_phases, ((case, [None] * len(moves), overlapped), (case, moves, overlapped))
    )
    still, moved = ([rank[number] for rank in ranks] for number in range(2))
    assert [result["losses"] for result in moved] == [result["losses"] for result in still]
    assert whole(moved) == whole(still)
