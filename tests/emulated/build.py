"""Compile the emulated device once, into a cache below the Python environment.

The cache's key is torch's version and a hash of the sources, so another torch or a changed source compiles anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

NAME = "emulated_device"
SOURCES = Path(__file__).resolve().parent / "device"
FLAGS = ["-O1", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-attributes", "-Wno-unknown-pragmas"]


class CannotBuild(RuntimeError):
    """There is no compiler, or the sources do not compile with this torch."""


def load() -> ModuleType:
    """Import the compiled device, after building it if need be.

    Raises:
        CannotBuild: with what the compiler said.
    """
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """Return the file of the compiled device. One process compiles, others wait for it."""
    made = folder() / f"{NAME}.so"
    if made.is_file():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            _build(made)
    return made


def folder() -> Path:
    """Return where this version of the device lies: ``emulated_device/`` below the Python environment."""
    hashed = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        hashed.update(path.read_bytes())
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(sys.prefix) / NAME / f"torch-{torch.__version__}-python-{python}-{hashed.hexdigest()[:12]}"


def why_not() -> str | None:
    """Say why the device cannot be built here, or None."""
    if (folder() / f"{NAME}.so").is_file() or _compiler() is not None:
        return None
    return "the emulated accelerator needs a C++ compiler (c++, or the one that CXX names)"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def _build(made: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise CannotBuild(why_not())
    started = time.monotonic()
    print(f"emulated accelerator: compiling for torch {torch.__version__} (once)", file=sys.stderr, flush=True)
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = [
        *FLAGS,
        abi,
        f"-DTORCH_EXTENSION_NAME={NAME}",
        *(flag for path in includes for flag in ("-isystem", path)),
    ]

    def compile_one(source: Path) -> str:
        compiled = str(made.with_name(f"{source.stem}.o"))
        _run([compiler, *options, "-c", str(source), "-o", compiled])
        return compiled

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    unfinished = made.with_suffix(".new")
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    _run(
        [
            compiler,
            *objects,
            "-shared",
            *libraries,
            "-lc10",
            "-ltorch_cpu",
            "-ltorch",
            "-ltorch_python",
            "-o",
            str(unfinished),
        ]
    )
    for path in objects:
        os.remove(path)
    unfinished.rename(made)
    print(f"emulated accelerator: compiled in {time.monotonic() - started:.0f} s: {made}", file=sys.stderr, flush=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CannotBuild(
            f"the emulated accelerator does not compile with torch {torch.__version__}; tested: 2.13.0\n"
            + "\n".join(said[:5])
        )


if __name__ == "__main__":
    library()
