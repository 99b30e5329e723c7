"""Which tensors between stages get a gradient, without a process group: two stages, and a queue between them."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe import p2p, schedule
from ds_dynmo.engine.deepspeed.buffers import sent_as_they_are
from ds_dynmo.engine.run.gradient_flags import GradientFlags
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_dynmo.engine.deepspeed.checkpointing import any_input
from ds_dynmo.errors import ConfigError


class Stage:
    """A stage whose instructions send, and receive, what is announced alone."""

    def __init__(self, *, dynamic_shape: bool = False) -> None:
        self.flags = GradientFlags()
        self.engine = SimpleNamespace(
            pipe_buffers={"inputs": [None], "outputs": [None]},
            dynamic_shape=dynamic_shape,
            device="cpu",
            next_stage=1,
            prev_stage=0,
            is_pipe_partitioned=False,
        )
        self.around = self.flags.instruction_wrappers(last_layer=3)

    def run(self, kind: type) -> None:
        self.around[kind](lambda engine, buffer_id: None)(self.engine, buffer_id=0)

    def send(self, outputs: Any) -> Any:
        """Return what is left of the outputs: those that a gradient comes back for."""
        self.engine.pipe_buffers["outputs"][0] = outputs
        self.run(schedule.SendActivation)
        return self.engine.pipe_buffers["outputs"][0]

    def receive(self, inputs: Any) -> list[bool]:
        self.engine.pipe_buffers["inputs"][0] = inputs
        self.run(schedule.RecvActivation)
        return [tensor.requires_grad for tensor in inputs]

    def send_gradients(self) -> Any:
        """Return those whose gradients are sent."""
        self.run(schedule.SendGrad)
        return self.engine.pipe_buffers["inputs"][0]


@pytest.fixture(autouse=True)
def messages(monkeypatch: pytest.MonkeyPatch) -> deque[torch.Tensor]:
    queue: deque[torch.Tensor] = deque()
    monkeypatch.setattr(p2p, "send", lambda tensor, stage: queue.append(tensor))
    monkeypatch.setattr(p2p, "recv", lambda tensor, stage: tensor.copy_(queue.popleft()))
    return queue


def plain() -> torch.Tensor:
    return torch.ones(3)


def with_graph() -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


def test_they_are_announced_once_and_again_when_forgotten(messages: deque[torch.Tensor]) -> None:
    first, second = Stage(), Stage()
    for number in range(3):
        outputs = plain(), with_graph(), torch.arange(3)
        assert [one is outputs[1] for one in first.send(outputs)] == [True]
        assert len(messages) == (number == 0)
        assert second.receive((plain(), plain(), torch.arange(3))) == [False, True, False]
    for stage in (first, second):
        stage.flags.forget_flags()
    outputs = plain(), plain(), torch.arange(3)
    assert first.send(outputs) == () and second.receive(outputs) == [False, False, False]
    assert second.send_gradients() == ()


def test_an_evaluation_announces_nothing(messages: deque[torch.Tensor]) -> None:
    with torch.no_grad():
        Stage().send((plain(), plain()))
        Stage().receive((plain(), plain()))
    assert not messages


def test_of_what_no_layer_used_zeros_go_back() -> None:
    first, second = Stage(), Stage()
    first.send((with_graph(), with_graph(), plain()))
    received = plain(), plain(), plain()
    second.receive(received)
    received[1].sum().backward()
    assert [one.grad.tolist() for one in second.send_gradients()] == [[0.0] * 3, [1.0] * 3]
    for tensor in received:
        tensor.grad = None
    second.receive(received)
    with pytest.raises(ConfigError, match="whose last is layer 3, gave no gradient to anything"):
        second.send_gradients()


def test_a_tensor_that_gets_a_graph_later_is_refused_unless_each_message_tells(
    messages: deque[torch.Tensor],
) -> None:
    first = Stage()
    first.send((with_graph(), plain()))
    with pytest.raises(ConfigError, match=r"layer 3, .* outputs \[1\] require a gradient .* dynamic_shape=True"):
        first.send((with_graph(), with_graph()))
    messages.clear()
    first, second = Stage(dynamic_shape=True), Stage(dynamic_shape=True)
    for other in (plain(), with_graph(), plain()):
        first.send((with_graph(), other))
        assert second.receive((plain(), plain())) == [True, other.requires_grad]


def test_a_tensor_that_loses_its_graph_takes_its_gradient_all_the_same() -> None:
    first = Stage()
    first.send((with_graph(), with_graph()))
    for outputs in ((plain(), with_graph()), (plain(), plain())):
        left = first.send(outputs)
        assert [one.requires_grad for one in left] == [True, True]
        torch.autograd.backward(left, [plain(), plain()])


def test_other_shapes_are_refused_until_they_are_announced() -> None:
    first = Stage()
    first.send((plain(), torch.ones(2, dtype=torch.bool)))
    others = [(plain(), torch.ones(4, dtype=torch.bool)), (plain(), torch.ones(2)), (plain(),), plain()]
    for outputs in others:
        with pytest.raises(ConfigError, match=r"layer 3, .* in the first .* dynamic_shape=True, or .*reset_activation"):
            first.send(outputs)
        with torch.no_grad(), pytest.raises(ConfigError, match=r"\[3\] torch.float32, \[2\] torch.bool in the first"):
            first.send(outputs)
    dynamic = Stage(dynamic_shape=True)
    for outputs in others:
        first.flags.forget_shapes()
        first.send(outputs)
        dynamic.send(outputs)


def test_a_complex_tensor_is_sent_without_a_gradient_alone() -> None:
    first = Stage()
    first.send((with_graph(), torch.ones(3, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match=r"layer 3, .* outputs \[1\] are complex .*view_as_real"):
        first.send((with_graph(), with_graph().to(torch.complex64)))


def test_deepspeed_casts_no_mask() -> None:
    engine = SimpleNamespace(has_attention_mask=True, has_bool_tensors=False)
    with sent_as_they_are(engine):
        assert not engine.has_attention_mask and not engine.has_bool_tensors
    assert engine.has_attention_mask and not engine.has_bool_tensors


@pytest.mark.parametrize(
    ("outputs", "found"),
    [((plain(), None), "tuple of Tensor, NoneType"), ([plain()], "list of Tensor"), (None, "NoneType")],
)
def test_what_cannot_be_sent_is_refused_with_its_layer(outputs: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer 3, .* returned a {found}: .*keep_together = \[\[3, 4\]\]"):
        Stage().send(outputs)


def test_tensors_are_made_contiguous() -> None:
    sent = Stage().send((with_graph().expand(2, 3), with_graph()))
    assert all(tensor.is_contiguous() for tensor in sent)


@pytest.mark.parametrize("checkpoint", [ds_checkpointing.checkpoint, partial(torch_checkpoint, use_reentrant=True)])
def test_a_mask_that_a_checkpointed_segment_passes_on_stays_what_it_is(checkpoint: Any) -> None:
    """Of a segment's outputs, a reentrant function other than DeepSpeed's lets all floating ones require a gradient."""
    hidden, mask, bools = with_graph(), plain(), torch.ones(3).bool()
    outputs = any_input(checkpoint)(lambda *inputs: (inputs[0] * inputs[1], *inputs[1:]), hidden, mask, bools)
    assert outputs[0].requires_grad and outputs[1] is mask and not mask.requires_grad and outputs[2] is bools
    hidden.retain_grad()
    outputs[0].sum().backward()
    assert hidden.grad is not None and hidden.grad.tolist() == [1.0] * 3


def test_a_checkpointed_segment_returns_no_weight() -> None:
    weight, checkpointed = torch.nn.Parameter(torch.ones(3)), any_input(partial(torch_checkpoint, use_reentrant=True))
    with pytest.raises(ConfigError, match=r"output 1 of checkpointed layers is a weight of shape \[3\]"):
        checkpointed(lambda hidden: (hidden * weight, weight), with_graph())
    hidden, passed = checkpointed(lambda x: (x * weight, weight.view_as(weight)), with_graph())
    (hidden + passed).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0] * 3  # 2 as a factor, 1 as passed on
