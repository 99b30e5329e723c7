"""Rows for a trainer: token ids with labels, made of what transformers' and TRL's trainers take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ds_dynmo.data.config import DataConfig
from ds_dynmo.data.encoding import Encoder
from ds_dynmo.data.opening import open_data
from ds_dynmo.data.order import Numbers
from ds_dynmo.data.rows import IGNORED, DocumentRows, document_rows
from ds_dynmo.data.sources import SourceRow
from ds_dynmo.data.tokens import Tokens, tokens_of
from ds_dynmo.errors import ConfigError

__all__ = ["Row", "TrainerRows", "read_rows"]

Row = dict[str, Any]
COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "label", "label_ids")


class TrainerRows(Protocol):
    """Rows by number, such as a ``datasets.Dataset`` or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...


@dataclass(frozen=True)
class KnownColumns:
    """Rows without columns that no model takes, which collators may not know what to do with."""

    rows: TrainerRows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:
        return {name: value for name, value in self.rows[number].items() if name in COLUMNS}


@dataclass(frozen=True)
class DocumentsAsRows:
    """Rows of a document each, by number: ``input_ids`` and ``labels``, as lists.

    Attributes:
        starts, stops: of the rows, in ``tokens``.
    """

    tokens: Tokens
    starts: Numbers
    stops: Numbers

    @classmethod
    def of(cls, tokens: Tokens, max_length: int | None) -> DocumentsAsRows:
        """Cut documents behind ``max_length`` tokens, and leave out those of which none is trained then."""
        starts, stops = tokens.starts[:-1], tokens.starts[1:]
        if max_length is None:
            return cls(tokens, starts, stops)
        stops = np.minimum(stops, starts + max_length)
        kept = stops > starts if tokens.trained is None else tokens.trained.count(starts, stops) > 0
        return cls(tokens, starts[kept], stops[kept])

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> Row:
        start, end = int(self.starts[number]), int(self.stops[number])
        ids = self.tokens.ids.read(start, end).astype(np.int64)
        labels = ids.copy()
        if self.tokens.trained is not None:
            labels[~self.tokens.trained.read(start, end)] = IGNORED
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}


@dataclass(frozen=True)
class PackedRows:
    """Rows of whole documents, which none other in the row attends to."""

    rows: DocumentRows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:
        """Return a row whose labels are of the token in their place, as transformers' models take them."""
        ids, positions, labels = self.rows.take(np.array([number]))
        assert positions is not None
        shifted = np.concatenate((np.full((1, 1), IGNORED), labels), axis=1)  # the token after each, one on
        return {
            "input_ids": [*ids[0].tolist(), 0],
            "labels": shifted[0].tolist(),
            "position_ids": [*positions[0].tolist(), 0],
        }


def read_rows(
    given: Any,
    name: str,
    *,
    vocabulary: int,
    tokenizer: str | os.PathLike[str] | None,
    field: str | None,
    max_length: int | None,
    packed: bool,
    known_columns: bool,
    answers_only: bool,
    completions_only: bool,
) -> TrainerRows:
    """Read the rows of a trainer.

    Args:
        given: a file or folder, as ``--data`` of the training command; or rows: a ``datasets.Dataset``, or a list of
            dicts. Those that have ``input_ids`` stay as they are; of others token ids are made.
        name: of the argument, for messages.
        field: the column of text; None: "text".
        max_length: tokens of a row, beyond which it is cut; None: none is.
        packed: several documents in a row of ``max_length`` tokens.
        known_columns: of rows with ``input_ids`` those columns alone are kept that a model takes.
        answers_only: of conversations the assistant's answers alone are trained.
        completions_only: of prompts and completions the completions alone are trained.

    Raises:
        ConfigError: naming the row, and what is wrong with it.
    """
    if isinstance(given, (str, os.PathLike)):
        tokens = open_data(given, DataConfig(field=field), vocabulary=vocabulary, tokenizer=tokenizer).tokens
    else:
        if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
            raise ConfigError(f"{name}: is a {type(given).__name__}: should have a length, and rows by number")
        if not len(given):
            raise ConfigError(f"{name}: has no rows")
        if not isinstance(given[0], dict):
            raise ConfigError(f"{name}[0]: is a {type(given[0]).__name__}: should be a dict")
        if "input_ids" in given[0] and not packed and max_length is None:
            return KnownColumns(given) if known_columns else given
        tokens = _tokens(
            given, name, Encoder(tokenizer, _field(given[0], field), vocabulary), answers_only, completions_only
        )
    if packed:
        assert max_length is not None
        # A packed row has one token more than its labels, as transformers' models shift them.
        return PackedRows(document_rows(tokens, np.arange(len(tokens.starts) - 1), max_length - 1, packed=True))
    return DocumentsAsRows.of(tokens, max_length)


def _field(row: Row, field: str | None) -> str | None:
    """Return the column of text, unless a row has what is taken before it."""
    return field if field in row and not {"messages", "prompt", "input_ids"} & set(row) else None


def _tokens(given: Any, name: str, encoder: Encoder, answers_only: bool, completions_only: bool) -> Tokens:
    import pyarrow

    rows = (SourceRow(f"{name}[{number}]", dict(given[number])) for number in range(len(given)))
    ids, trained = [], []
    for number, example in enumerate(encoder.encode(rows, answers_only=answers_only)):
        every = "prompt" in given[number] and not completions_only
        ids.append(example.ids)
        trained.append([True] * len(example.ids) if every else example.trained)
    kind = pyarrow.list_(pyarrow.uint32())
    table = pyarrow.table(
        {"input_ids": pyarrow.array(ids, kind), "trained": pyarrow.array(trained, pyarrow.list_(pyarrow.bool_()))}
    )
    return tokens_of(table, name)
