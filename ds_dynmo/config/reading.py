"""Read a DeepSpeed configuration and parse its objects, with errors that name the full key path."""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ds_dynmo.config.dynmo import DynMoConfig
from ds_dynmo.config.explain import explain, show
from ds_dynmo.errors import ConfigError

BLOCK = "dynmo"

Model = TypeVar("Model", bound=BaseModel)


def read_dynmo_config(config: str | os.PathLike[str] | dict[str, Any]) -> DynMoConfig | None:
    """Read the "dynmo" block of a DeepSpeed configuration; None if there is none.

    Args:
        config: as for ``deepspeed.initialize``: a path to a JSON file, a dict, or the JSON in URL-safe base64.

    Raises:
        ConfigError: a configuration that cannot be read, an invalid block, or a top-level key that looks like a
            misspelt "dynmo". The message has one line for each problem of the block.
    """
    settings = load_settings(config)
    for key in settings:
        if key != BLOCK and isinstance(key, str) and _is_misspelt(key):
            raise ConfigError(f'{key}: unknown top-level key; did you mean "{BLOCK}"?')
    if BLOCK not in settings:
        return None
    return parse_block(DynMoConfig, settings[BLOCK], BLOCK)


def load_settings(config: Any) -> dict[str, Any]:
    """Read a DeepSpeed configuration with the library that DeepSpeed reads it with: it may have comments.

    Args:
        config: as for ``deepspeed.initialize``: a path, a dict, or the text in URL-safe base64.

    Raises:
        ConfigError: it cannot be read, is no object, or has a key twice in one object.
    """
    if isinstance(config, dict):
        return config
    import hjson  # comes with DeepSpeed, which the partitioners alone do not need

    if isinstance(config, os.PathLike) or (isinstance(config, str) and os.path.exists(config)):
        return _parse_object(_text_of(config), os.fspath(config), hjson.loads)
    if isinstance(config, str):
        try:
            text = base64.urlsafe_b64decode(config).decode("utf-8")
        except ValueError:
            text = ""
        if text.lstrip().startswith("{"):
            return _parse_object(text, "the base64 DeepSpeed config", hjson.loads)
        raise ConfigError(f"{show(config)}: no such file, and no JSON object in base64 either")
    raise ConfigError(f"a DeepSpeed config should be a path, a dict or a base64 string, got {type(config).__name__}")


def load_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON object in the file at ``path``.

    Raises:
        ConfigError: no such file, invalid JSON, no object, or a key given twice in one object.
    """
    return _parse_object(_text_of(path), os.fspath(path), json.loads)


def parse_block(model_class: type[Model], data: Any, name: str) -> Model:
    """Parse ``data`` into a ``model_class``.

    Args:
        name: its key in the configuration, with which every key path begins.

    Raises:
        ConfigError: one line for each problem: the full key path, the value, and what is allowed.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{name} = {show(data)}: should be an object, such as {{}} for all defaults")
    try:
        return model_class.model_validate(data)
    except ValidationError as error:
        lines = explain(error, model_class, data, name)
    raise ConfigError("\n".join(lines))


def _text_of(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {error}") from error


def _parse_object(text: str, source: str, loads: Callable[..., Any]) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if duplicates:
            raise ConfigError(f"{source}: keys given more than once in one object: {', '.join(duplicates)}")
        return dict(pairs)

    if not text.strip():  # which hjson takes for an empty object
        raise ConfigError(f"{source}: is empty")
    try:
        value = loads(text, object_pairs_hook=without_duplicates)
    except ConfigError:
        raise
    except ValueError as error:  # of json or hjson
        raise ConfigError(f"{source}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: should hold a JSON object, got {show(value)}")
    return value


def _is_misspelt(key: str) -> bool:
    """Tell whether ``key`` differs from "dynmo" only in case, punctuation or a letter. No key of DeepSpeed does."""
    letters = re.sub(r"[\W_]", "", key.lower())
    return difflib.SequenceMatcher(None, letters, BLOCK).ratio() >= 0.8
