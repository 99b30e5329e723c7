"""Megatron's indexed format: ``NAME.bin`` with token ids, and ``NAME.idx`` that says where sequences begin.

The index, little endian: 9 bytes ``MMIDIDX\\0\\0``; uint64 version, 1; uint8 number of the ids' type; uint64 number of
sequences; uint64 number of entries in the last table; int32 per sequence, its length in tokens; int64 per sequence,
where it begins in bytes; int64 per entry, the sequence at which a document begins, and at the end the number of
sequences.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ds_dynmo.data.files import little_endian, map_ids
from ds_dynmo.data.tokens import Tokens
from ds_dynmo.errors import ConfigError

__all__ = ["read_megatron"]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6, 7: floats


def read_megatron(index: Path) -> Tokens:
    """Map the ``.bin`` file beside ``index`` into memory, with the documents that the index names.

    Raises:
        ConfigError: what the index says is not in the files, or sequences do not follow each other.
    """
    data = index.with_suffix(".bin")
    try:
        content = index.read_bytes()
    except OSError as error:
        raise ConfigError(f"{index}: cannot be read: {error}") from error
    if len(content) < HEADER.size:
        raise ConfigError(f"{index}: {len(content)} bytes are too few for an index, whose header has {HEADER.size}")
    magic, version, number, sequences, entries = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise ConfigError(f"{index}: is no index of Megatron's: begins with {magic!r}: should be {MAGIC!r}")
    if version != 1:
        raise ConfigError(f"{index}: version {version} of Megatron's index: should be 1")
    if number not in TYPES:
        raise ConfigError(f"{index}: type {number} of the ids: should be one of {', '.join(map(str, TYPES))}")
    needed = HEADER.size + 12 * sequences + 8 * entries
    if len(content) < needed:
        raise ConfigError(f"{index}: {len(content)} bytes, its {sequences} sequences need {needed}")
    lengths = np.frombuffer(content, "<i4", sequences, HEADER.size).astype(np.int64)
    places = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
    first_sequences = np.frombuffer(content, "<i8", entries, HEADER.size + 12 * sequences)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    ids = map_ids(data, TYPES[number])
    if (lengths < 0).any() or (places != starts[:-1] * little_endian(TYPES[number]).itemsize).any():
        raise ConfigError(f"{index}: its sequences do not follow each other in {data.name}")
    if starts[-1] != len(ids):
        raise ConfigError(f"{data}: holds {len(ids)} tokens of {TYPES[number]}, {index.name} says {starts[-1]}")
    firsts = first_sequences if entries else np.arange(sequences + 1)
    if firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise ConfigError(f"{index}: its documents should begin at sequences 0 to {sequences}, in their order")
    return Tokens(ids, str(data), starts[firsts])
