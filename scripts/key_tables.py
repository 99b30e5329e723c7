#!/usr/bin/env python3
"""Write the tables of JSON keys in docs/ from the models that read them.

    python scripts/key_tables.py            # rewrite the pages whose tables differ

A table stands between two comments of a page. The first one says which keys it has:

    <!-- keys of dynmo: interval, profile.* -->
    <!-- end of keys -->

``profile.*`` are the keys of the object "profile". Of a key that takes one of several objects, ``case=moe.*`` are the
keys of the one whose "kind" is "moe", and ``case=*`` are those of all, in a table for each.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_dynmo.config import DynMoConfig
from ds_dynmo.data import DataConfig
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import ModelConfig

PAGES = Path(__file__).resolve().parents[1] / "docs"
OBJECTS: dict[str, type[BaseModel]] = {
    "dynmo": DynMoConfig,
    "model": ModelConfig,
    "data": DataConfig,
}
TABLE = re.compile(r"(<!-- keys of ([\w ]+): ([^\n]*?) -->\n)(.*?)(<!-- end of keys -->)", re.DOTALL)
CODE = re.compile(
    r"""("[^"]*" | \{[^}]*\} | \[(?:[^\[\])]|\[[^\[\])]*\])*\]  # JSON: a string, an object, a list
    | \b(?:true|false|null)\b(?=:)                             # a constant, before what it means
    | \b[A-Za-z]\w*(?:\.\w+)+ | \b[A-Za-z]+_\w+)              # a name
    """,
    re.VERBOSE,
)
HEAD = "| key | default | meaning |\n| --- | --- | --- |\n"


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key of an object and its field, and those of the objects in it as ``object.key``.

    An object whose keys all have defaults is no key itself: its keys say all.
    """
    for name, field in model.model_fields.items():
        inner = list(dict.fromkeys(models_in(field.annotation)))
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if not isinstance(default, BaseModel):
            yield prefix + name, field
        for member in inner:
            path = f"{prefix}{name}." if len(inner) == 1 else f"{prefix}{name}={kind_of(member)}."
            yield from keys_of(member, path)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a value of this annotation may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def kind_of(model: type[BaseModel]) -> str:
    """Return the only value of the model's key "kind", which tells it from others; else the name of its class."""
    kind = model.model_fields.get("kind")
    values = get_args(kind.annotation) if kind is not None else ()
    return str(values[0]) if len(values) == 1 else model.__name__


def chosen_keys(name: str, patterns: str) -> list[tuple[str, FieldInfo]]:
    """Return the keys of an object that ``patterns`` name, in their order.

    Raises:
        ConfigError: a pattern names none.
    """
    keys = list(keys_of(OBJECTS[name]))
    chosen = []
    for pattern in patterns.split(", "):
        matching = [(path, field) for path, field in keys if fnmatchcase(path, pattern)]
        if not matching:
            raise ConfigError(f"keys of {name}: {pattern}: there is no such key")
        chosen += matching
    return chosen


def tables(name: str, patterns: str) -> str:
    """Make the table of the keys that ``patterns`` name; one for each object of which a key takes one."""
    parts = []
    for where, keys in groupby(chosen_keys(name, patterns), key=lambda key: object_of(key[0])):
        rows = [(path.removeprefix(where), default_of(field), meaning_of(field)) for path, field in keys]
        parts.append(HEAD + "".join(f"| `{key}` | {default} | {meaning} |\n" for key, default, meaning in rows))
    return "\n".join(parts)


def object_of(path: str) -> str:
    """Return the part of a path that says which of several objects a key is of.

    >>> object_of("case=moe.experts"), object_of("profile.batches")
    ('case=moe.', '')
    """
    where = re.match(r".*=\w+\.", path)
    return where[0] if where else ""


def default_of(field: FieldInfo) -> str:
    """Write a default as JSON."""
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.get_default(call_default_factory=True))}`"


def meaning_of(field: FieldInfo) -> str:
    """Write a description as a cell, and after it the values that a key may have, if it does not name them all."""
    parts = [field.description] if field.description else []
    values = [f'"{value}"' for value in choices_of(field.annotation)]
    if any(value not in "".join(parts) for value in values):
        parts.append(f"one of {', '.join(values)}")
    return cell("; ".join(parts))


def choices_of(annotation: Any) -> Iterator[str]:
    """Yield the strings that an annotation allows by their names."""
    if get_origin(annotation) is Literal:
        yield from (value for value in get_args(annotation) if isinstance(value, str))
    else:
        for argument in get_args(annotation):
            yield from choices_of(argument)


def cell(text: str) -> str:
    """Write a text as a cell of a table, with JSON and names in it as code.

    >>> cell('"a|b": <this> for my_key, such as [1, 2]; null: that')
    '<code>"a&#124;b"</code>: &lt;this> for `my_key`, such as `[1, 2]`; `null`: that'
    """
    plain, code = CODE.split(text)[::2], CODE.findall(text)
    marked = [f"<code>{escaped(piece)}</code>" if "|" in piece else f"`{piece}`" for piece in code]
    return "".join(escaped(before) + piece for before, piece in zip(plain, [*marked, ""]))


def escaped(text: str) -> str:
    """Replace what would end a cell or begin HTML."""
    return text.replace("<", "&lt;").replace("|", "&#124;")


def with_tables(page: str) -> str:
    """Return the text of a page with all its tables of keys as the models have them.

    Raises:
        ConfigError: a comment names keys that there are not.
    """
    return TABLE.sub(lambda match: match[1] + tables(match[2], match[3]) + match[5], page)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    for path in sorted(PAGES.rglob("*.md")):
        page = path.read_text()
        if with_tables(page) != page:
            path.write_text(with_tables(page))
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
