"""Read the pickle in a file of ``torch.save`` without running code: the names that it asks for, and numpy's values.

``torch.load(weights_only=True)`` stops at the first name that is not allowed; here are all of them. And it gives numpy
whatever a file says of a dtype: one that hides references to Python's objects is a way to run code. So each dtype and
array in a file is compared with what numpy itself would have written before numpy is allowed to load it.
"""

from __future__ import annotations

import _compat_pickle
import builtins
import io
import pickle
import re
import sys
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy

from ds_dynmo.errors import CheckpointError
from ds_dynmo.torch_private import pickle_of

_PLAIN = re.compile(r"[biufcSU][0-9]+")  # dtypes: bool, int, uint, float, complex, bytes, str
_TYPES = (numpy.bool_, numpy.number)
_NEVER = ("sys", "os", "posix", "nt")  # modules of which torch allows nothing
_RECONSTRUCT, _SCALAR = numpy.empty(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # of numpy 1 and 2


def _numbers(kind: type[Any]) -> Iterable[type[Any]]:
    """List the types of numpy's numbers."""
    for derived in kind.__subclasses__():
        yield from _numbers(derived)
    yield kind


NUMPY: tuple[tuple[Any, str], ...] = (
    (numpy.ndarray, "numpy.ndarray"),
    (numpy.dtype, "numpy.dtype"),
    *((_RECONSTRUCT, f"{module}._reconstruct") for module in _MODULES),
    *((_SCALAR, f"{module}.scalar") for module in _MODULES),
    *((kind, f"numpy.{kind.__name__}") for base in _TYPES for kind in _numbers(base) if kind.__module__ == "numpy"),
    *((numpy.bool_, f"numpy.{name}") for name in ("bool", "bool_")),
    # torch sets the state of a dtype only if its class is allowed; no file can ask for a name without a dot
    *((type(numpy.dtype(code)), f"dtype {code}") for code in "?bhilqBHILQefdgFDGSU"),
)
"""What loads numpy's plain values, each with its name in a file that :func:`names_in` has read."""


class Name(NamedTuple):
    """A class or a function by its module and its name there."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def names_in(path: str, trusted: Collection[str]) -> set[Name]:
    """Return the names that a file asks for. No code runs.

    Args:
        trusted: names that the user allowed; what they do with numpy's is not checked.

    Raises:
        CheckpointError: the file holds what cannot be loaded safely, whatever is allowed.
    """
    reader = _PickleReader(pickle_of(path), trusted)
    reader.load()
    if reader.problems:
        raise CheckpointError(f"it holds {'; '.join(sorted(reader.problems))}, which cannot be loaded safely")
    return reader.names


def lines_to_allow(names: Iterable[Name]) -> str:
    """Return the lines of Python that allow names, as one line."""
    ordered = sorted(names)
    outer = dict.fromkeys((module, name.partition(".")[0]) for module, name in ordered if module != "__main__")
    imports = [f"from {module} import {name}" for module, name in outer]
    allowed = f"torch.serialization.add_safe_globals([{', '.join(name for _, name in ordered)}])"
    return "; ".join([*imports, allowed])


class _StandIn:
    """Stands in for a name, called or not, and for what the call returns.

    Attributes:
        problems: of the whole file; what cannot be loaded safely is added.
    """

    name: Name
    problems: set[str]

    def __new__(cls, *_: Any) -> Any:
        """Take any arguments."""
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None:
        if str(self.name) not in ("collections.OrderedDict", "collections.Counter"):  # else torch refuses
            self.problems.add(f"a {self.name} (make it a dict)")

    def append(self, value: Any) -> None:
        """Note that this is no list: torch appends to lists alone."""
        self.problems.add(f"a {self.name} (make it a list)")

    def extend(self, values: Any) -> None:
        """Note the same."""
        self.append(values)


class _Dtype(_StandIn):
    """Stands in for a dtype of numpy."""

    plain: Any = None

    def __init__(self, text: Any = None, *_: Any) -> None:
        if isinstance(text, str) and _PLAIN.fullmatch(text):
            self.plain = numpy.dtype(text)
        else:
            self.problems.add(
                f"an array or a dtype of numpy's {text!r} (allowed are bool, integers, floats, complex numbers, bytes "
                "and str; make an array of objects a list)"
            )

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if self.plain is None:
            return
        if order not in ("<", ">", "|") or state != self.plain.newbyteorder(order).__reduce__()[2]:
            self.problems.add(f"a dtype that numpy does not write: {self.plain}, {state!r}")


class _Array(_StandIn):
    """Stands in for an array of numpy, made by ``_reconstruct``."""

    def __init__(self, kind: Any = None, shape: Any = None, code: Any = None) -> None:
        is_array = isinstance(kind, type) and issubclass(kind, _Class)
        if not (is_array and shape == (0,) and code in (b"b", "b")):
            named = kind.name if isinstance(kind, type) and issubclass(kind, _StandIn) else repr(kind)
            self.problems.add(f"a {named} (make it a numpy.ndarray)")

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, _, _ = state if isinstance(state, tuple) and len(state) == 5 else [None] * 5
        is_shape = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if not (is_shape and isinstance(dtype, _Dtype)):
            self.problems.add("an array that numpy does not write")


class _Class(_StandIn):
    """Stands in for the class ``numpy.ndarray``, which numpy names, and does not call."""

    def __init__(self, *_: Any) -> None:
        self.problems.add("a call of numpy.ndarray, which numpy does not write")


class _Scalar(_StandIn):
    """Stands in for a scalar of numpy."""

    def __init__(self, dtype: Any = None, *_: Any) -> None:
        if not isinstance(dtype, _Dtype):
            self.problems.add("a scalar that numpy does not write")


class _Encoded(_StandIn):
    """Stands in for bytes, which are pickled as text."""

    def __new__(cls, text: Any, *_: Any) -> Any:
        """Return short ones, with which numpy names a type."""
        return text.encode("latin1") if isinstance(text, str) and len(text) < 2 else super().__new__(cls)


_OF_NUMPY: dict[str, type[_StandIn]] = {
    "numpy.ndarray": _Class,
    "numpy.dtype": _Dtype,
    **{f"{module}._reconstruct": _Array for module in _MODULES},
    **{f"{module}.scalar": _Scalar for module in _MODULES},
}


class _PickleReader(pickle.Unpickler):
    """Loads stand-ins.

    Attributes:
        names: that the file asks for.
        problems: what cannot be loaded safely.
    """

    def __init__(self, pickled: bytes, trusted: Collection[str]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.names: set[Name] = set()
        self.problems: set[str] = set()
        self._trusted = trusted
        self._storage = self._stand_in(Name("torch", "storage"))

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that stands in for a name. Never the object of that name."""
        if (module, name) in _compat_pickle.NAME_MAPPING:  # torch.save writes some names as Python 2 does
            module, name = _compat_pickle.NAME_MAPPING[module, name]
        named = Name(_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        if str(named) == "builtins.getattr":  # of a member of an enum in some Pythons, or of a class within a class
            return self._attribute
        is_function = named.module == "builtins" and not isinstance(getattr(builtins, name, None), type)
        if named.module in _NEVER or (is_function and str(named) not in self._trusted):
            self.problems.add(f"what could run code: {named}")
        else:
            self.names.add(named)
        if str(named) == "_codecs.encode":
            return self._stand_in(named, _Encoded)
        of_numpy = None if "numpy.dtype" in self._trusted else _OF_NUMPY.get(str(named))
        return self._stand_in(named, of_numpy or _StandIn)

    def persistent_load(self, _: Any) -> Any:
        """Stand in for the values of a tensor."""
        return self._storage()

    def _stand_in(self, named: Name, kind: type[_StandIn] = _StandIn) -> type[_StandIn]:
        return type(named.name, (kind,), {"name": named, "problems": self.problems})

    def _attribute(self, owner: Any, attribute: str) -> Any:
        if not (isinstance(owner, type) and issubclass(owner, _StandIn)):
            self.problems.add(f"the attribute {attribute} of an object")
            return None
        found: Any = sys.modules.get(owner.name.module)
        for part in (*owner.name.name.split("."), attribute):
            found = getattr(found, "__dict__", {}).get(part)
        inner = Name(owner.name.module, f"{owner.name.name}.{attribute}")
        if isinstance(found, type):
            self.names.add(inner)
        return self._stand_in(inner)
