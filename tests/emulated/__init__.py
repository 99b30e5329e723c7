"""The emulated device: an accelerator in the CPU's memory, with streams, messages and mistakes of a real one.

``DS_ACCELERATOR=emulated`` asks for it. DeepSpeed refuses a name that it does not know, so the accelerator has to be
set before DeepSpeed asks for one.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "emulated"
ROOT = Path(__file__).resolve().parents[2]
_SITE = Path(__file__).resolve().parent / "site"


def is_asked_for() -> bool:
    """Return whether DeepSpeed is to use the emulated device."""
    return os.environ.get("DS_ACCELERATOR") == NAME


def activate() -> None:
    """Make the emulated device DeepSpeed's accelerator, in this process and in all that it starts.

    Nothing is imported before DeepSpeed is: programs that do without it start as fast as before.
    """
    sys.meta_path.insert(0, _AcceleratorFinder())
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = [str(_SITE), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(ours + [folder for folder in folders if folder not in (*ours, "")])


def not_on_it(reason: str) -> Any:
    """Skip a test on the emulated device."""
    import pytest

    return pytest.mark.skipif(is_asked_for(), reason=f"emulated device: {reason}")


def take_reports() -> list[str]:
    """Return the faults that the device found in this process since the last call, each with its stacks."""
    if "tests.emulated.torch_device" not in sys.modules:
        return []
    from tests.emulated.torch_device import library

    found = [f"the emulated device, {count} times: {text}" for text, count in library.reports().items()]
    library.clear_reports()
    return found


def _fail_with_reports() -> None:
    """End a program with an error if nobody has taken what the device found in it."""
    found = take_reports()
    if found:
        print(*found, sep="\n", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


class _AcceleratorFinder(importlib.abc.MetaPathFinder):
    """Sets the emulated accelerator as soon as DeepSpeed's module of accelerators has been executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != "deepspeed.accelerator.real_accelerator":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_set(module: Any) -> None:
            execute(module)
            from tests.emulated.accelerator import EmulatedAccelerator

            module.set_accelerator(EmulatedAccelerator())
            atexit.register(_fail_with_reports)

        spec.loader.exec_module = execute_and_set  # type: ignore[method-assign]
        return spec
