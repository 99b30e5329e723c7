"""Read a DeepSpeed configuration and parse its objects, with errors that name the full key path."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from ds_dynmo.config.dynmo import DynMoConfig
from ds_dynmo.config.explain import explain, show
from ds_dynmo.config.top_level import SECTION, check_section_name, check_top_level
from ds_dynmo.errors import ConfigError, reason_of

Model = TypeVar("Model", bound=BaseModel)


def read_dynmo_config(config: str | os.PathLike[str] | dict[str, Any]) -> DynMoConfig | None:
    """Read the "dynmo" section of a DeepSpeed configuration; None if there is none.

    Args:
        config: as for ``deepspeed.initialize``: a path to a JSON file, a dict, or the JSON in URL-safe base64.

    Raises:
        ConfigError: a configuration that cannot be read, an invalid section, or a top-level key that looks like a
            misspelt "dynmo"; beside the section, one that looks like another of DeepSpeed's or belongs into the
            section. The message has one line for each problem of the section.
    """
    settings = load_settings(config)
    check_section_name(settings)
    if SECTION not in settings:
        return None
    check_top_level(settings)
    return parse_section(DynMoConfig, settings[SECTION], SECTION)


def load_settings(config: Any, changes: Iterable[str] = ()) -> dict[str, Any]:
    """Read a DeepSpeed configuration with the library that DeepSpeed reads it with: it may have comments.

    Args:
        config: as for ``deepspeed.initialize``: a path, a dict, or the text in URL-safe base64.
        changes: what ``--set`` gave: see :func:`with_changes`.

    Raises:
        ConfigError: it cannot be read, is no object, or has a key twice in one object; or a change cannot be made.
    """
    return with_changes(_load(config), changes)


def with_changes(settings: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Change a configuration as if its file said so, one change after the other.

    Args:
        changes: each ``KEY=VALUE``. KEY is a path such as ``model.case.threshold``; objects on it that are missing are
            made. VALUE is JSON, or a word, which is a string; ``null`` removes the key.

    >>> with_changes({"model": {"layers": 12, "case": {}}}, ["model.case=null", "model.layers=4", "dynmo.log=false"])
    {'model': {'layers': 4}, 'dynmo': {'log': False}}

    Raises:
        ConfigError: naming ``--set``, and the part of the change that is wrong.
    """
    changed = settings
    for change in changes:
        changed = _with_change(changed, change)
    return changed


def _with_change(settings: dict[str, Any], change: str) -> dict[str, Any]:
    def refuse(why: str) -> NoReturn:
        raise ConfigError(f"--set {change}: {why}")

    path, equals, text = change.partition("=")
    *outer, key = keys = path.split(".")
    if not equals or not all(keys):
        refuse('should be KEY=VALUE, such as dynmo.interval=10 or \'model.case={"kind": "moe"}\'')
    value = _word_or_json(text, f"--set {change}")
    changed = section = dict(settings)
    for depth, name in enumerate(outer, start=1):
        inner = {} if section.get(name) is None else section[name]
        if not isinstance(inner, dict):
            refuse(f"{'.'.join(keys[:depth])} is {show(inner)}, and has no keys; give it whole")
        section[name] = dict(inner)
        section = section[name]
    if value is not None:
        section[key] = value
    elif key in section:
        del section[key]
    else:
        refuse("there is no such key to remove")
    return changed


def _word_or_json(text: str, source: str) -> Any:
    """Read the value of a change: what begins like JSON's objects, lists and strings has to be one."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates(source), parse_constant=_no_constant)
    except ConfigError:
        raise
    except ValueError as error:
        if not text.strip():
            raise ConfigError(f'{source}: has no value; "" is the empty string, null removes the key') from error
        if text.lstrip()[0] in '{["':
            raise ConfigError(f"{source}: is no JSON: {error}") from error
    return text


def _no_constant(name: str) -> NoReturn:
    """Take NaN and Infinity, which Python's json accepts, for words: a file cannot have them either."""
    raise ValueError(f"{name} is no number of JSON")


def _load(config: Any) -> dict[str, Any]:
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


def parse_section(model_class: type[Model], data: Any, name: str) -> Model:
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
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {reason_of(error)}") from error


def _parse_object(text: str, source: str, loads: Callable[..., Any]) -> dict[str, Any]:
    if not text.strip():  # which hjson takes for an empty object
        raise ConfigError(f"{source}: is empty")
    try:
        value = loads(text, object_pairs_hook=_without_duplicates(source))
    except ConfigError:
        raise
    except ValueError as error:  # of json or hjson
        raise ConfigError(f"{source}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: should hold a JSON object, got {show(value)}")
    return value


def _without_duplicates(source: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if duplicates:
            raise ConfigError(f"{source}: keys given more than once in one object: {', '.join(duplicates)}")
        return dict(pairs)

    return unique
