import doctest
import importlib
import pkgutil

import pytest

import ds_dynmo.schedules as package

MODULES = [module.name for module in pkgutil.iter_modules(package.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"{package.__name__}.{name}")).failed == 0


def test_every_public_name_exists_and_is_documented() -> None:
    for name in package.__all__:
        assert getattr(package, name).__doc__, name
