"""Seed the named random states that layers fork: Megatron's and DeepSpeed's trackers, and the user's.

A tracker (``get_cuda_rng_tracker()``) keeps states of its own beside the default generators, for example one for random
numbers that differ between tensor-parallel slices. The states belong to the rank, and Megatron seeds them by the stage
too. So while a layer runs, each state is set to one derived from the layer's seed, the tracker, the state's name and a
slice: the first slice of the stage whose state was equal when it was first seen. So slices with equal states get equal
numbers, others do not, and neither depends on the stage.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.deepspeed.checkpointing import TRACKER, checkpointing_mpu, deepspeeds_tracker
from ds_dynmo.errors import ConfigError

State = torch.Tensor | torch.Generator
Saved = list[tuple[Any, dict[str, torch.Tensor]]]

_MODULES = (  # of Megatron, Megatron-DeepSpeed, GPT-NeoX and fairscale
    "megatron.core.tensor_parallel.random",
    "megatron.core.tensor_parallel",
    "megatron.mpu.random",
    "megatron.mpu",
    "mpu.random",
    "mpu",
    "fairscale.nn.model_parallel.random",
)
_KEY = struct.Struct("<Qq")


def find_trackers() -> dict[str, Any]:
    """Find the trackers of this process by name, each once, in the libraries that are loaded."""
    found = {"deepspeed.checkpointing": deepspeeds_tracker()}
    for name in _MODULES:
        found[name] = _tracker_of(sys.modules.get(name))
    found["mpu"] = _tracker_of(checkpointing_mpu())
    each: dict[int, str] = {}
    for name, tracker in found.items():
        each.setdefault(id(tracker), name)
    return {name: found[name] for name in each.values() if found[name] is not None}


def _tracker_of(holder: Any) -> Any:
    """Find the tracker of a module or an ``mpu``; None: it has none, or none yet.

    Megatron's ``get_cuda_rng_tracker`` makes a missing tracker and so chooses its kind. So it is not called before.
    """
    if hasattr(holder, TRACKER):
        return getattr(holder, TRACKER)
    function = getattr(holder, "get_cuda_rng_tracker", None)
    if not callable(function):
        return None
    home = sys.modules.get(getattr(function, "__module__", ""))
    return getattr(home, TRACKER) if hasattr(home, TRACKER) else function()


def states_of(name: str, tracker: Any) -> dict[str, State]:
    """Return the states of a tracker.

    Raises:
        ConfigError: they cannot be enumerated.
    """
    lacking = [method for method in ("get_states", "set_states") if not callable(getattr(tracker, method, None))]
    states = None if lacking else tracker.get_states()
    if not isinstance(states, Mapping) or not all(isinstance(state, State) for state in states.values()):
        why = (
            f"it has no {' and no '.join(lacking)}" if lacking else "get_states() gives no tensor or generator by name"
        )
        raise ConfigError(
            f"random states of {name} ({type(tracker).__name__}) cannot be enumerated: {why}. Layers that fork them "
            "would get other numbers after a move; give it both, or set dynmo.randomness.per_layer = false"
        )
    return dict(states)


def check_trackers() -> None:
    """Refuse trackers in this process whose states cannot be enumerated.

    Raises:
        ConfigError: naming the tracker.
    """
    for name, tracker in find_trackers().items():
        states_of(name, tracker)


class TrackedStates:
    """Seeds and restores the states of all trackers together.

    Args:
        gather: gathers a value of every tensor-parallel slice of this stage and replica, by slice index. Collective.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather
        self._own: dict[str, Any] = {}
        self._trackers: dict[str, Any] = {}  # those that have states
        self._slices: dict[tuple[str, str], int] = {}  # by tracker and state name, the first slice with an equal state
        self._generators = [torch.Generator()]
        if get_accelerator().device_name() != "cpu":
            self._generators.append(torch.Generator(get_accelerator().current_device_name()))

    @property
    def are_there(self) -> bool:
        """Did :meth:`find` find any?"""
        return bool(self._trackers)

    def add(self, name: str, tracker: Any) -> None:
        """Add a tracker of the user's.

        Args:
            name: unlike other trackers', and the same in every run.
            tracker: has ``get_states()``, a dict from a name to a state (the tensor that a generator's ``get_state``
                gives, or a ``torch.Generator``), and ``set_states(states)``.

        Raises:
            ConfigError: its states cannot be enumerated, or there is another one of that name.
        """
        states_of(name, tracker)
        if self._own.get(name, tracker) is not tracker:
            raise ConfigError(f"there is another tracker of random states named {name!r}: give each a name of its own")
        self._own[name] = tracker

    def find(self) -> None:
        """Find new trackers and states. Collective over the tensor-parallel slices of a stage, if there are new states.

        Raises:
            ConfigError: a tracker's states cannot be enumerated.
        """
        known = find_trackers()
        known |= {name: own for name, own in self._own.items() if all(own is not other for other in known.values())}
        states = {name: states_of(name, tracker) for name, tracker in known.items()}
        self._trackers = {name: tracker for name, tracker in known.items() if states[name]}
        held = {(name, key): state for name, found in states.items() for key, state in found.items()}
        new = {key: _digest(state) for key, state in held.items() if key not in self._slices}
        if new:
            every = self._gather(new)
            for key, digest in new.items():
                self._slices[key] = next(index for index, theirs in enumerate(every) if theirs.get(key) == digest)

    def seed(self, seed: int) -> None:
        """Set each state to one derived from ``seed``."""
        for name, tracker in self._trackers.items():
            states = dict(tracker.get_states())
            for key, state in states.items():
                if (name, key) in self._slices:  # a state that a layer added in this batch is seeded from the next on
                    states[key] = self._seeded(state, _derived(seed, name, key, self._slices[name, key]))
            tracker.set_states(states)

    def state(self) -> Saved:
        """Return what :meth:`restore` takes."""
        return [
            (tracker, {key: _bytes_of(state) for key, state in tracker.get_states().items()})
            for tracker in self._trackers.values()
        ]

    def restore(self, saved: Saved) -> None:
        """Restore states; those added since stay."""
        for tracker, states in saved:
            present = dict(tracker.get_states())
            for key in present.keys() & states.keys():
                if isinstance(present[key], torch.Generator):
                    present[key].set_state(states[key])
                else:
                    present[key] = states[key]
            tracker.set_states(present)

    def _seeded(self, state: State, seed: int) -> State:
        if isinstance(state, torch.Generator):
            return state.manual_seed(seed)
        fitting = (g for g in self._generators if g.get_state().numel() == state.numel())
        return next(fitting, self._generators[-1]).manual_seed(seed).get_state()


def _bytes_of(state: State) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _digest(state: State) -> bytes:
    return hashlib.blake2b(_bytes_of(state).cpu().numpy().tobytes(), digest_size=16).digest()


def _derived(seed: int, tracker: str, key: str, first_slice: int) -> int:
    packed = _KEY.pack(seed % 2**64, first_slice) + f"{tracker}/{key}".encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
