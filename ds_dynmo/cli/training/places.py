"""Where a setting of ds-dynmo-train stands: find the place that a key at the top level, or a flag, was meant for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ds_dynmo.config import DynMoConfig
from ds_dynmo.config.explain import show
from ds_dynmo.config.top_level import DEEPSPEED_KEYS
from ds_dynmo.data import DataConfig
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig

_SECTIONS: dict[str, type[BaseModel]] = {"model": ModelConfig, "data": DataConfig, "dynmo": DynMoConfig}
_FLAGS = ("steps", "stop_at", "stages", "save", "save_interval", "keep", "export", "resume", "record")
_STEPS = "--steps, which counts batches (docs/data.md, Order, says how many an epoch has)"
_WORDS = {  # of other programs
    **dict.fromkeys(("epoch", "epochs", "num_epochs", "num_train_epochs", "max_steps", "train_steps"), _STEPS),
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.params.lr"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "train_micro_batch_size_per_gpu"),
    "lora": "model.peft",
    "max_grad_norm": "gradient_clipping",
    "weight_decay": "optimizer.params.weight_decay",
}
_NEAR = 0.75  # similarity of "dat" and "data", and of "batch_size" and "train_batch_size"


def check_every_key(settings: Mapping[str, Any]) -> None:
    """Refuse a key at the top level that is neither DeepSpeed's nor a section of ours.

    A script may keep settings of its own there. The command has none that reads them.

    Raises:
        ConfigError: naming the key and the nearest place.
    """
    for key, value in settings.items():
        if key not in _SECTIONS and key not in DEEPSPEED_KEYS:
            place = place_of(key) or _nearest(key)
            meant = f"did you mean {place}?" if place else f"sections beside DeepSpeed's are {', '.join(_SECTIONS)}"
            raise ConfigError(f"{key} = {show(value)}: neither DeepSpeed nor ds-dynmo-train reads this key; {meant}")


def place_of(word: str) -> str | None:
    """Return where a setting of this name stands: a dotted key, or a flag; None: there is none of this name."""
    return dict(_named_places()).get(word.lower().replace("-", "_"))


def flag_meant_by(flag: str) -> str | None:
    """Say how to give what an unknown flag names; None: nothing has this name."""
    place = place_of(flag.removeprefix("--"))
    if place is None or place.startswith("--"):
        return place and f"did you mean {place}?"
    return f"did you mean --set {place}=VALUE?"


def _named_places() -> Iterator[tuple[str, str]]:
    """List names and their places; of two places of a name the last counts."""
    for section, config in reversed(_SECTIONS.items()):
        yield from ((field, f"{section}.{field}") for field in config.model_fields)
    yield from ((flag, f"--{flag.replace('_', '-')}") for flag in _FLAGS)
    yield from _WORDS.items()
    yield from ((key, key) for key in (*DEEPSPEED_KEYS, *_SECTIONS))


def _nearest(key: str) -> str | None:
    places = dict(_named_places())
    nearest = difflib.get_close_matches(key.lower(), places, n=1, cutoff=_NEAR)
    return places[nearest[0]] if nearest else None
