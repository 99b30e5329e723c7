"""Explain what is wrong with an object, one line per key, in terms of the JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ds_dynmo.config.withdrawn import refusal


def explain(error: ValidationError, model_class: type[BaseModel], data: Any, name: str) -> Iterator[str]:
    """Write one line per key that is wrong; the complaints of a union's branches share one line."""
    complaints: dict[tuple[int | str, ...], list[Any]] = {}
    for detail in error.errors(include_url=False):
        complaints.setdefault(_key_path(detail, data), []).append(detail)
    for path, details in complaints.items():
        dotted = name + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
        owners = _models_at(model_class, path[:-1], data)
        fields = {key: field for owner in owners for key, field in owner.model_fields.items()}
        description = fields[str(path[-1])].description if path and path[-1] in fields else None
        without_numbers = name + "".join(f".{key}" for key in path if isinstance(key, str))
        unknown = details[0]["type"] == "extra_forbidden"
        if said := (unknown and refusal(without_numbers)) or refusal(f"{dotted} = {show(details[0]['input'])}"):
            yield said
            continue
        own_words = details[0]["type"] == "value_error"  # our own validators say what is allowed
        suffix = f" ({description})" if description and not own_words else ""
        if details[0]["type"].startswith("union_tag"):
            key, tagged = str(path[-1]), details[0]["input"]
            tags = [tag for owner in owners for tag in get_args(owner.model_fields[key].annotation)]
            found = f"{dotted} = {show(tagged[key])}" if key in tagged else f"{dotted}: is required"
            yield f"{found}; {suggest(str(tagged.get(key)), tags)}"
        elif details[0]["type"] == "missing":
            yield f"{dotted}: is required{suffix}"
        elif unknown:
            yield f"{dotted} = {show(details[0]['input'])}: unknown key; {suggest(str(path[-1]), fields)}"
        else:
            problem = " or ".join(dict.fromkeys(_problem(detail) for detail in details))
            yield f"{dotted} = {show(details[0]['input'])}: {problem}{suffix}"


def _problem(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])  # without pydantic's "Value error, "
    if detail["type"] in ("model_type", "model_attributes_type"):
        return "should be an object"
    return str(detail["msg"]).removeprefix("Input ")


def _key_path(detail: Mapping[str, Any], data: Any) -> tuple[int | str, ...]:
    """Drop from a location the names of union branches, which pydantic adds and which are not keys of ``data``."""
    path: list[int | str] = []
    loc, kind = detail["loc"], detail["type"]
    for part in loc:
        in_list = isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        known = in_list or (isinstance(data, dict) and part in data)
        if known:
            data = data[part]
        if known or (kind == "missing" and part == loc[-1]):
            path.append(part)
    if kind.startswith("union_tag"):  # the key that selects the branch is missing or wrong
        path.append(detail["ctx"]["discriminator"].strip("'"))
    return tuple(path)


def _models_at(model_class: type[BaseModel], path: Iterable[int | str], data: Any) -> list[type[BaseModel]]:
    """List the models that the object at ``path`` of ``data`` may be: of tagged ones that of its tag, if it has one."""
    models = [model_class]
    for key in path:
        data = data[key]
        if isinstance(key, str):
            fields = [field for model in models for name, field in model.model_fields.items() if key == name]
            models = [model for field in fields for model in _models_in(field.annotation)]
    return [model for model in models if _has_tag_of(model, data)] or models


def _has_tag_of(model: type[BaseModel], data: Any) -> bool:
    """Return whether the keys of ``model`` that allow one value have it in ``data``."""
    for name, field in model.model_fields.items():
        allowed = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        if len(allowed) == 1 and not (isinstance(data, dict) and data.get(name) == allowed[0]):
            return False
    return True


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def suggest(word: str, known: Iterable[str]) -> str:
    """Suggest the nearest of the ``known`` words, or else all of them."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    nearest = difflib.get_close_matches(word.lower(), by_lower, n=1)
    if nearest:
        return f'did you mean "{by_lower[nearest[0]]}"?'
    return f"should be one of {', '.join(by_lower.values())}"


def show(value: Any) -> str:
    """Format ``value`` as JSON, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."
