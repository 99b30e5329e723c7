"""What the engine does outside of layers is the same in every mode and under every default of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ds_dynmo.errors import ConfigError
from tests.support.configs import Case
from tests.support.harness import run_each
from tests.support.training import batches, build, drop_decision, freeze, layers_of, outcome_of, whole

pytestmark = pytest.mark.ranks

Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def set_globally(set_to: Callable[[Any], None], inside: Any, outside: Any) -> Iterator[None]:
    set_to(inside)
    try:
        yield
    finally:
        set_to(outside)


class PassingOn(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def not_for_training(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a tensor was saved for a backward pass")


future = torch.__future__
MODES: dict[str, Mode] = {
    "default": nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: set_globally(torch.set_default_dtype, torch.float16, torch.float32),
    "default device": lambda: set_globally(torch.set_default_device, "meta", None),
    "device": lambda: torch.device("meta"),
    "deterministic": lambda: set_globally(torch.use_deterministic_algorithms, True, False),
    "anomaly": torch.autograd.detect_anomaly,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(not_for_training, not_for_training),
    "no hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("disabled"),
    "function mode": PassingOn,
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "warn always": lambda: set_globally(torch.set_warn_always, True, False),
    "overwrite": lambda: set_globally(future.set_overwrite_module_params_on_conversion, True, False),
}
ALONE = ("default", "inference_mode", "no_grad")
OF_LAYERS = ("autocast", "default device", "device")  # in which a layer computes something else
TOGETHER = tuple(name for name in MODES if name not in (*ALONE, "no hooks"))


@contextmanager
def all_of(names: tuple[str, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(MODES[name]())
        yield


def keep_half(engine: Any) -> None:
    """Reduce a layer's bias to its first half, on the stage that has the layer."""
    layer: Any = layers_of(engine).get(1)
    if layer is None:
        engine.keep_elements([])
        return
    kept = layer.norm.bias.numel() // 2
    engine.keep_elements([(layer.norm, "bias", torch.arange(kept, device="cpu"))])
    layer.norm.forward = partial(normalize, layer.norm)


def normalize(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    bias = torch.nn.functional.pad(norm.bias, (0, norm.bias.numel()))
    return torch.nn.functional.layer_norm(hidden, norm.normalized_shape, norm.weight, bias)


def freeze_and_tell(engine: Any, layers: int) -> None:
    freeze(engine, layers)
    engine.model_changed("layers were frozen or thawed")
    drop_decision(engine)


def zero_first_elements(engine: Any) -> None:
    for layer in layers_of(engine).values():
        for parameter in layer.parameters():
            where = torch.zeros(parameter.shape, dtype=torch.bool, device="cpu")
            where.view(-1)[0] = True
            engine.zero_elements(parameter, where)


def train(names: tuple[str, ...], precision: str, folder: str) -> dict[str, Any]:
    """Do everything that changes layers between two batches inside of modes."""
    engine = build(Case(precision=precision, micro_batches=2))
    data, losses = batches(engine), []

    def evaluate() -> None:
        losses.append(engine.eval_batch(batches(engine, seed=7)).item())

    between: list[list[Callable[[], Any]]] = [
        [evaluate, lambda: engine.rebalance([0, 2, 8])],
        [lambda: engine.rebalance([0, 6, 8]), lambda: freeze_and_tell(engine, 2)],
        [lambda: engine.save_checkpoint(folder, tag="saved"), lambda: engine.rebalance([0, 3, 8])],
        [lambda: engine.load_checkpoint(folder, tag="saved"), lambda: freeze_and_tell(engine, 0)],
        [lambda: zero_first_elements(engine), lambda: keep_half(engine)],
        [lambda: engine.rebalance([0, 4, 8], background=True)],
        [engine.rebalance],
    ]
    for actions in between:
        losses.append(engine.train_batch(data).item())
        for action in actions:
            with all_of(tuple(name for name in names if action is not evaluate or name not in OF_LAYERS)):
                action()
    losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


@pytest.mark.parametrize(
    ("precision", "calls"),
    [
        ("fp32", [("default",), ("inference_mode",), TOGETHER]),
        *(
            pytest.param(precision, [(name,) for name in MODES], marks=pytest.mark.nightly)
            for precision in ("fp32", "bf16", "bf16 zero1")
        ),
    ],
)
def test_modes_of_torch_change_nothing(precision: str, calls: list[tuple[str, ...]], tmp_path: Any) -> None:
    expected, *others = run_each(2, train, *((names, precision, str(tmp_path)) for names in calls))
    for names, found in zip(calls[1:], others, strict=True):
        assert found[0]["losses"] == expected[0]["losses"], names
        assert whole(found) == whole(expected), names


def refuse_without_values() -> list[str]:
    engine = build(Case())
    engine.train_batch(batches(engine))
    said = []
    for call in (engine.rebalance, engine.repack, lambda: engine.eval_batch(batches(engine))):
        with FakeTensorMode(), pytest.raises(ConfigError) as refusal:
            call()
        said.append(str(refusal.value))
    return said


def test_tensors_without_values_are_refused() -> None:
    [results] = run_each(2, refuse_without_values, ())
    for rebalance, repack, evaluate in results:
        assert rebalance.startswith("engine.rebalance was called in a mode of torch in which new tensors are FakeTen")
        assert repack.startswith("engine.repack was") and evaluate.startswith("engine.eval_batch was")
