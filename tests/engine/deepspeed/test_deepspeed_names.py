"""Every private name of DeepSpeed that ds_dynmo uses is looked up before anything is built."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from ds_dynmo.config.top_level import DEEPSPEED_KEYS
from ds_dynmo.engine.deepspeed import probe
from ds_dynmo.engine.deepspeed.names import BELOW, NEEDED, OLDEST, TESTED, PrivateName
from ds_dynmo.errors import ConfigError


def test_the_installed_deepspeed_has_all_names_each_listed_once() -> None:
    probe.check_deepspeed()
    assert len({(name.owner, name.name) for name in NEEDED}) == len(NEEDED)


def test_each_missing_name_is_reported() -> None:
    for number, name in enumerate(NEEDED):
        with pytest.MonkeyPatch.context() as patch:
            _remove(name, patch)
            with pytest.raises(ConfigError) as caught:
                probe.check_deepspeed([name] if number else NEEDED)
                pytest.fail(f"{name} is not missed")
        message = str(caught.value)
        assert f"deepspeed {deepspeed.__version__}: it has no {name}. " in message
        assert all(version in message for version in TESTED)


def test_each_missing_parameter_of_a_function_is_reported() -> None:
    for name in (name for name in NEEDED if name.takes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe._owner(name.owner), name.name, lambda self: None)
            with pytest.raises(ConfigError, match=f"{name} takes no {', '.join(name.takes)}. "):
                probe.check_deepspeed([name])


def test_an_untested_version_is_refused_with_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.18.9", OLDEST + "rc1", BELOW, "1.0", "unknown"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        with pytest.raises(ConfigError) as caught:
            probe.check_deepspeed()
            pytest.fail(f"{version} is not refused")
        tested = f"deepspeed >= {OLDEST} and < {BELOW} (tested: {', '.join(TESTED)})"
        assert str(caught.value) == f"deepspeed {version}: ds_dynmo works with {tested}"
    for version in (*TESTED, "0.19.9", TESTED[-1] + ".post1", TESTED[-1] + "+cu128"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        probe.check_deepspeed()
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"deepspeed>={OLDEST},<{BELOW}"' in project


def test_a_name_that_imports_need_is_reported_too() -> None:
    code = (
        "import deepspeed.utils.debug as debug, ds_dynmo\n"
        "del debug.debug_clear_module_and_param_names\n"
        "try:\n    ds_dynmo.initialize\n"
        "except ds_dynmo.ConfigError as error:\n    print('refused:', error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert "has no deepspeed.utils.debug.debug_clear_module_and_param_names. " in done.stdout, done.stderr


def _remove(name: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the name from DeepSpeed."""
    owner = probe._owner(name.owner)
    for holder in owner.__mro__ if isinstance(owner, type) else [owner]:
        if name.name in vars(holder) and holder is not object:
            monkeypatch.delattr(holder, name.name)
    if isinstance(owner, type):
        for function in list(probe._functions(owner)):
            monkeypatch.setattr(function, "__code__", _renamed(function.__code__, name.name))
        probe._mentioned.cache_clear()
        monkeypatch.setattr(probe, "_mentioned", inspect.unwrap(probe._mentioned))


def _renamed(code: CodeType, name: str) -> CodeType:
    nested = [_renamed(each, name) if isinstance(each, CodeType) else each for each in code.co_consts]
    names = ["another" if each == name else each for each in code.co_names]
    return code.replace(co_names=tuple(names), co_consts=tuple(nested))


def test_every_top_level_key_that_deepspeed_looks_for_is_known() -> None:
    looked_for: set[object] = set()

    class Keys(list[object]):
        def __contains__(self, key: object) -> bool:
            looked_for.add(key)
            return super().__contains__(key)

    class Settings(dict[str, object]):
        def __getitem__(self, key: str) -> object:
            looked_for.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            looked_for.add(key)
            return super().__contains__(key)

        def get(self, key: str, default: object = None) -> Any:
            looked_for.add(key)
            return super().get(key, default)

        def keys(self) -> Any:
            return Keys(super().keys())

        def __copy__(self) -> Settings:
            return Settings(self)

    DeepSpeedConfig(Settings(train_micro_batch_size_per_gpu=1))
    assert looked_for <= DEEPSPEED_KEYS and len(looked_for) > 50
