"""The rules of ``keep_together``, ``[[6, 7], "type:REGEX"]``, checked without a model."""

from __future__ import annotations

import re
from typing import Any

from ds_dynmo.layer_groups import TYPE_RULE, KeepRule

_ALLOWED = f'should be a list of runs such as [6, 7], and of "{TYPE_RULE}REGEX"'


def parse_keep_together(rules: Any) -> tuple[KeepRule, ...]:
    """Check the rules, and return them as tuples and strings.

    The regular expression of a ``type:`` rule is all that follows, ``|`` and ``:`` too.

    Raises:
        ValueError: an invalid rule; says which one, and what is allowed.
    """
    if not isinstance(rules, list | tuple):
        raise ValueError(_ALLOWED)
    return tuple(_parse_rule(rule) for rule in rules)


def _parse_rule(rule: Any) -> KeepRule:
    if isinstance(rule, str):
        return _check_type_rule(rule)
    if not isinstance(rule, list | tuple) or any(type(layer) is not int for layer in rule):
        raise ValueError(f"{_ALLOWED}; it has {rule!r}")
    run = tuple(rule)
    if len(run) < 2 or run[0] < 0 or run != tuple(range(run[0], run[0] + len(run))):
        raise ValueError(f"a run is two or more consecutive layer numbers, such as [6, 7]; it has {list(run)}")
    return run


def _check_type_rule(rule: str) -> str:
    pattern = rule.removeprefix(TYPE_RULE)
    if pattern == rule or not pattern:
        raise ValueError(f'{_ALLOWED}; it has "{rule}"')
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f'"{pattern}" is not a regular expression ({error})') from error
    return rule
