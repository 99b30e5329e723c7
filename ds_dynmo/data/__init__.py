"""Training data as token ids: text with a tokenizer, conversations, packing, and micro-batches by number.

:func:`open_data` opens what ``--data`` of the training command takes; :class:`TokenData` gives micro-batches of it.
``docs/data.md`` describes what it reads.
"""

from ds_dynmo.data.batches import TokenBatches, TokenData
from ds_dynmo.data.config import DataConfig, Loss, read_data_config
from ds_dynmo.data.opening import open_data
from ds_dynmo.data.sources import check_text, holds_rows
from ds_dynmo.data.tokens import Column, Tokens

__all__ = [
    "Column",
    "DataConfig",
    "Loss",
    "TokenBatches",
    "TokenData",
    "Tokens",
    "check_text",
    "holds_rows",
    "open_data",
    "read_data_config",
]
