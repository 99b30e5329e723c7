"""Seeds of the named random states that layers fork, in trackers of Megatron, DeepSpeed and the user.

A tracker (``get_cuda_rng_tracker()``) keeps states besides the default generators, for example one for random numbers
that differ between tensor-parallel slices. The states belong to the rank, and Megatron seeds them by the stage too. So
while a layer runs, each state is set to one derived from the layer's seed, the tracker, the state's name and a slice:
the first slice of the stage with an equal state when it was first seen. So slices with equal states get equal numbers,
slices with different states do not, and numbers do not depend on the stage.

The same holds for generators that layers share: an argument of several LayerSpecs, a global variable of the program.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.deepspeed.checkpointing import TRACKER, checkpointing_mpu, deepspeeds_tracker
from ds_dynmo.engine.run import generators
from ds_dynmo.errors import ConfigError

State = Any  # a torch.Tensor, or a generator of any kind
Saved = list[tuple[Any, dict[str, Any]]]

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
    """Return the trackers in the loaded libraries by name, each once."""
    trackers = {"deepspeed.checkpointing": deepspeeds_tracker()}
    for name in _MODULES:
        trackers[name] = _tracker_of(sys.modules.get(name))
    trackers["mpu"] = _tracker_of(checkpointing_mpu())
    names: dict[int, str] = {}
    for name, tracker in trackers.items():
        names.setdefault(id(tracker), name)
    return {name: trackers[name] for name in names.values() if trackers[name] is not None}


def _tracker_of(holder: Any) -> Any:
    """Return the tracker of a module or an ``mpu``; None: it has none (yet).

    Megatron's ``get_cuda_rng_tracker`` creates a missing tracker and so fixes its kind. So it is not called before.
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
    if not isinstance(states, Mapping) or not all(
        isinstance(state, torch.Tensor) or generators.is_generator(state) for state in states.values()
    ):
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


class SharedGenerators:
    """The random generators of a program that no layer owns, as a tracker of their states.

    Args:
        find: returns the present ones by name.
    """

    def __init__(self, find: Callable[[], dict[str, Any]]) -> None:
        self.get_states = find

    def set_states(self, states: Mapping[str, State]) -> None:
        """Do nothing: they have changed in place."""


class TrackedStates:
    """Seeds and restores the states of all trackers together.

    Args:
        gather: gathers a value of every tensor-parallel slice of this stage and replica, by slice index. Collective.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather
        self._added: dict[str, Any] = {}  # by the user
        self._trackers: dict[str, Any] = {}  # trackers with states
        self._first_seen: dict[tuple[str, str], bytes] = {}  # by tracker and state name, a digest of the state
        self._slices: dict[tuple[str, str], int] = {}  # likewise, the first slice with an equal state
        self._generators = [torch.Generator()]
        if get_accelerator().device_name() != "cpu":
            self._generators.append(torch.Generator(get_accelerator().current_device_name()))

    @property
    def are_there(self) -> bool:
        """Whether :meth:`find` has found states."""
        return bool(self._trackers)

    def add(self, name: str, tracker: Any) -> None:
        """Add a user's tracker.

        Args:
            name: unique, and the same in every run.
            tracker: with ``get_states()``, which returns a dict of states by name (the tensor of a generator's
                ``get_state``, or a ``torch.Generator``), and ``set_states(states)``.

        Raises:
            ConfigError: its states cannot be enumerated, or there is another tracker of this name.
        """
        states_of(name, tracker)
        if self._added.get(name, tracker) is not tracker:
            raise ConfigError(f"there is another tracker of random states named {name!r}: give each a name of its own")
        self._added[name] = tracker

    def find(self) -> None:
        """Find new trackers and states. Collective over the tensor-parallel slices of a stage, whether it has any.

        Raises:
            ConfigError: a tracker's states cannot be enumerated.
        """
        known = find_trackers()
        known |= {name: added for name, added in self._added.items() if not any(added is t for t in known.values())}
        states = {name: states_of(name, tracker) for name, tracker in known.items()}
        self._trackers = {name: tracker for name, tracker in known.items() if states[name]}
        held = {(name, key): state for name, of_tracker in states.items() for key, state in of_tracker.items()}
        self._first_seen |= {key: _digest(state) for key, state in held.items() if key not in self._first_seen}
        of_slices = self._gather(self._first_seen)
        for key, digest in self._first_seen.items():
            self._slices[key] = next(index for index, theirs in enumerate(of_slices) if theirs.get(key) == digest)

    def seed(self, seed: int) -> None:
        """Set each state to one derived from ``seed``."""
        for name, tracker in self._trackers.items():
            states = dict(tracker.get_states())
            for key, state in states.items():
                if (name, key) in self._slices:  # states added in this batch are seeded from the next on
                    states[key] = self._seeded(state, _derived(seed, name, key, self._slices[name, key]))
            tracker.set_states(states)

    def state(self) -> Saved:
        """Return all states, for :meth:`restore`."""
        return [
            (tracker, {key: _saved(state) for key, state in tracker.get_states().items()})
            for tracker in self._trackers.values()
        ]

    def restore(self, saved: Saved) -> None:
        """Restore states; keep those added since."""
        for tracker, states in saved:
            present = dict(tracker.get_states())
            for key in present.keys() & states.keys():
                if isinstance(present[key], torch.Tensor):
                    present[key] = states[key]
                else:
                    generators.restore(present[key], states[key])
            tracker.set_states(present)

    def _seeded(self, state: State, seed: int) -> State:
        if not isinstance(state, torch.Tensor):
            generators.seed(state, seed)
            return state
        fitting = (g for g in self._generators if g.get_state().numel() == state.numel())
        return next(fitting, self._generators[-1]).manual_seed(seed).get_state()


def _saved(state: State) -> Any:
    return state if isinstance(state, torch.Tensor) else generators.state_of(state)


def _digest(state: State) -> bytes:
    saved = _saved(state)
    content = saved.cpu().numpy().tobytes() if isinstance(saved, torch.Tensor) else pickle.dumps(saved)
    return hashlib.blake2b(content, digest_size=16).digest()


def _derived(seed: int, tracker: str, key: str, first_slice: int) -> int:
    packed = _KEY.pack(seed % 2**64, first_slice) + f"{tracker}/{key}".encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
