"""What pickle would load back as something else is told from what it would not."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_dynmo.engine.move.description import can_be_sent, describe, first_difference, why_it_stays
from ds_dynmo.engine.move.object_graph import text


@dataclasses.dataclass(frozen=True)
class Settings:
    width: int
    names: tuple[str, ...] = ()


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}


class Weight(torch.Tensor):
    pass


class Loud(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


class Slow(nn.Module):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "rate": 2})  # type: ignore[no-untyped-call]


def multiplier(factor: int) -> Callable[[int], int]:
    return lambda value: value * factor


def with_hook(layer: nn.Module, factor: int) -> nn.Module:
    layer.register_forward_hook(multiplier(factor))  # type: ignore[arg-type]
    return layer


@pytest.mark.parametrize(
    "value",
    [
        nn.LSTM(2, 2),
        nn.TransformerEncoderLayer(4, 2),
        Holder(cache=[1], kept={1, 2}),
        torch.ops.aten.add,
        torch.finfo(torch.bfloat16),
        ValueError("a", 1),
        {Settings(1): [torch.zeros(2)]},
    ],
)
def test_values_that_can_be_sent(value: Any) -> None:
    assert why_it_stays(value) is None


@pytest.mark.parametrize(
    "value", [multiplier(2), threading.Lock(), [torch.zeros(2).as_subclass(Weight)], Loud(1, "no"), Slow()]
)
def test_values_that_cannot_be_sent(value: Any) -> None:
    assert not can_be_sent(value)


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        (multiplier(2), multiplier(2), None),
        (multiplier(2), multiplier(3), ".<variable 0>"),
        (lambda value: value + 1, lambda value: value + 2, ""),
        (with_hook(nn.ReLU(), 2), with_hook(nn.ReLU(), 2), None),
        (with_hook(nn.ReLU(), 2), nn.ReLU(), "._forward_hooks[0]"),
        ([1, 2.0], [1, 2], "[1]"),
        ([held := [1], held], [[1], [1]], "[1]"),
        ([(1, 2), (1, 2)], [same := (1, 2), same], None),
        ({"a", "b"}, {"b", "c"}, ""),
        (Holder(cache=1, kept=1), Holder(kept=1), None),
    ],
)
def test_the_first_difference(first: Any, second: Any, path: str | None) -> None:
    found = first_difference(*(describe([((), value)], {}) for value in (first, second)))
    assert (None if found is None else text(found[0])) == path
