"""Messages on a device whose backend is not called "nccl": losses and polls."""

from __future__ import annotations

from tests.distributed.harness import run
from tests.emulated import messages


def test_a_loss_that_is_under_way_is_not_read() -> None:
    """DeepSpeed copies its buffer at once: what arrives has another."""
    assert len({tuple(losses) for losses in run(2, messages.losses_of_batches)}) == 1


def test_a_poll_does_without_handles_that_say_when_they_are_done() -> None:
    assert run(2, messages.poll_before_and_after_a_wait) == [(True, [1.0, 1.0]), (True, [0.0, 0.0])]
