"""Each fault that the emulated device is there to find is made, and found; what is right is not reported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_dynmo.engine.save.progress import random_states, restore_random_states
from tests.emulated import torch_device
from tests.emulated.torch_device import Event, Stream, current_stream, library, stream, synchronize

DEVICE = "emulated"
HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def _no_reports() -> Iterator[None]:
    library.clear_reports()
    yield
    library.clear_reports()
    library.set_delay(0)


def found() -> list[str]:
    return list(library.reports())


# ------------------------------------------------------------------------------------------------- numbers of the CPU
def test_a_transformer_layer_trains_to_the_bit_as_on_the_cpu() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True, dropout=0.0)
    other = copy.deepcopy(layer).to(DEVICE)
    given = torch.randn(2, 7, 32)
    for module, device in ((layer, "cpu"), (other, DEVICE)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            module(given.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(layer.parameters(), other.parameters()):
        assert torch.equal(one, two.cpu())


@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_the_cpus(causal: bool) -> None:
    tensors = [torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3)]
    others = [tensor.detach().to(DEVICE).requires_grad_() for tensor in tensors]
    results = [nn.functional.scaled_dot_product_attention(*given, is_causal=causal) for given in (tensors, others)]
    gradients = [torch.autograd.grad(r.sum(), given) for r, given in zip(results, (tensors, others))]
    assert torch.equal(results[0], results[1].cpu())
    assert all(torch.equal(one, two.cpu()) for one, two in zip(*gradients))


def test_a_convolution_equals_the_cpus() -> None:
    layer, given = nn.Conv2d(4, 6, 3, groups=2), torch.randn(2, 4, 8, 8)
    other = copy.deepcopy(layer).to(DEVICE)
    results = [layer(given), other(given.to(DEVICE))]
    for result in results:
        result.square().mean().backward()
    assert torch.equal(results[0], results[1].cpu())
    assert all(torch.equal(one.grad, two.grad.cpu()) for one, two in zip(layer.parameters(), other.parameters()))


def test_random_numbers_are_the_generators() -> None:
    torch.manual_seed(3)
    first, state = torch.rand(3, device=DEVICE), torch.emulated.get_rng_state()
    second = torch.rand(3, device=DEVICE)
    torch.emulated.set_rng_state(state)
    assert torch.equal(second, torch.rand(3, device=DEVICE)) and not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(3, device=DEVICE))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=DEVICE, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="another kind of device"):
        torch.emulated.set_rng_state(torch.Generator().get_state())


def test_the_devices_random_state_is_saved_in_checkpoints() -> None:
    state = random_states()
    first = torch.rand(3, device=DEVICE)
    restore_random_states(state)
    assert torch.equal(first, torch.rand(3, device=DEVICE))


def test_in_place_out_and_views() -> None:
    tensor = torch.arange(6.0, device=DEVICE).view(2, 3)
    tensor.t().mul_(2)
    grown = torch.empty(0, device=DEVICE)
    torch.add(tensor, 1, out=grown)
    assert grown.tolist() == [[1, 3, 5], [7, 9, 11]]
    assert tensor.untyped_storage().data_ptr() == tensor.t().untyped_storage().data_ptr()


def test_integers_are_counted_as_on_cuda() -> None:
    numbers = torch.tensor([0, 2, 2], dtype=torch.int32, device=DEVICE)
    assert torch.histc(numbers, bins=3, min=0, max=2).tolist() == [1, 0, 2]


def test_autocast_computes_in_half_precision() -> None:
    matrix = torch.ones(2, 2, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------------- devices
def test_tensors_of_another_device_are_refused() -> None:
    ours = torch.ones(3, device=DEVICE)
    for other in (torch.ones(3), torch.ones(3, device=f"{DEVICE}:1")):
        with pytest.raises(RuntimeError, match=r"same device.*emulated:0 and"):
            ours + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([ours, other])
    with pytest.raises(RuntimeError, match="emulated: device 99 of"):
        torch.emulated.set_device(99)


def test_numbers_and_indices_of_the_cpu_are_taken() -> None:
    ours = torch.ones(3, device=DEVICE)
    assert (ours + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert ours[torch.tensor([0, 1])].shape == (2,)
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(1.0).add_(ours.sum())


# ---------------------------------------------------------------------------------------------------- the host's view
def test_a_copy_to_pinned_memory_is_there_after_a_wait() -> None:
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    assert host.isnan().all()
    synchronize()
    assert host.tolist() == [1, 1, 1]


def test_pinned_memory_may_not_change_while_it_is_copied() -> None:
    host, ours = torch.zeros(3).pin_memory(), torch.empty(3, device=DEVICE)
    ours.copy_(host, non_blocking=True)
    synchronize()
    assert not found()
    ours.copy_(host, non_blocking=True)
    host.fill_(1.0)
    synchronize()
    (text,) = found()
    assert text.startswith("host: pinned memory was changed")


def test_new_memory_holds_nan() -> None:
    assert torch.empty(3, device=DEVICE).isnan().all()


def test_elapsed_time_needs_a_wait() -> None:
    first, second = Event(enable_timing=True), Event(enable_timing=True)
    first.record()
    second.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) >= 0.0


def wait_twice(tensor: torch.Tensor) -> None:
    tensor.item()
    tensor.nonzero()
    tensor[tensor > 0]


def test_waits_of_the_host_are_counted_by_place() -> None:
    tensor = torch.ones(1, device=DEVICE)
    library.clear_syncs()
    library.trace_syncs(True)
    wait_twice(tensor)
    library.trace_syncs(False)
    places = library.syncs()
    assert sorted(text.splitlines()[0] for text in places) == ["aten::index.Tensor", "aten::nonzero", "item"]
    assert all(f"{HERE}:" in text and "wait_twice" in text for text in places)


def test_waits_of_the_host_can_be_refused() -> None:
    tensor = torch.ones(1, device=DEVICE)
    torch_device.set_sync_debug_mode("error")
    try:
        tensor + 1
        with pytest.raises(RuntimeError, match="synchronizing operation: item"):
            tensor.item()
    finally:
        torch_device.set_sync_debug_mode("default")
    assert tensor.item() == 1


# ---------------------------------------------------------------------------------------------------------- streams
def write(tensor: torch.Tensor) -> None:
    tensor.fill_(1.0)


def read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1.0


@pytest.mark.parametrize("first", [write, read])
@pytest.mark.parametrize("second", [write, read])
def test_an_access_that_does_not_wait_is_a_race(first: object, second: object) -> None:
    tensor, side = torch.zeros(4, device=DEVICE), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        first(tensor)  # type: ignore[operator]
    second(tensor)  # type: ignore[operator]
    if first is second is read:
        assert not found()
        return
    (text,) = found()
    assert text.startswith("race: ")
    earlier, now = text.split("now, on stream")
    assert first.__name__ in earlier and second.__name__ in now and HERE in earlier and HERE in now  # type: ignore[attr-defined]


def test_waiting_for_a_stream_or_an_event_is_no_race() -> None:
    tensor, side, event = torch.zeros(4, device=DEVICE), Stream(), Event()
    side.wait_stream(current_stream())
    with stream(side):
        write(tensor)
        event.record(side)
    current_stream().wait_event(event)
    read(tensor)
    side.wait_stream(current_stream())
    with stream(side):
        write(tensor)
    side.synchronize()
    read(tensor)
    assert not found()


def test_other_bytes_are_no_race() -> None:
    tensor, side = torch.zeros(8, device=DEVICE), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        write(tensor[:4])
    read(tensor[4:])
    assert not found()
    read(tensor[3:])
    assert len(found()) == 1


def test_memory_that_another_stream_uses_may_not_be_freed() -> None:
    for mend in (lambda _, __: None, torch.Tensor.record_stream, lambda _, side: current_stream().wait_stream(side)):
        tensor, side = torch.zeros(4, device=DEVICE), Stream()
        side.wait_stream(current_stream())
        with stream(side):
            write(tensor)
        mend(tensor, side)
        del tensor
    (text,) = found()
    assert text.startswith("freed: ") and library.reports()[text] == 1


def test_a_fault_can_be_an_error_where_it_is_found() -> None:
    tensor, side = torch.zeros(4, device=DEVICE), Stream()
    with stream(side):
        library.set_raising(True)
        with pytest.raises(RuntimeError, match="race: "):
            read(tensor)
        library.set_raising(False)


# --------------------------------------------------------------------------------------------------------- overlap
def test_delayed_copies_are_waited_for_in_order() -> None:
    """Values pass through pinned memory and two streams, in the right order for any delays."""
    library.set_delay(3)
    side, there, back = Stream(), torch.empty(64).pin_memory(), torch.empty(64).pin_memory()
    for number in range(20):
        there.fill_(number)
        with stream(side):
            came = there.to(DEVICE, non_blocking=True)
        current_stream().wait_stream(side)
        came.record_stream(current_stream())
        side.wait_stream(current_stream())
        doubled = came * 2
        side.wait_stream(current_stream())
        with stream(side):
            back.copy_(doubled, non_blocking=True)
        doubled.record_stream(side)
        side.synchronize()
        assert back.tolist() == [2.0 * number] * 64
    assert not found()


def test_a_delayed_copy_is_not_there_before_a_wait() -> None:
    library.set_delay(200)
    host, event = torch.zeros(3, pin_memory=True), Event()
    host.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    event.record()
    assert not event.query() and host.isnan().all()
    event.synchronize()
    assert host.tolist() == [1, 1, 1] and event.query()


def test_the_device_is_named_as_torch_names_devices() -> None:
    assert torch.device(DEVICE).type == torch_device.NAME
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
    assert torch.emulated.device_count() == library.device_count()


def test_a_module_keeps_its_parameters_with_their_attributes() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    weight.mark = True
    assert layer.to(DEVICE).weight is weight and weight.mark and weight.device.type == DEVICE
    layer.weight.sum().backward()
    assert weight.grad is not None and layer.cpu().weight is weight
