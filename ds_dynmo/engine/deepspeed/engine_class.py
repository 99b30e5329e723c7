"""Derive ds_dynmo's engine from the user's engine, a subclass of DeepSpeed's ``PipelineEngine``.

Methods are looked up in ds_dynmo's engine, then in the user's, then in DeepSpeed's. So the user's ``train_batch``,
which may call DeepSpeed's or not, runs inside ds_dynmo's. Methods that replace DeepSpeed's (checkpoints, clipping) are
beneath the user's class instead: the user's method runs, and calls ds_dynmo's by ``super()``.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_dynmo.engine.engine import DynMoPipelineEngine
from ds_dynmo.errors import ConfigError


class _Above(PipelineEngine):
    """Directly above the user's engine: records which attributes the user's constructor sets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        before = set(vars(self))
        super().__init__(*args, **kwargs)
        others = before | self.__dict__.pop("_set_by_deepspeed")
        self.__dict__["_set_by_theirs"] = {name: vars(self)[name] for name in vars(self).keys() - others}


class _Beneath(PipelineEngine):
    """Directly beneath the user's engine: its calls of DeepSpeed's methods reach ds_dynmo's."""

    dynmo: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        before = set(vars(self))  # includes what the user's constructor set before it called this one
        super().__init__(*args, **kwargs)
        self.__dict__["_set_by_deepspeed"] = vars(self).keys() - before

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        save = super().save_checkpoint if self.dynmo is None else partial(DynMoPipelineEngine.save_checkpoint, self)
        return save(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        load = super().load_checkpoint if self.dynmo is None else partial(DynMoPipelineEngine.load_checkpoint, self)
        return load(*args, **kwargs)

    def clip_fp32_gradients(self) -> None:
        clip = (
            super().clip_fp32_gradients
            if self.dynmo is None
            else partial(DynMoPipelineEngine.clip_fp32_gradients, self)
        )
        clip()


_REPLACED = ("save_checkpoint", "load_checkpoint", "clip_fp32_gradients")


def engine_class(given: Any) -> partial[DynMoPipelineEngine]:
    """Derive ds_dynmo's engine class from the user's, with the keywords that the user bound to it.

    Args:
        given: DeepSpeed's ``PipelineEngine`` or a subclass, or ``functools.partial`` of one with keywords.

    Raises:
        ConfigError: it is something else, or defines names that ds_dynmo's engine uses.
    """
    user_class, options = given, {}
    if isinstance(given, partial) and not given.args:
        user_class, options = given.func, given.keywords
    if not (isinstance(user_class, type) and issubclass(user_class, PipelineEngine)):
        raise ConfigError(
            f"engine_class = {given!r}: has to be a subclass of deepspeed.runtime.pipe.engine.PipelineEngine, or "
            "functools.partial of one with keyword arguments"
        )
    return partial(_built_upon(user_class), **options)


@cache
def _built_upon(user_class: type[PipelineEngine]) -> type[DynMoPipelineEngine]:
    if user_class is PipelineEngine:
        return DynMoPipelineEngine
    if issubclass(user_class, DynMoPipelineEngine):
        return user_class
    taken = _added_names(user_class) & (_added_names(DynMoPipelineEngine) - set(dir(PipelineEngine)))
    if taken:
        raise ConfigError(
            f"engine_class = {user_class.__qualname__}: it defines {', '.join(sorted(taken))}, which ds_dynmo's engine "
            "uses for something else; rename what you define"
        )

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        DynMoPipelineEngine.__init__(self, *args, **kwargs)
        set_by_theirs = self.__dict__.pop("_set_by_theirs")
        clashing = sorted(name for name, value in set_by_theirs.items() if vars(self).get(name) is not value)
        if clashing:
            raise ConfigError(
                f"engine_class = {user_class.__qualname__}: its constructor sets {', '.join(clashing)}, which "
                "ds_dynmo's engine uses for something else; rename what you set"
            )

    names = [name for name in _REPLACED if getattr(user_class, name) is not getattr(PipelineEngine, name)]
    methods: dict[str, Any] = {name: getattr(user_class, name) for name in names}
    methods |= {"__init__": __init__, "__module__": user_class.__module__, "__doc__": user_class.__doc__}
    return type(f"DynMo{user_class.__name__}", (DynMoPipelineEngine, _Above, user_class, _Beneath), methods)


def _added_names(kind: type) -> set[str]:
    """List the names that a subclass of DeepSpeed's engine adds, attributes too, without dunder names."""
    classes = [base for base in kind.__mro__ if base not in PipelineEngine.__mro__]
    names = {name for base in classes for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in names if not (name.startswith("__") and name.endswith("__"))}
