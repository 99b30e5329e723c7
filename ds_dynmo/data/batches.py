"""Micro-batches of token ids: every one is reached by its number.

Micro-batch ``n`` of replica ``r`` of ``R`` is number ``n R + r`` of the whole run, and depends on that number and the
seed alone. So a batch holds the same sequences however many stages and replicas there are, if the micro-batches of all
replicas together are as many. The first and the last stage, which read inputs and labels each for themselves, agree
without communication, and a resumed run goes on with what would have come next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch

from ds_dynmo.data.config import Documents, Loss
from ds_dynmo.data.order import Numbers, Shuffle, draw
from ds_dynmo.data.rows import DocumentRows, Ids, TokenRows, Windows, document_rows
from ds_dynmo.data.tokens import Tokens
from ds_dynmo.errors import ConfigError

__all__ = ["VALIDATION_SHARE", "Batch", "Sampling", "Split", "TokenBatches", "TokenData", "windows"]

Sampling = Literal["random", "epochs"]
Split = Literal["train", "validation"]
Inputs = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Batch = tuple[Inputs, torch.Tensor]
CountedBatch = tuple[Inputs, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]

VALIDATION_SHARE = 20  # one token, or one document, in 20
STRETCH = 2**20  # tokens


@dataclass(frozen=True)
class TokenBatches:
    """Micro-batches of one split for one data-parallel replica.

    Attributes:
        key: what the order depends on.
        loss: see :class:`~ds_dynmo.data.DataConfig`.
        begun: micro-batches that a run of other replicas has trained of the next round, in which each replica has one.
    """

    rows: TokenRows
    micro_batch_size: int
    sampling: Sampling
    key: tuple[int | str, ...]
    replica: int
    replicas: int
    loss: Loss
    begun: int = 0

    @property
    def epoch(self) -> range:
        """The numbers of the replica's micro-batches in one epoch."""
        return range(len(self.rows) // self.micro_batch_size // self.replicas)

    def sequence_indices(self, number: int) -> Numbers:
        """Return the indices of the sequences of micro-batch ``number``."""
        return self._indices(np.array([number * self.replicas + self.begun + self.replica]))

    def _indices(self, numbers: Numbers) -> Numbers:
        """Return the indices of the sequences of micro-batches, by their ascending numbers in the whole run."""
        size, count = self.micro_batch_size, len(self.rows)
        if self.sampling == "epochs":
            batches = self._in_epochs(numbers, count // size, "epoch")
            return _shuffle(count, *self.key, "micro-batches").at(_places(batches, size))
        if isinstance(self.rows, Windows):
            return draw(count, _places(numbers, size), *self.key)
        return self._in_epochs(_places(numbers, size), count)

    def _in_epochs(self, places: Numbers, count: int, *name: str) -> Numbers:
        """Look ascending ``places`` up in epochs of ``count`` numbers, each in an order of its own."""
        epochs, within = np.divmod(places, count)
        return np.concatenate(
            [_shuffle(count, *self.key, *name, int(epoch)).at(within[epochs == epoch]) for epoch in np.unique(epochs)]
        )

    def micro_batch(self, number: int) -> Batch:
        """Return inputs and labels, int64 ``[micro_batch_size, sequence_length]``.

        Inputs are token ids, or token ids and position ids where several documents share a sequence: position 0 begins
        a document, and attention does not cross it. Labels are the next token, and -100 where nothing is predicted.
        """
        ids, positions, labels = (
            None if array is None else torch.from_numpy(np.ascontiguousarray(array))
            for array in self.rows.take(self.sequence_indices(number))
        )
        assert ids is not None and labels is not None
        return (ids if positions is None else (ids, positions)), labels

    def iterate(self, first: int = 0, *, micro_batches: int) -> Iterator[CountedBatch]:
        """Iterate over micro-batches ``first``, ``first + 1``, ... without end.

        For the mean over tokens, unless all are trained, labels are a tuple: the labels, and a number by which to
        divide the sum of their losses (:meth:`tokens_per_micro_batch`).

        Args:
            micro_batches: those of a batch that a replica trains: ``engine.micro_batches``. A batch begins at
                ``first``; where their number changes, another iterator has to begin.
        """
        while True:
            tokens = self.tokens_per_micro_batch(first, micro_batches) if self.loss == "token_mean" else None
            for number in range(first, first + micro_batches):
                inputs, labels = self.micro_batch(number)
                yield inputs, labels if tokens is None else (labels, tokens)
            first += micro_batches

    def tokens_per_micro_batch(self, first: int, micro_batches: int) -> torch.Tensor | None:
        """Return how many tokens are trained in a micro-batch of a batch, in the mean of all replicas' ones.

        Every replica counts them all, without reading them. fp32 ``[]``; None: each token of the data is trained.

        Args:
            first: the replica's first micro-batch in the batch.
        """
        if self.rows.trained is None:
            return None
        numbers = np.arange(first * self.replicas, (first + micro_batches) * self.replicas) + self.begun
        tokens = self.rows.trained[self._indices(numbers)].sum() / len(numbers)
        return torch.tensor(tokens, dtype=torch.float32, device="cpu")


class TokenData:
    """Token ids for training and for validation.

    Args:
        tokens: as :func:`~ds_dynmo.data.open_data` reads them.
        documents: see :class:`~ds_dynmo.data.DataConfig`.
        validation: None: a twentieth of ``tokens``, which is not trained on: the last of each of equal stretches of
            about a million tokens; of documents every twentieth one.
        loss: see :class:`~ds_dynmo.data.DataConfig`.

    Raises:
        ConfigError: documents are to be joined, and not all of their tokens are trained.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        documents: Documents = "joined",
        validation: Tokens | None = None,
        loss: Loss = "token_mean",
    ) -> None:
        for text in (tokens, validation):
            if documents == "joined" and text is not None and text.trained is not None:
                raise ConfigError(
                    f'{text.name}: prompts in it are not trained; data.documents = "joined" would cut them from their '
                    'answers: should be "separate", "packed" or "padded"'
                )
        self.tokens, self.documents, self.validation, self.loss = tokens, documents, validation, loss
        self.name = tokens.name
        self._known: dict[tuple[Split, int, Sampling], TokenRows] = {}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a resumed run has to have too.

        As many tokens, as many of them trained, the same among up to 4,096 that are compared, and the same documents
        and loss if they are kept apart.
        """
        return {
            "tokens": len(self.tokens.ids),
            "sample": self.tokens.sample,
            "trained": self.tokens.trained_tokens,
            "documents": self.documents,
            "boundaries": self._boundaries(self.tokens),
            "loss": None if self.documents == "joined" else self.loss,
            "validation": self.validation is not None,
        }

    @cached_property
    def digest(self) -> str:
        """Of the identity, and of the tokens for validation."""
        other = self.validation
        beside = (
            None if other is None else [len(other.ids), other.sample, other.trained_tokens, self._boundaries(other)]
        )
        return hashlib.sha256(json.dumps([self.identity, beside]).encode()).hexdigest()[:16]

    def batches(
        self,
        split: Split,
        *,
        micro_batch_size: int,
        sequence_length: int,
        seed: int,
        replica: int = 0,
        replicas: int = 1,
        sampling: Sampling = "random",
    ) -> TokenBatches:
        """Return the micro-batches of one split for one data-parallel replica.

        Args:
            sampling: "random": sequences from random places; of documents, all of them before one comes again.
                "epochs": sequences side by side, put into micro-batches once, which come in another order in each
                epoch.

        Raises:
            ConfigError: there is too little text for one sequence, or in epochs for one micro-batch.
        """
        rows = self._rows(split, sequence_length, sampling)
        if sampling == "epochs" and len(rows) < micro_batch_size:
            raise ConfigError(
                f"{self.name}: {len(rows)} sequences of {sequence_length} tokens are too few for a micro-batch of "
                f"{micro_batch_size} ({split})"
            )
        return TokenBatches(rows, micro_batch_size, sampling, (split, seed), replica, replicas, self.loss)

    def check_length(self, sequence_length: int) -> None:
        """Refuse a text that does not hold one sequence of each split.

        Raises:
            ConfigError: says how much it needs.
        """
        for split in ("train", "validation"):
            self._rows(split, sequence_length, "random")

    def describe(self, sequence_length: int) -> str:
        """Describe in a line what there is to train on."""
        tokens = f"{self.name}: {len(self.tokens.ids):,} tokens"
        if self.tokens.trained_tokens is not None:
            tokens += f", {self.tokens.trained_tokens:,} of them trained,"
        rows = self._rows("train", sequence_length, "epochs")
        if isinstance(rows, DocumentRows):
            tokens += (
                f" in {len(self.tokens.starts) - 1:,} documents, {self.documents}: {rows.fill:.0%} of each sequence of "
                f"{sequence_length} is text"
            )
        return tokens

    def _boundaries(self, text: Tokens) -> str | None:
        """Describe where documents begin; None: it does not matter."""
        if self.documents == "joined":
            return None
        return hashlib.sha256(text.starts.astype("<i8").tobytes()).hexdigest()[:16]

    def _rows(self, split: Split, length: int, sampling: Sampling) -> TokenRows:
        """Return all sequences of a split, the same in every call."""
        key = (split, length, "random" if self.documents != "joined" else sampling)
        if key not in self._known:
            self._known[key] = self._make_rows(*key)
        return self._known[key]

    def _make_rows(self, split: Split, length: int, sampling: Sampling) -> TokenRows:
        text = self.tokens if split == "train" or self.validation is None else self.validation
        share = VALIDATION_SHARE if self.validation is None else 0
        if self.documents == "joined":
            return windows(text.ids, text.name, split, length, sampling, share)
        numbers = np.arange(len(text.starts) - 1)
        if share:
            numbers = numbers[(numbers % share == share - 1) == (split == "validation")]
        rows = document_rows(text, numbers, length, packed=self.documents == "packed")
        if not len(rows):
            which = f", which gets every {share}th one" if share and split == "validation" else ""
            raise ConfigError(
                f"{text.name}: {len(text.starts) - 1} documents are too few: one of more than a token is needed for "
                f"{split}{which}"
            )
        return rows


def windows(
    ids: Ids, name: str, split: Split, length: int, sampling: Sampling, share: int, *, unit: str = "tokens"
) -> Windows:
    """Cut a text into equal stretches, and these into sequences of adjacent tokens.

    Args:
        name: of the text, for messages.
        share: one token in so many, the last ones of each stretch, is for validation; 0: none is.
        unit: the word for tokens in messages.

    Raises:
        ConfigError: there is too little text for one sequence of each split.
    """
    stretches = max(1, len(ids) // STRETCH) if share else 1
    stretch = len(ids) // stretches
    validation = stretch // share if share else 0
    needed = share * (length + 1) if share else length + 1
    if stretch < needed:
        kept = f" in the {100 // share}% kept for validation" if share else ""
        raise ConfigError(
            f"{name}: {len(ids)} {unit} are too few: one sequence of {length} {unit}{kept} needs {needed}"
        )
    first, size = (stretch - validation, validation) if share and split == "validation" else (0, stretch - validation)
    step, each = (1, size - length) if sampling == "random" else (length, (size - 1) // length)
    return Windows(ids, length, stretches, stretch, first, step, each)


def _places(numbers: Numbers, size: int) -> Numbers:
    """Return the places of the sequences of micro-batches of ``size``."""
    return (numbers[:, None] * size + np.arange(size)).ravel()


@lru_cache(maxsize=8)
def _shuffle(count: int, *key: int | str) -> Shuffle:
    return Shuffle(count, *key)
