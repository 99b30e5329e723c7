"""Initial partitions by the types of layers: ``type:<regex>[:weight][|...]``."""

from __future__ import annotations

import math
import re

from ds_dynmo.errors import ConfigError

TYPE_PREFIX = "type:"


def parse_type_partition(text: str) -> tuple[tuple[str, float], ...]:
    """Parse the patterns and weights of ``"type:<regex>[:weight][|<regex>[:weight]...]"``, in the order given.

    A weight is the cost of each layer whose class name (function name, for a plain function) the regular
    expression matches: searched anywhere in the name, ignoring case, as DeepSpeed's ``type:`` does. The
    first pattern that matches counts; a layer that matches none costs 0. ``:`` and ``|`` separate, so a regular
    expression cannot contain them.

    >>> parse_type_partition("type:embed:2|block")
    (('embed', 2.0), ('block', 1.0))

    Raises:
        ConfigError: no ``type:`` in front, a regular expression that does not compile, a weight that is
            not a finite number > 0.
    """
    if not text.startswith(TYPE_PREFIX):
        raise ConfigError(f'should begin with "{TYPE_PREFIX}", got "{text}"')
    return tuple(_parse_type(part) for part in text[len(TYPE_PREFIX) :].split("|"))


def _parse_type(text: str) -> tuple[str, float]:
    pattern, _, weight_text = text.partition(":")
    separators = '":" and "|" separate, a regex cannot contain them'
    if not pattern:
        raise ConfigError(f'no regex in "{text}", should be <regex>[:weight]; {separators}')
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f'"{pattern}" is not a regular expression ({error}); {separators}') from error
    if ":" not in text:
        return pattern, 1.0
    try:
        weight = float(weight_text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ConfigError(f'the weight of "{pattern}" should be a number > 0, got "{weight_text}"; {separators}')
    return pattern, weight
