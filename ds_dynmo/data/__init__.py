"""Training data as token ids: files of several formats, text with a tokenizer, packing, and micro-batches by number.

:func:`open_data` opens what ``--data`` of the training command takes; :class:`TokenData` gives micro-batches of it.
:func:`write_tokens` writes the files that :func:`read_tokens` reads. ``docs/data.md`` describes the formats.
"""

from ds_dynmo.data.batches import TokenBatches, TokenData
from ds_dynmo.data.config import DataConfig, read_data_config
from ds_dynmo.data.files import TokenFile, read_tokens, write_tokens
from ds_dynmo.data.megatron import read_megatron
from ds_dynmo.data.opening import check_text, find_file_without_dtype, holds_ids, open_data
from ds_dynmo.data.tokenizing import Tokenizer
from ds_dynmo.data.tokens import Tokens, check_ids

__all__ = [
    "DataConfig",
    "TokenBatches",
    "TokenData",
    "TokenFile",
    "Tokenizer",
    "Tokens",
    "check_ids",
    "check_text",
    "find_file_without_dtype",
    "holds_ids",
    "open_data",
    "read_data_config",
    "read_megatron",
    "read_tokens",
    "write_tokens",
]
