"""Messages on a device whose backend is not called "nccl": losses and polls."""

from __future__ import annotations

from tests.emulated import messages
from tests.support.harness import run


def test_a_loss_that_is_under_way_is_not_read() -> None:
    """DeepSpeed copies its buffer at once: what arrives has another."""
    assert len({tuple(losses) for losses in run(2, messages.losses_of_batches)}) == 1


def test_a_poll_never_waits() -> None:
    """Two ranks that train may each wait for a message that the other begins later."""
    found = run(2, messages.poll_before_and_after_a_wait)
    assert found == [(False, False, True, [1.0, 1.0]), (False, False, True, [0.0, 0.0])]
