"""Random generators that a program makes, of torch, numpy and Python: their states, and new seeds."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

_KINDS = (torch.Generator, numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState, random.Random)


def is_generator(value: Any) -> bool:
    """Return whether ``value`` is a random generator that has a state."""
    return is_generator_class(type(value))  # a proxy may say that it is of another class, or fail to


def is_generator_class(kind: type) -> bool:
    """Return whether the instances of a class are random generators that have a state."""
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


def state_of(generator: Any) -> Any:
    """Return the state of a generator, for :func:`restore`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits_of(generator).state


def restore(generator: Any, state: Any) -> None:
    """Set a generator to a state of :func:`state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    else:
        _bits_of(generator).state = state


def seed(generator: Any, number: int) -> None:
    """Set a generator to a state derived from ``number``, of 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, numpy.random.RandomState):
        try:
            generator.seed(number >> 32)
        except TypeError:  # not of numpy's default algorithm
            bits = getattr(numpy.random, generator.get_state(legacy=False)["bit_generator"])
            generator.set_state(numpy.random.RandomState(bits(number)).get_state(legacy=False))
    else:
        _bits_of(generator).state = type(_bits_of(generator))(number).state


def _bits_of(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator
