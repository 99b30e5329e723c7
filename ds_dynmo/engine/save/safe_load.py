"""Read a file without running code from it, and detect one that is truncated, replaced, or has other values."""

from __future__ import annotations

import argparse
import enum
import hashlib
import io
import os
import pickle
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from ds_dynmo.engine.deepspeed.files import PICKLED
from ds_dynmo.engine.save.manifest import SavedFile
from ds_dynmo.engine.save.pickled_names import NUMPY, Name, lines_to_allow, names_in
from ds_dynmo.errors import CheckpointError, reason_of
from ds_dynmo.files import why_unreadable

# Beyond what torch allows (tensors, OrderedDict, Counter, set, torch.Size, ...): plain containers of values that
# DeepSpeed or its users put into checkpoints. Constructing them runs no other code.
_CLASSES = (*PICKLED, argparse.Namespace, bytes, frozenset)


def _attribute(owner: Any, name: str) -> Any:
    """Replace ``getattr`` in a file, by which Python pickles a class within a class, and 3.11.2 a member of an enum.

    A file can have such a class called only if it is allowed itself.
    """
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner.__members__[name]
    if isinstance(owner, type) and isinstance(vars(owner).get(name), type):
        return vars(owner)[name]
    raise CheckpointError(f"it reads an attribute of {owner!r}")


def _full_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


Checksums = set[tuple[int, int]]

# Each with its name, so an entry of ours is never the same as one that the user adds to torch's list, a class alone.
_ALLOWED = (*((kind, _full_name(kind)) for kind in _CLASSES), (_attribute, "builtins.getattr"))
_list_lock = threading.Lock()  # the list is of the process: a thread's load must not end the permission of another's


def safe_load(
    path: str, *, device: torch.device | None = None, mapped: bool = False, checks_values: bool = True
) -> Any:
    """Load what ``torch.save`` wrote to ``path``, of allowed classes only.

    Args:
        device: for tensors that were not on the CPU when they were saved; None: the CPU.
        mapped: leave tensors in the file until they are copied.
        checks_values: compare the values of all tensors with the checksums that ``torch.save`` wrote beside them.

    Raises:
        CheckpointError: the file is missing or damaged, or holds a class that is not allowed.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no such file")
    is_archive = zipfile.is_zipfile(path)
    damaged: set[int] = set()
    try:
        checksums = checksums_in(path) if checks_values else None

        def place(storage: Any, location: str) -> Any:
            if checksums is not None and _checksum(storage) not in checksums:
                damaged.add(storage.data_ptr())
            if damaged or mapped or not is_archive:
                return storage
            return storage.clone() if device is None or location == "cpu" else storage.to(device=device)

        with _allowed(path if is_archive else None) as refused:
            if refused:
                raise CheckpointError(
                    f"it holds what could run code: {', '.join(map(str, sorted(refused)))}. If you trust it, allow it "
                    f"before you load it: {lines_to_allow(refused)}"
                )
            content = torch.load(path, map_location=place, weights_only=True, mmap=is_archive)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from error
    refuse_damaged(damaged, content, path)
    return content


@contextmanager
def _allowed(archive: str | None) -> Iterator[set[Name]]:
    """Allow our classes inside, and yield the names in a file that are not allowed then.

    Args:
        archive: the file, of which numpy's values are allowed once they were read; None: it is in torch's old format.

    Raises:
        CheckpointError: the file holds what cannot be loaded safely.
    """
    with _list_lock:
        present = get_safe_globals()
        of_user = {entry[1] if isinstance(entry, tuple) else _full_name(entry) for entry in present}
        names = set() if archive is None else names_in(archive, of_user)
        entries = _ALLOWED if archive is None else (*_ALLOWED, *NUMPY)
        with safe_globals([entry for entry in entries if entry not in present]):
            unsafe = set() if archive is None else {*get_unsafe_globals_in_checkpoint(archive)}
            nested = {name for name in names if "." in name.name and str(name) not in of_user}
            yield {name for name in names if str(name) in unsafe} | nested


def names_to_allow(path: str) -> set[Name]:
    """Return the names in a file of ``torch.save`` that nobody has allowed yet.

    Raises:
        CheckpointError: the file cannot be loaded, whatever is allowed.
    """
    try:
        with _allowed(path) as refused:
            return refused
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def refuse_damaged(damaged: set[int], content: Any, path: str) -> None:
    """Refuse a file of which some tensors are damaged, given by their addresses.

    Raises:
        CheckpointError: naming some.
    """
    if damaged:
        names = [name for name, tensor in _tensors_in(content) if tensor.untyped_storage().data_ptr() in damaged]
        where = ", ".join(names[:3]) or "a sparse tensor"
        raise CheckpointError(f"{path}: {where}: other values than were written (its checksum differs)")


def checksums_in(path: str) -> Checksums | None:
    """Read the size and the checksum of each tensor's values in a file; None: it was written without."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    return {(entry.file_size, entry.CRC) for entry in entries} if any(entry.CRC for entry in entries) else None


def find_damaged(part: Any, checksums: Checksums, compared: set[int]) -> set[int]:
    """Compare the tensors in a part of a file, which are in memory or mapped, with the checksums of the file.

    Args:
        compared: addresses of values that were compared before; those of ``part`` are added.

    Returns:
        The addresses of values that differ.
    """
    memory = _Memory()
    memory.dump(part)
    new = {address: storage for address, storage in memory.found.items() if address not in compared}
    compared.update(new)
    return {address for address, storage in new.items() if _checksum(storage) not in checksums}


class _Memory(pickle.Pickler):
    """Finds the memory of all tensors in a value, by address; those of a sparse tensor are its parts."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, value: Any) -> bool | None:
        """Take out a tensor."""
        if not (isinstance(value, torch.Tensor) and value.layout == torch.strided):
            return None
        storage = value.untyped_storage()
        self.found[storage.data_ptr()] = storage
        return True


def _checksum(storage: Any) -> tuple[int, int]:
    values: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return len(values), zlib.crc32(values)


def _tensors_in(content: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """List the tensors of nested dicts and lists, each by its keys."""
    if isinstance(content, torch.Tensor) and content.layout == torch.strided:
        yield path, content
    elif isinstance(content, dict | list | tuple):
        entries = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in entries:
            yield from _tensors_in(value, f"{path}/{key}" if path else str(key))


def _reason(error: Exception) -> str:
    text = why_unreadable(error)
    if "unsupported" in text.lower():  # torch refuses a class: keep only that part of its long message
        refused = text.rpartition("trusted source.")[2].rpartition("error:")[2].partition(" Please")[0].strip()
        return f"it holds what could run code: {refused} (torch.serialization.add_safe_globals allows a class of yours)"
    return text[:400]


def describe(path: str) -> SavedFile:
    """Compute size and fingerprint, from the checksums in the file's zip directory: no tensor is read."""
    num_bytes = os.path.getsize(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entries = sorted((info.filename.partition("/")[2], info.CRC, info.file_size) for info in archive.infolist())
        return SavedFile(num_bytes, hashlib.sha256(repr(entries).encode()).hexdigest()[:32])
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return SavedFile(num_bytes, f"crc32 {checksum:08x}")


def check_file(path: str, saved: SavedFile | None) -> str:
    """Return ``path`` if it is the file that was saved.

    Args:
        saved: None: the checkpoint does not say.

    Raises:
        CheckpointError: it is missing, truncated or replaced.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no such file")
    if saved is None:
        return path
    num_bytes = os.path.getsize(path)
    if num_bytes != saved.num_bytes:
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, but {saved.num_bytes} were written: truncated or replaced"
        )
    try:
        found = describe(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot be read: {reason_of(error)}") from error
    if found != saved:
        raise CheckpointError(f"{path}: is not the file that was written with this checkpoint (its checksums differ)")
    return path
