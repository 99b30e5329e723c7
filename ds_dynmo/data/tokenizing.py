"""Text as token ids: the tokenizer of a model's folder (optional extra ``tokenizers``).

This is the one module that imports tokenizers, when a tokenizer is opened.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ds_dynmo.config import load_json
from ds_dynmo.errors import ConfigError

__all__ = ["TOKENIZER", "Tokenizer"]

TOKENIZER = "tokenizer.json"
ENCODED_TOGETHER = 256  # documents


class Tokenizer:
    """The tokenizer in a folder of a Hugging Face model.

    Documents get the special tokens that the library's ``tokenizer(text)`` gives them, and the folder's end-of-text
    token, if they do not end with it.

    Args:
        folder: has ``tokenizer.json``. Its ``tokenizer_config.json`` or ``config.json`` names the end-of-text token.

    Attributes:
        end: id of the end-of-text token; None: the folder names none.
        fingerprint: of all that its ids depend on.

    Raises:
        ConfigError: there is no such file, it cannot be read, or the package is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / TOKENIZER
        if not path.is_file():
            raise ConfigError(
                f"{self.folder}: has no {TOKENIZER}; of another kind of tokenizer "
                "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder) makes one, if it can"
            )
        try:
            from tokenizers import Tokenizer as LibraryTokenizer
        except ImportError as error:
            raise ConfigError(
                f'needs tokenizers, the extra "tokenizers": pip install ds_dynmo[tokenizers] ({error})'
            ) from error
        try:
            self._tokenizer: Any = LibraryTokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"{path}: tokenizers cannot read it: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end = self._end()
        self.fingerprint = hashlib.sha256(path.read_bytes() + repr(self.end).encode()).hexdigest()

    @property
    def vocabulary(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, documents: Iterable[str]) -> Iterator[list[int]]:
        """Give the ids of each document."""
        documents = iter(documents)
        while batch := list(itertools.islice(documents, ENCODED_TOGETHER)):
            for encoding in self._tokenizer.encode_batch(batch):
                ids = encoding.ids
                yield ids if self.end is None or ids[-1:] == [self.end] else [*ids, self.end]

    def _end(self) -> int | None:
        settings, model = (
            load_json(self.folder / name) if (self.folder / name).is_file() else {}
            for name in ("tokenizer_config.json", "config.json")
        )
        token = settings.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found: int | None = self._tokenizer.token_to_id(token)
            return found
        number = model.get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        return number if isinstance(number, int) else None
