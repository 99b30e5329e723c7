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
SETTINGS = "tokenizer_config.json"
SAVED_AGAIN = "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
ENCODED_TOGETHER = 256  # documents


class Tokenizer:
    """The tokenizer in a folder of a Hugging Face model.

    Documents get the special tokens that transformers' ``tokenizer(text)`` gives them, and the folder's end-of-text
    token, if they do not end with it.

    Args:
        folder: has ``tokenizer.json``. Its ``tokenizer_config.json`` or ``config.json`` names the end-of-text token.

    Attributes:
        end: id of the end-of-text token; None: the folder names none.
        fingerprint: of all that its ids depend on.

    Raises:
        ConfigError: there is no such file, it cannot be read, ``tokenizer_config.json`` asks for what it lacks, or the
            package is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / TOKENIZER
        if not path.is_file():
            raise ConfigError(
                f"{self.folder}: has no {TOKENIZER}; of another kind of tokenizer {SAVED_AGAIN} makes one, if it can"
            )
        try:
            from tokenizers import Tokenizer as LibraryTokenizer
        except ImportError as error:
            raise ConfigError(f'needs tokenizers, the extra "tokenizers": pip install tokenizers ({error})') from error
        try:
            self._tokenizer: Any = LibraryTokenizer.from_file(str(path))
        except Exception as error:  # transformers raises Exception itself
            raise ConfigError(f"{path}: tokenizers cannot read it: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = self._json(SETTINGS)
        self._check(settings)
        self.end = self._end(settings)
        self.fingerprint = hashlib.sha256(path.read_bytes() + repr(self.end).encode()).hexdigest()

    @property
    def vocabulary(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, documents: Iterable[str]) -> Iterator[list[int]]:
        """Return the ids of each document.

        Raises:
            ConfigError: transformers cannot encode one, such as words without a token for unknown ones.
        """
        documents = iter(documents)
        while batch := list(itertools.islice(documents, ENCODED_TOGETHER)):
            try:
                encodings = self._tokenizer.encode_batch(batch)
            except Exception as error:  # transformers raises Exception itself
                raise ConfigError(f"{self.folder / TOKENIZER}: tokenizers cannot encode with it: {error}") from error
            for encoding in encodings:
                ids = encoding.ids
                yield ids if self.end is None or ids[-1:] == [self.end] else [*ids, self.end]

    def _json(self, name: str) -> dict[str, Any]:
        return load_json(self.folder / name) if (self.folder / name).is_file() else {}

    def _check(self, settings: dict[str, Any]) -> None:
        """Refuse what transformers would change in the tokenizer when it opens the folder."""
        missing = [token for token in _named(settings) if self._tokenizer.token_to_id(token) is None]
        if missing:
            raise ConfigError(
                f"{self.folder}: {SETTINGS} names tokens that {TOKENIZER} lacks: {', '.join(map(repr, missing))}; "
                f"{SAVED_AGAIN} writes them into it"
            )

    def _end(self, settings: dict[str, Any]) -> int | None:
        token = _content(settings.get("eos_token"))
        if token is not None:
            found: int | None = self._tokenizer.token_to_id(token)
            return found
        if settings.get("eos_token") is not None:
            raise ConfigError(
                f"{self.folder / SETTINGS}: eos_token = {settings['eos_token']!r}: should be a text, or an object with "
                'one as "content"'
            )
        given = self._json("config.json").get("eos_token_id")
        number = given[0] if isinstance(given, list) and given else given
        if number in (None, []):
            return None
        if type(number) is not int or number < 0 or self._tokenizer.id_to_token(number) is None:
            raise ConfigError(
                f"{self.folder / 'config.json'}: eos_token_id = {given!r}: should be the id of a token of {TOKENIZER}"
            )
        return number


def _named(settings: dict[str, Any]) -> list[str]:
    """List the tokens that ``tokenizer_config.json`` names."""
    found = [value for key, value in settings.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        several = settings.get(key) or []
        found.extend(several.values() if isinstance(several, dict) else several if isinstance(several, list) else [])
    return list(dict.fromkeys(token for token in map(_content, found) if token is not None))


def _content(token: Any) -> str | None:
    """Return the text of a token, which stands alone or in an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
