"""What was sent may not be changed before it is known to have arrived."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ds_dynmo.engine.comm.channels import Channels, LaneKey, MessageKind

from ds_dynmo.errors import ConfigError

PLAN = {1: [(LaneKey(MessageKind.ACTIVATION, is_sent=True),)]}


@pytest.fixture
def channels() -> Channels:
    works = [SimpleNamespace(wait=lambda: None)]
    return Channels(lambda stage: stage, lambda: lambda stage, operations: works)


def test_a_change_in_place_of_what_was_sent_is_an_error(channels: Channels) -> None:
    output = torch.ones(2, 3, requires_grad=True) * 2
    changed = r"shape \[2, 3\] was changed in place .*to another stage"
    with pytest.raises(ConfigError, match=changed), channels.batch(PLAN, alike=False):
        with channels.sending(MessageKind.ACTIVATION, 1):
            channels.send(output, 1)
        output.detach().zero_()


def test_what_needs_no_gradient_may_be_changed(channels: Channels) -> None:
    mask = torch.ones(2, 3)
    with channels.batch(PLAN, alike=False):
        with channels.sending(MessageKind.ACTIVATION, 1):
            channels.send(mask, 1)
        mask.zero_()
