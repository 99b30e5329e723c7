"""A layer arrives as it left: one test for each thing that moves with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_dynmo.engine.move.arriving import ArrivingLayer
from ds_dynmo.engine.move.packing import PackedLayer, pack
from ds_dynmo.engine.state.layer_record import LayerRecord
from ds_dynmo.engine.state.optimizer_state import PerParameterState

CPU = torch.device("cpu")


class Layer(nn.Module):
    """A layer with one of everything that a layer may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.frozen = False
        self.sparse: Any = None
        self.extra = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state["extra"]


class Unpicklable(Layer):
    """A layer with a lambda in an attribute, so that it must be pickled in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Callable[[float], float] = lambda x: x


def unprepared(name: str) -> None:
    """Give no parameter a prepared place."""


def send(
    packed: PackedLayer,
    build: Callable[[], nn.Module],
    place: Callable[[str], torch.Tensor | None] = unprepared,
) -> LayerRecord:
    arrival = ArrivingLayer(packed.header)
    arrival.build(build, CPU)
    arrival.allocate(CPU, place)
    arrival.load(CPU)
    transmit(packed.tensors, arrival.recv_buffers)
    return arrival.materialize()


def transmit(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    for there, here in zip(received, sent, strict=True):
        there.copy_(here)


def travel(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> LayerRecord:
    return send(pack(PerParameterState(optimizer).record(module)), type(module))


@pytest.fixture(params=[Layer, Unpicklable])
def layer(request: pytest.FixtureRequest) -> Layer:
    return request.param()


def test_sparse_csr_tensors_move() -> None:
    layer = Layer()
    layer.sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr()
    layer.linear.weight = nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=True)
    module = travel(layer).module
    for there, here in ((module.sparse, layer.sparse), (module.linear.weight, layer.linear.weight)):
        assert there.layout == torch.sparse_csr
        assert torch.equal(there.to_dense(), here.to_dense())
    assert isinstance(module.linear.weight, nn.Parameter)


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo_tensors_move(coalesced: bool) -> None:
    """The gradient of an nn.Embedding(sparse=True) keeps the order of its terms."""
    layer = Layer()
    layer.sparse = torch.sparse_coo_tensor([[2, 0, 2]], torch.arange(6.0).reshape(3, 2), (4, 2))
    if coalesced:
        layer.sparse = layer.sparse.coalesce()
    there = travel(layer).module.sparse
    assert there.layout == torch.sparse_coo and there.is_coalesced() == coalesced and there.shape == (4, 2)
    assert torch.equal(there._indices(), layer.sparse._indices())
    assert torch.equal(there._values(), layer.sparse._values())


def test_tensors_of_any_shape_move(layer: Layer) -> None:
    layer.linear.weight, layer.linear.bias = nn.Parameter(torch.randn(7, 3)), None  # type: ignore[assignment]
    layer.register_buffer("nothing", torch.empty(0, 3))
    layer.register_buffer("scalar", torch.tensor(2.5))
    layer.register_buffer("wide", torch.ones(1).expand(4))
    module = travel(layer).module
    assert torch.equal(module.linear.weight, layer.linear.weight) and module.linear.bias is None
    assert module.nothing.shape == (0, 3) and module.scalar.item() == 2.5 and torch.equal(module.wide, layer.wide)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_optimizer_state_and_group_move(layer: Layer, make: type[torch.optim.Optimizer]) -> None:
    extra = {"momentum": 0.9} if make is torch.optim.SGD else {}
    groups = [{"params": [layer.linear.bias], "lr": 0.5}, {"params": [layer.linear.weight]}]
    optimizer = make(groups, lr=0.1, **extra)
    layer.linear(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    arrived = travel(layer, optimizer)
    groups = {name: found.group for name, found in arrived.parameters.items()}
    assert groups == {"linear.weight": 1, "linear.bias": 0} and arrived.group_options[0]["lr"] == 0.5
    for name, parameter in layer.named_parameters():
        state = arrived.parameters[name].state
        assert state is not None and state.keys() == optimizer.state[parameter].keys()
        for kind, value in optimizer.state[parameter].items():
            assert torch.equal(state[kind], value) if isinstance(value, torch.Tensor) else state[kind] == value


def test_a_parameter_used_twice_stays_one() -> None:
    layer = Layer()
    layer.again = layer.linear.weight  # type: ignore[assignment]
    module = travel(layer).module
    assert module.again is module.linear.weight


def test_bytes_are_counted() -> None:
    module = nn.Linear(3, 4)
    assert pack(PerParameterState(None).record(module)).num_bytes == (12 + 4) * 4


def test_a_parameter_arrives_in_the_place_prepared_for_it(layer: Layer) -> None:
    flat = torch.zeros(12 + 4)
    places = {"linear.weight": flat[4:], "linear.bias": flat[:4]}
    arrived = send(pack(PerParameterState(None).record(layer)), type(layer), places.get).module
    assert torch.equal(flat, torch.cat([layer.linear.bias, layer.linear.weight.flatten()]))
    assert arrived.linear.weight.data_ptr() == flat[4:].data_ptr()


def test_a_transposed_parameter_keeps_its_memory_order() -> None:
    layer = nn.Linear(3, 4, bias=False)
    layer.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    flat = torch.zeros(12)
    arrived = send(pack(PerParameterState(None).record(layer)), nn.Identity, lambda name: flat).module
    assert torch.equal(arrived.weight, layer.weight) and arrived.weight.stride() == layer.weight.stride()
    assert not flat.any()


def test_a_view_of_a_parameter_stays_a_view(layer: Layer) -> None:
    layer.top = layer.linear.weight.detach()[1:3]  # type: ignore[assignment]
    layer.column = layer.linear.weight.detach()[:, 1]  # type: ignore[assignment]
    packed = pack(PerParameterState(None).record(layer))
    module = send(packed, type(layer)).module
    with torch.no_grad():
        module.linear.weight.fill_(7.0)
    assert module.top.tolist() == [[7.0] * 3] * 2 and module.column.tolist() == [7.0] * 4
    assert packed.num_bytes == (12 + 4) * 4 + 4 + 8


def test_the_device_of_the_rank_is_that_of_the_receiver(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    layer.devices = [torch.device(text) for text in ("cuda:1", "cuda:0", "cuda", "cpu")]  # type: ignore[assignment]
    monkeypatch.setattr(get_accelerator(), "current_device", lambda: 1)
    packed = pack(PerParameterState(None).record(layer))
    monkeypatch.setattr(get_accelerator(), "current_device", lambda: 2)
    module: Any = send(packed, type(layer)).module
    assert [str(device) for device in module.devices] == ["cuda:2", "cuda:0", "cuda", "cpu"]


def test_views_of_several_dtypes_stay_views(layer: Layer) -> None:
    layer.whole = torch.arange(8.0)  # type: ignore[assignment]
    layer.bits = layer.whole.view(torch.int32)
    layer.part = layer.whole[2:4]  # type: ignore[index]
    layer.bytes = layer.bits.view(torch.uint8)[12:20]
    layer.columns = layer.whole.view(2, 4)[:, 1:3]  # type: ignore[operator]
    views = travel(layer).module
    views.whole.neg_()
    layer.whole.neg_()
    for name in ("whole", "bits", "part", "bytes", "columns"):
        there, here = getattr(views, name), getattr(layer, name)
        assert there.dtype == here.dtype and there.stride() == here.stride() and torch.equal(there, here), name


def test_views_of_a_deleted_tensor_move() -> None:
    layer = Layer()
    layer.left, layer.right = torch.arange(12.0).view(3, 4).chunk(2, dim=1)  # type: ignore[assignment]
    module = travel(layer).module
    assert torch.equal(module.left, layer.left) and torch.equal(module.right, layer.right)


def test_added_and_replaced_submodules_move(layer: Layer) -> None:
    layer.added = nn.Linear(2, 2)
    layer.linear = nn.Sequential(layer.linear, nn.Linear(4, 2))  # type: ignore[assignment]
    content = travel(layer)
    module = content.module
    assert [name for name, _ in module.named_modules()] == [name for name, _ in layer.named_modules()]
    assert {id(found.parameter) for found in content.parameters.values()} == {id(p) for p in module.parameters()}
    assert torch.equal(module.added.weight, layer.added.weight)


def test_a_list_of_own_parameters_stays_shared(layer: Layer) -> None:
    layer.all = [layer.linear.weight]  # type: ignore[assignment]
    module = travel(layer).module
    assert module.all[0] is module.linear.weight


def test_an_unpicklable_submodule_that_the_spec_does_not_build_is_refused(layer: Layer) -> None:
    layer.added = Unpicklable()
    with pytest.raises(TypeError, match=r"submodules \['added'\]"):
        travel(layer)


def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def scale_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 10


@pytest.mark.parametrize("frozen", [False, True])
def test_hooks_on_a_parameter_move(layer: Layer, frozen: bool) -> None:
    layer.linear.weight.register_hook(halve)
    layer.linear.bias.register_post_accumulate_grad_hook(scale_gradient)
    layer.requires_grad_(not frozen)
    module = travel(layer).module
    assert module.linear.weight.requires_grad == (not frozen)
    module.requires_grad_(True)
    module.linear(torch.ones(1, 3)).sum().backward()
    assert module.linear.weight.grad.eq(0.5).all() and module.linear.bias.grad.eq(10.0).all()


def test_a_hook_that_is_registered_later_replaces_none_that_arrived(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = layer.linear.register_forward_hook(doubled)
    packed = pack(PerParameterState(None).record(layer))
    monkeypatch.setattr(RemovableHandle, "next_id", handle.id)  # as in a process that has registered fewer
    module = send(packed, type(layer)).module
    module.linear.register_forward_hook(doubled)
    inputs = torch.ones(1, 3)
    assert torch.equal(module.linear(inputs), layer.linear(inputs) * 2)


def test_a_hook_that_cannot_travel_is_refused(layer: Layer) -> None:
    layer.linear.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(TypeError, match=r"shape \[4, 3\] has the hook .*lambda"):
        travel(layer)


def test_zeroing_elements_keeps_the_step_count() -> None:
    scalar, matrix = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.Adam([scalar, matrix])
    (scalar * matrix.sum()).backward()
    optimizer.step()
    state = PerParameterState(optimizer)
    state.zero_elements(scalar, torch.tensor(True))
    state.zero_elements(matrix, torch.eye(2).bool())
    for parameter, left in ((scalar, 0), (matrix, 2)):
        held = state.state_of(parameter)
        assert held["step"] == 1
        assert all(int(part.count_nonzero()) == left for part in (parameter, held["exp_avg"], held["exp_avg_sq"]))


class MovesMore(Unpicklable):
    """Counts its moves to a device, by which a class may move what its lambda works with."""

    moves = 0

    def _apply(self, *arguments: Any, **options: Any) -> nn.Module:
        MovesMore.moves += 1
        return super()._apply(*arguments, **options)


@pytest.mark.parametrize("kind", [Unpicklable, MovesMore])
def test_a_layer_built_for_its_parts_has_no_values_and_moves_only_as_its_class_says(
    kind: type[Layer],
) -> None:
    built, moves = kind(), MovesMore.moves
    ArrivingLayer(pack(PerParameterState(None).record(kind())).header).build(lambda: built, CPU)
    assert all(tensor.is_meta for tensor in (*built.parameters(), *built.buffers()))
    assert MovesMore.moves - moves == (kind is MovesMore)


# -- constant tensors, which are sent first -------------------------------------------------------------------


def trained(layer: Layer) -> torch.optim.Optimizer:
    """Make an optimizer with moments and a step count for the linear layer."""
    optimizer = torch.optim.Adam(layer.linear.parameters())
    layer.linear(torch.ones(3)).sum().backward()
    optimizer.step()
    return optimizer


def travel_in_two_parts(
    layer: Layer, optimizer: torch.optim.Optimizer, change: Callable[[], None]
) -> tuple[LayerRecord, PackedLayer]:
    """Send the constant tensors, call ``change``, and send the rest. Return what arrives, and what was packed last."""
    state, build = PerParameterState(optimizer), type(layer)
    ahead = pack(state.record(layer))
    first = ArrivingLayer(ahead.header)
    first.build(build, CPU)
    first.allocate(CPU, unprepared)
    first.load(CPU)
    transmit(ahead.changed_by_step, first.changed_by_step)
    change()
    rest = pack(state.record(layer), sent_ahead=ahead)
    arrival = ArrivingLayer(rest.header)
    arrival.build(build, CPU)
    arrival.allocate(CPU, unprepared, first)
    arrival.load(CPU)
    transmit(rest.tensors, arrival.recv_buffers)
    return arrival.materialize(), rest


def test_weights_and_moments_are_sent_first_and_the_rest_later(layer: Layer) -> None:
    optimizer = trained(layer)
    packed = pack(PerParameterState(optimizer).record(layer))
    elements = layer.linear.weight.numel() + layer.linear.bias.numel()
    assert sum(flat.numel() for flat in packed.changed_by_step) == 3 * 4 * elements
    assert (
        sum(flat.numel() for flat in packed.changed_any_time) == 4 + 8 + 2 * 4 + 4 * elements
    )  # buffers, steps, gradients


def test_constant_tensors_are_sent_once(layer: Layer) -> None:
    def change() -> None:
        layer.scratch.fill_(7.0)
        layer.frozen = True
        layer.linear.bias.requires_grad_(False)
        for held in optimizer.state.values():
            held["step"] += 1

    optimizer = trained(layer)
    content, rest = travel_in_two_parts(layer, optimizer, change)
    module = content.module
    assert not rest.changed_by_step
    assert torch.equal(module.linear.weight, layer.linear.weight) and module.linear.weight is not layer.linear.weight
    assert torch.equal(module.scratch, layer.scratch) and module.frozen and not module.linear.bias.requires_grad
    for name, parameter in layer.named_parameters():
        here, there = optimizer.state[parameter], content.parameters[name].state
        assert there is not None and there["step"] == 2 and torch.equal(there["exp_avg"], here["exp_avg"])


@pytest.mark.parametrize("how", ["in place", "other memory", "other parameter"])
def test_a_constant_tensor_that_changed_is_sent_again(layer: Layer, how: str) -> None:
    def change() -> None:
        if how == "in place":
            with torch.no_grad():
                layer.linear.weight.fill_(3.0)
        elif how == "other memory":
            layer.linear.weight.data = torch.full((4, 3), 3.0)
        else:
            layer.linear.weight = nn.Parameter(torch.full((2, 3), 3.0))

    content, rest = travel_in_two_parts(layer, trained(layer), change)
    assert [flat.numel() for flat in rest.changed_by_step] == [4 * layer.linear.weight.numel()]
    assert torch.equal(content.module.linear.weight, layer.linear.weight)


def traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.ones(3))  # type: ignore[no-any-return]


def test_a_layer_that_was_compiled_stays() -> None:
    compiled: list[tuple[Layer, str]] = []
    for path, named in (("", r"the layer itself \(Layer\)"), ("linear", r"linear \(Linear\)")):
        layer = Layer()
        layer.get_submodule(path).compile()
        compiled.append((layer, rf'{named} was compiled by its method compile.*"compile": true'))
    for compiles in (torch.jit.script, traced):
        layer = Layer()
        layer.linear = compiles(nn.Linear(3, 4))
        compiled.append((layer, r'linear was compiled by torch\.jit .* use the module .*"compile": true'))
    for layer, message in compiled:
        with pytest.raises(TypeError, match=message):
            pack(PerParameterState(None).record(layer))
            pytest.fail(f"not refused: {message}")


def values_after(change: Callable[[Layer, torch.optim.Optimizer], None], layer: Layer) -> list[torch.Tensor] | None:
    """Pack a layer, ``change`` it, and list what is left to send."""
    optimizer = trained(layer)
    layer.zero_grad()
    state = PerParameterState(optimizer)
    packed = pack(state.record(layer))
    layer.linear(torch.full((3,), 2.0)).sum().backward()
    change(layer, optimizer)
    return packed.values_left(state.record(layer), None, state.gradient_dtype)


def halved(hidden: torch.Tensor) -> torch.Tensor:
    return hidden / 2


def tripled(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 3


class Scripted(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.jit.script(halved)


def test_a_scripted_function_is_that_of_the_layer_as_built() -> None:
    layer = Scripted()
    arrived = send(pack(PerParameterState(None).record(layer)), Scripted).module
    assert arrived.activation(torch.ones(1)) == 0.5
    layer.activation = torch.jit.script(tripled)
    with pytest.raises(TypeError, match=r"activation of .* is the scripted function tripled"):
        travel(layer)


def test_only_values_are_left_if_a_batch_changed_nothing_else() -> None:
    """The layer that was built before the batch gets them."""
    layer = Layer()
    optimizer = trained(layer)
    layer.zero_grad()
    state = PerParameterState(optimizer)
    packed = pack(state.record(layer))
    arrival = ArrivingLayer(packed.header)
    arrival.allocate(CPU, unprepared)
    arrival.load(CPU)
    transmit(packed.changed_by_step, arrival.changed_by_step)
    layer.scratch.fill_(7.0)
    layer.linear(torch.full((3,), 2.0)).sum().backward()
    for held in optimizer.state.values():
        held["step"] += 1
    values = packed.values_left(state.record(layer), None, state.gradient_dtype)
    assert values is not None
    transmit(values, arrival.expect_gradients(state.gradient_dtype))
    arrived = arrival.materialize()
    assert torch.equal(arrived.module.scratch, layer.scratch)
    assert torch.equal(arrived.module.linear.weight, layer.linear.weight)
    for name, parameter in layer.named_parameters():
        record = arrived.parameters[name]
        assert record.gradient is not None and parameter.grad is not None and record.state is not None
        assert torch.equal(record.gradient, parameter.grad) and record.state["step"] == 2


def _frozen_in_the_batch(layer: Layer) -> None:
    layer.linear.bias.requires_grad_(False)
    layer.linear.bias.grad = None


OTHERWISE: dict[str, Callable[[Layer, torch.optim.Optimizer], Any]] = {
    "without a gradient": lambda layer, _: setattr(layer.linear.bias, "grad", None),
    "frozen in the batch": lambda layer, _: _frozen_in_the_batch(layer),
    "another attribute": lambda layer, _: setattr(layer, "frozen", True),
    "another rate": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "another weight": lambda layer, _: layer.linear.weight.detach().add_(1.0),
    "another buffer": lambda layer, _: setattr(layer, "scratch", torch.zeros(3)),
    "one more tensor": lambda layer, _: setattr(layer, "sparse", torch.ones(2)),
    "a sparse gradient": lambda layer, _: setattr(layer.linear.weight, "grad", torch.zeros(4, 3).to_sparse()),
    "a lambda": lambda layer, _: setattr(layer, "extra", lambda: 1),
}


def test_a_layer_that_changed_otherwise_is_packed_again() -> None:
    assert values_after(lambda layer, optimizer: None, Layer()) is not None
    for how, change in OTHERWISE.items():
        assert values_after(change, Layer()) is None, how


def test_a_layer_sent_in_parts_is_packed_again() -> None:
    assert values_after(lambda layer, optimizer: None, Unpicklable()) is None
