"""The tensors that chunks pass on: what can be sent, which gradients go back, what is announced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_dynmo.engine.comm.message_forms import MessageForm
from ds_dynmo.engine.deepspeed.checkpointing import any_input
from ds_dynmo.engine.run.messages import Entrance, arranged, checked, packed_gradients, sendable
from ds_dynmo.errors import ConfigError


def plain() -> torch.Tensor:
    return torch.ones(3)


def with_graph() -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


def form_of(*outputs: torch.Tensor) -> MessageForm:
    return MessageForm.of(outputs, [tensor.requires_grad for tensor in outputs], in_tuple=True)


def test_only_flagged_tensors_require_a_gradient() -> None:
    form = form_of(plain(), with_graph(), torch.arange(3))
    received = [plain(), plain(), torch.arange(3)]
    entered = Entrance().enter(received, form)
    assert [tensor.requires_grad for tensor in entered] == [False, True, False]
    assert form.gradients == ((torch.Size([3]), torch.float32),)
    assert arranged(entered, form) == tuple(entered)
    assert arranged([plain()], MessageForm.of([plain()], [False], in_tuple=False)).shape == (3,)


def test_of_what_no_layer_used_zeros_go_back() -> None:
    entrance, form = Entrance(), form_of(with_graph(), with_graph())
    _, used = entrance.enter([plain(), plain()], form)
    used.sum().backward()
    assert [gradient.tolist() for gradient in entrance.gradients(3)] == [[0.0] * 3, [1.0] * 3]
    entrance.enter([plain(), plain()], form)
    with pytest.raises(ConfigError, match="whose last is layer 3, gave no gradient to anything"):
        entrance.gradients(3)
    assert Entrance().gradients(3) == []


def test_a_layer_may_change_what_it_received_in_place() -> None:
    entrance, received = Entrance(), plain()
    (entered,) = entrance.enter([received], form_of(with_graph()))
    entered.mul_(2).relu_().sum().backward()
    assert [gradient.tolist() for gradient in entrance.gradients(3)] == [[2.0] * 3]


def test_a_tensor_that_gets_a_graph_later_is_refused() -> None:
    known = form_of(with_graph(), plain())
    assert checked(known, None, 3) is known
    with pytest.raises(ConfigError, match=r"layer 3, .* outputs \[1\] require a gradient .* dynamic_shape=True"):
        checked(form_of(with_graph(), with_graph()), known, 3)
    assert checked(form_of(plain(), plain()), known, 3) is known  # the gradient that comes is dropped


def test_other_shapes_are_refused() -> None:
    known = form_of(plain(), torch.ones(2, dtype=torch.bool))
    for outputs in ((plain(), torch.ones(4, dtype=torch.bool)), (plain(), torch.ones(2)), (plain(),)):
        with pytest.raises(ConfigError, match=r"layer 3, .* in the first .* dynamic_shape=True, or .*reset_activation"):
            checked(form_of(*outputs), known, 3)


def test_a_complex_tensor_is_sent_without_a_gradient_alone() -> None:
    sendable((with_graph(), torch.ones(3, dtype=torch.complex64)), 3)
    with pytest.raises(ConfigError, match=r"layer 3, .* outputs \[1\] are complex .*view_as_real"):
        sendable((with_graph(), with_graph().to(torch.complex64)), 3)


def test_what_cannot_be_sent_is_refused_with_its_layer() -> None:
    for outputs, found in (
        ((plain(), None), "tuple of Tensor, NoneType"),
        ([plain()], "list of Tensor"),
        (None, "NoneType"),
    ):
        with pytest.raises(ConfigError, match=rf"layer 3, .* returned a {found}: .*keep_together = \[\[3, 4\]\]"):
            sendable(outputs, 3)
            pytest.fail(f"a {found} is not refused")


LAYOUTS = {
    "contiguous": torch.rand(3, 4, 5),
    "transposed": torch.rand(5, 4, 3).transpose(0, 2),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "repeated": torch.rand(4).expand(3, 4),
    "one number": torch.ones(()).expand(3, 4),
    "repeated inside": torch.rand(3, 4)[:, None].expand(3, 5, 4),
    "a slice": torch.rand(3, 4, 9)[:, :, 2:7],
    "a slice, repeated and transposed": torch.rand(4, 9)[:, ::2].expand(3, 4, 5).transpose(0, 2),
    "every other row": torch.rand(6, 4)[::2],
    "a dimension of 1": torch.rand(4, 1, 3).transpose(0, 1),
    "empty": torch.rand(0, 3).t(),
    "bf16": torch.rand(4, 3).bfloat16().t(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_and_gradients_arrive_with_their_strides(name: str) -> None:
    tensor, entrance = LAYOUTS[name], Entrance()
    form = MessageForm.of([tensor], [True], in_tuple=False)
    (sent,) = form.packed([tensor])
    assert sent.is_contiguous() and sent.shape == tensor.shape
    (received,) = MessageForm.announced(form.announcement(torch.device("cpu"))).unpacked([sent.clone()])
    (entered,) = entrance.enter([received], form)
    assert torch.equal(entered, tensor) and entered.stride() == tensor.stride()
    entered.backward(tensor)
    back = entrance.gradients(3)
    (gradient,) = MessageForm.of_gradients(back).unpacked(packed_gradients(back, MessageForm.of_gradients(back)))
    assert torch.equal(gradient, tensor) and gradient.stride() == tensor.stride()


def test_elements_that_overlap_arrive_contiguous() -> None:
    windows = torch.rand(9).unfold(0, 4, 2)
    form = form_of(windows)
    (received,) = form.unpacked(form.packed([windows]))
    assert torch.equal(received, windows) and received.is_contiguous()


def test_a_conjugate_is_sent_and_not_its_memory() -> None:
    numbers = torch.rand(3, dtype=torch.complex64).conj()
    for tensor in (numbers, numbers[:1].imag):
        (sent,) = form_of(tensor).packed([tensor])
        assert torch.equal(sent, tensor) and not sent.is_conj() and not sent.is_neg()


def test_known_strides_are_those_that_arrive() -> None:
    tensor, known = torch.rand(3, 4), MessageForm.of([torch.rand(4, 3).t()], [True], in_tuple=True)
    (received,) = known.unpacked(known.packed([tensor]))
    assert torch.equal(received, tensor) and received.stride() == (1, 3)


def test_a_later_tensor_that_repeats_nothing_arrives_whole() -> None:
    """The first one, with a stride of 0, told the receiver to keep one copy."""
    for first in (torch.rand(1, 3).expand(4, 3), torch.rand(4, 1, 1).expand(4, 3, 2), torch.rand(()).expand(2, 3)):
        known, later = form_of(first), torch.arange(first.numel(), dtype=torch.float32).view(first.shape)
        for tensor, strides in ((first, first.stride()), (later, later.stride())):
            (received,) = known.unpacked(known.packed([tensor]))
            assert torch.equal(received, tensor) and received.stride() == strides


def test_forms_are_announced_in_full() -> None:
    tensors = [torch.ones(2, 0, 3), torch.tensor(5), torch.ones(4, dtype=torch.bfloat16), torch.ones(1).bool()]
    form = MessageForm.of(tensors, [True, False, True, False], in_tuple=True)
    assert MessageForm.announced(form.announcement(torch.device("cpu"))) == form
    with pytest.raises(ConfigError, match=r"has 400 tensors, .* 1024 are possible"):
        MessageForm.of([plain()] * 400, [False] * 400, in_tuple=True).announcement(torch.device("cpu"))


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
