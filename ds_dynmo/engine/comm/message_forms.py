"""The form of messages between stages: shapes, dtypes, strides, and the tensors for which a gradient comes back.

DeepSpeed (0.19.8, runtime/pipe/engine.py:1129, 1187, 1224) lets every received floating tensor require a gradient,
sends one back for each, and waits for one for each sent tensor. It fails if a mask or a table of cosines has none. Here
the sender of activations announces with their shapes which tensors require a gradient, and only these are sent back. So
the form of an activation message says how its gradient message looks, but for the strides of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch

from ds_dynmo.engine.comm import tensor_layouts
from ds_dynmo.engine.comm.tensor_layouts import Strides
from ds_dynmo.errors import ConfigError

_NUMBERS = 1024  # in an announcement
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

Content = tuple[tuple[torch.Size, torch.dtype], ...]  # of a message, per tensor


class MessageKind(IntEnum):
    """The kind of a message between chunks."""

    ACTIVATION = 1
    GRADIENT = 2


class Lane(NamedTuple):
    """The messages of one kind between the chunks ``boundary`` and ``boundary + 1``."""

    kind: MessageKind
    boundary: int


@dataclass(frozen=True)
class MessageForm:
    """The form of the activations or gradients between two chunks.

    Attributes:
        content: shape and dtype of each tensor.
        flags: per tensor, whether a gradient comes back; of gradients none does.
        in_tuple: whether the layer returned a tuple.
        strides: with which each tensor arrives.
    """

    content: Content
    flags: tuple[bool, ...]
    in_tuple: bool
    strides: tuple[Strides, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], flags: Sequence[bool], *, in_tuple: bool) -> MessageForm:
        """Return the form of these tensors."""
        content = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        return cls(content, tuple(flags), in_tuple, tuple(map(tensor_layouts.strides_of, tensors)))

    @classmethod
    def of_gradients(cls, gradients: Sequence[torch.Tensor]) -> MessageForm:
        """Return the form of these gradients."""
        return cls.of(gradients, [False] * len(gradients), in_tuple=True)

    def packed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is sent of ``tensors``: contiguous tensors of the same shapes."""
        return [tensor_layouts.packed(tensor, strides) for tensor, strides in zip(tensors, self.strides, strict=True)]

    def unpacked(self, sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of which this was ``sent``."""
        return [tensor_layouts.unpacked(tensor, strides) for tensor, strides in zip(sent, self.strides, strict=True)]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.content)

    @cached_property
    def gradients(self) -> Content:
        """Shape and dtype of each gradient that comes back."""
        return tuple(each for each, flag in zip(self.content, self.flags) if flag)

    def announcement(self, device: torch.device) -> torch.Tensor:
        """Write the form as numbers, in a tensor of a fixed size.

        Raises:
            ConfigError: there are too many tensors or dimensions, or the dtype of one cannot be sent.
        """
        numbers = [len(self.content), self.in_tuple]
        for (shape, dtype), flag, strides in zip(self.content, self.flags, self.strides):
            if dtype not in _DTYPES:
                raise ConfigError(f"a stage cannot send a tensor of {dtype}: return it as {torch.uint8}")
            numbers += [_DTYPES.index(dtype), flag, len(shape), *shape, *strides]
        if len(numbers) > _NUMBERS:
            raise ConfigError(
                f"a message between stages has {len(self.content)} tensors, whose shapes take {len(numbers)} "
                f"numbers to announce; {_NUMBERS} are possible: return fewer tensors, stacked"
            )
        announced = torch.zeros(_NUMBERS, dtype=torch.int64, device="cpu")
        announced[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return announced.to(device)

    @staticmethod
    def empty_announcement(device: torch.device) -> torch.Tensor:
        """Allocate a tensor to receive an :meth:`announcement` in."""
        return torch.empty(_NUMBERS, dtype=torch.int64, device=device)

    @classmethod
    def announced(cls, announcement: torch.Tensor) -> MessageForm:
        """Read an :meth:`announcement`.

        >>> form = MessageForm.of([torch.ones(2, 3), torch.ones(4).bool()], [True, False], in_tuple=True)
        >>> MessageForm.announced(form.announcement(torch.device("cpu"))) == form
        True
        """
        numbers = iter(announcement.tolist())
        count, in_tuple = next(numbers), bool(next(numbers))
        content, flags, strides = [], [], []
        for _ in range(count):
            dtype, flag, dimensions = next(numbers), bool(next(numbers)), next(numbers)
            content.append((torch.Size([next(numbers) for _ in range(dimensions)]), _DTYPES[dtype]))
            flags.append(flag)
            strides.append(tuple(next(numbers) for _ in range(dimensions)))
        return cls(tuple(content), tuple(flags), in_tuple, tuple(strides))


class KnownForms:
    """The forms that both sides of each boundary between chunks know, in training and in evaluations.

    A form is announced once, with the first message after :meth:`forget`; or with every message, if shapes change.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bool, Lane], MessageForm] = {}

    def forget(self) -> None:
        """Make the next messages announce their forms. Every stage has to call this between the same two batches."""
        self._known = {}

    def are_known(self, *, training: bool) -> bool:
        """Return whether anything was announced since :meth:`forget`, the same on every stage of several."""
        return any(key[0] == training for key in self._known)

    def get(self, training: bool, lane: Lane) -> MessageForm | None:
        """Return the form of the messages of a lane; None: it is to be announced."""
        return self._known.get((training, lane))

    def activations(self, training: bool, boundary: int) -> MessageForm | None:
        """Return the form of the activations of a boundary; None: it is to be announced."""
        return self.get(training, Lane(MessageKind.ACTIVATION, boundary))

    def learn(self, training: bool, lane: Lane, form: MessageForm) -> None:
        """Record what was announced."""
        self._known[training, lane] = form


def listed(content: Content) -> str:
    """Describe shapes and dtypes, for a message."""
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in content) or "nothing"
