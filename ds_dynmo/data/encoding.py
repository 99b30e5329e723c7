"""Make token ids of rows, and say which of them are trained. This is the one module here that imports transformers."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from ds_dynmo.config import load_json
from ds_dynmo.data.config import SECTION
from ds_dynmo.data.sources import SourceRow
from ds_dynmo.errors import ConfigError

__all__ = ["Encoder", "Example"]

FORMS = ("messages", "prompt", "input_ids", "text")
BESIDE_IDS = {  # and what each should be for a token
    "labels": "be the token, or -100 where it is not trained",
    "attention_mask": "be 1: leave padding out",
    **dict.fromkeys(("completion_mask", "assistant_masks", "loss_mask"), "be 1, or 0 where a token is not trained"),
}
BESIDE = ("completion", "tools", "chat_template_kwargs", *BESIDE_IDS)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SURROGATE = re.compile("[\ud800-\udfff]")
TOGETHER = 256  # texts
NOT_TRAINED = -100  # label of a token that is not


class Example(NamedTuple):
    """A row as tokens.

    Attributes:
        ids: below the vocabulary.
        trained: of the first one it does not matter, as nothing is before it.
    """

    ids: list[int]
    trained: list[bool]


class Encoder:
    """Makes token ids of rows: a text, a conversation, a prompt and its completion, or ids.

    Args:
        folder: of the tokenizer; None: rows have token ids.
        field: the column that is read; None: the one that there is of :data:`FORMS`.
        vocabulary: the model's: ids have to be below it.

    Raises:
        ConfigError: there is no tokenizer in the folder, it cannot be opened, or the package is missing.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, field: str | None, vocabulary: int) -> None:
        self._folder, self._field, self.vocabulary = folder, field, vocabulary
        self._tokenizer = None if folder is None else _open(Path(folder))
        self._end = None if folder is None else _end(Path(folder), self._tokenizer)
        self.columns = {*FORMS, *BESIDE, *([] if field is None else [field])}

    @property
    def fingerprint(self) -> str:
        """Digest of all that the tokens of a row depend on."""
        tokenizer = self._tokenizer
        facts: list[Any] = [self._field, self.vocabulary, self._end]
        if tokenizer is not None:
            facts += [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, str(tokenizer.special_tokens_map)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def encode(self, rows: Iterable[SourceRow], *, answers_only: bool = True) -> Iterator[Example]:
        """Return the tokens of each row.

        Args:
            answers_only: of conversations the assistant's answers alone are trained, which the chat template marks.

        Raises:
            ConfigError: naming the row, what is wrong with it, and what to do.
        """
        for is_text, same in groupby(rows, key=self._is_text):
            if is_text:
                while batch := list(islice(same, TOGETHER)):
                    yield from map(self._checked, batch, self._texts(batch))
            else:
                for row in same:
                    yield self._checked(row, self._tokens(row, answers_only))

    def _column(self, row: SourceRow) -> str:
        """Find the column that is read."""
        names = FORMS if self._field is None else (self._field,)
        there = [name for name in names if row.values.get(name) is not None]
        if "prompt" in there and self._field is None and row.values.get("completion") is None:
            there.remove("prompt")
        if len(there) == 1:
            return there[0]
        if there:
            raise ConfigError(f'{row.where}: has {" and ".join(there)}: "field" in the "{SECTION}" section says which')
        beside = ("completion",) if self._field is None else ()
        if null := [name for name in (*names, *beside) if row.values.get(name, "") is None]:
            raise ConfigError(f"{row.where}: null in {', '.join(null)}: write a value there, or leave the row out")
        should = "messages, prompt and completion, input_ids, or text" if self._field is None else f'"{self._field}"'
        raise ConfigError(
            f'{row.where}: has {", ".join(row.values) or "nothing"}: should have {should}; "field" in the "{SECTION}" '
            "section names another one"
        )

    def _is_text(self, row: SourceRow) -> bool:
        column = self._column(row)
        completed = column == "prompt" and row.values.get("completion") is not None
        return isinstance(row.values[column], str) and not completed

    def _tokens(self, row: SourceRow, answers_only: bool) -> Example:
        column = self._column(row)
        value, completion = row.values[column], row.values.get("completion")
        if column == "prompt" and completion is not None:
            return self._completed(row, value, completion)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return self._conversation(row, value, answers_only)
        return Example(value, _given(row, column, value))

    def _texts(self, rows: list[SourceRow]) -> list[Example]:
        found = self._encoded(rows, [row.values[self._column(row)] for row in rows])["input_ids"]
        return [Example(ids, [True] * len(ids)) for ids in map(self._ended, found)]

    def _encoded(self, rows: list[SourceRow], texts: list[str], **options: Any) -> Any:
        """Return what the tokenizer makes of the texts of rows."""
        tokenizer = self._needed(rows[0])
        try:
            return tokenizer(texts, return_attention_mask=False, verbose=False, **options)
        except Exception as error:  # tokenizers raises Exception itself
            if len(rows) == 1:
                why = "half of a surrogate pair is no text" if SURROGATE.search(texts[0]) else error
                raise ConfigError(f"{rows[0].where}: the tokenizer cannot encode it: {why}") from error
        for row, text in zip(rows, texts):  # one of them is named
            self._encoded([row], [text], **options)
        raise AssertionError("each text can be encoded, but not all")

    def _conversation(self, row: SourceRow, messages: list[Any], answers_only: bool) -> Example:
        _check_roles(row, messages)
        template = self._template(row)
        if not answers_only:
            ids = self._rendered(row, messages, tokenize=True, return_dict=True)["input_ids"]
            return Example(ids, [True] * len(ids))
        if not GENERATION.search(template):
            raise ConfigError(
                f"{row.where}: the chat template of {self._folder} does not mark the assistant's answers: put "
                "{% generation %} and {% endgeneration %} around them in chat_template.jinja, or write rows with "
                "prompt and completion"
            )
        found = self._rendered(row, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return Example(found["input_ids"], list(map(bool, found["assistant_masks"])))

    def _completed(self, row: SourceRow, prompt: Any, completion: Any) -> Example:
        is_text = isinstance(prompt, str) and isinstance(completion, str)
        if is_text:
            begin, whole = prompt, prompt + completion
        elif isinstance(prompt, list) and isinstance(completion, list):
            _check_roles(row, [*prompt, *completion])
            self._template(row)
            begin = self._rendered(row, prompt, tokenize=False, add_generation_prompt=True)
            whole = self._rendered(row, [*prompt, *completion], tokenize=False)
        else:
            raise ConfigError(f"{row.where}: prompt and completion should both be texts, or both lists of messages")
        if not whole.startswith(begin):
            raise ConfigError(
                f"{row.where}: the chat template of {self._folder} writes the prompt otherwise where the completion "
                "follows: write both as texts"
            )
        found = self._encoded([row], [whole], add_special_tokens=is_text, return_offsets_mapping=True)
        (ids,), (offsets,) = found["input_ids"], found["offset_mapping"]
        first = next((place for place, (_, end) in enumerate(offsets) if end > len(begin)), len(offsets))
        ids = self._ended(ids) if is_text else ids
        return Example(ids, [place >= first for place in range(len(ids))])

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self._end is None or ids[-1:] == [self._end] else [*ids, self._end]

    def _needed(self, row: SourceRow) -> Any:
        if self._tokenizer is None:
            raise ConfigError(
                f'{row.where}: is text, and no tokenizer is given: "tokenizer" in the "{SECTION}" section names a '
                "folder with one"
            )
        return self._tokenizer

    def _template(self, row: SourceRow) -> str:
        try:
            return str(self._needed(row).get_chat_template(tools=row.values.get("tools")))
        except ValueError as error:
            raise ConfigError(
                f"{row.where}: has messages, and the tokenizer of {self._folder} has no chat template for them: write "
                f'one as chat_template.jinja there, or let "tokenizer" in the "{SECTION}" section name another folder'
            ) from error

    def _rendered(self, row: SourceRow, messages: list[Any], **options: Any) -> Any:
        tools, more = row.values.get("tools"), row.values.get("chat_template_kwargs") or {}
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
            messages, tools = _without_nulls(messages), _without_nulls(tools)
            return self._needed(row).apply_chat_template(messages, tools=tools, **_without_nulls(more), **options)
        except Exception as error:  # of jinja, or whatever the template does
            raise ConfigError(
                f"{row.where}: the chat template of {self._folder} does not take it: {error}; mend the row"
            ) from error

    def _checked(self, row: SourceRow, example: Example) -> Example:
        ids, trained = example
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            place = next(place for place, token in enumerate(ids) if not 0 <= token < self.vocabulary)
            raise ConfigError(
                f"{row.where}: token {place} of {len(ids)} is {ids[place]}: the model's vocabulary has "
                f"{self.vocabulary} entries, 0 to {self.vocabulary - 1}"
            )
        if not all(trained) and not any(trained[1:]):
            raise ConfigError(f"{row.where}: none of its tokens is trained: give it an answer, or leave it out")
        return example


def _open(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f'{folder}: needs the extra "data": pip install datasets transformers ({error})') from error
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder, which should have a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(f"{folder}: transformers cannot open its tokenizer: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{folder}: its tokenizer, {type(tokenizer).__name__}, should be one with a tokenizer.json")
    return tokenizer


def _end(folder: Path, tokenizer: Any) -> int | None:
    """Find the token that ends a text."""
    end: Any = tokenizer.eos_token_id
    if end is None and (folder / "config.json").is_file():
        end = load_json(folder / "config.json").get("eos_token_id")
        end = next(iter(end), None) if isinstance(end, list) else end
    if end is not None and (type(end) is not int or end < 0):
        raise ConfigError(f"{folder / 'config.json'}: eos_token_id = {end!r}: should be the id of a token")
    return end


def _check_roles(row: SourceRow, messages: list[Any]) -> None:
    """Refuse messages that a template could render as something else without a word."""
    before = None
    for number, message in enumerate(messages):
        where = f"{row.where}: message {number} of {len(messages)}"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise ConfigError(f'{where}: should be an object with "role" and "content"')
        if role == before != "tool":
            raise ConfigError(f'{where}: is of "{role}", as the one before it: roles should alternate; join the two')
        content, before = message.get("content"), role
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
        if not all(isinstance(text, str) for text in texts) and not (content is None and message.get("tool_calls")):
            raise ConfigError(f"{where}: its content should be a text")


def _given(row: SourceRow, column: str, value: Any) -> list[bool]:
    """Check a row of token ids. Return which of them are trained, as its labels and masks say."""
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise ConfigError(f'{row.where}: "{column}" should be a text, a list of messages, or token ids')
    trained = [True] * len(value)
    for name, should in BESIDE_IDS.items():
        beside = row.values.get(name)
        if beside is None:
            continue
        if not isinstance(beside, list) or len(beside) != len(value):
            raise ConfigError(f'{row.where}: "{name}" should have one for each of the {len(value)} tokens')
        for place, (given, token) in enumerate(zip(beside, value)):
            allowed = (token, NOT_TRAINED) if name == "labels" else (1, 1) if name == "attention_mask" else (1, 0)
            if given not in allowed:
                raise ConfigError(f'{row.where}: "{name}" should {should}')
            trained[place] = trained[place] and given == allowed[0]
    return trained


def _without_nulls(value: Any) -> Any:
    """Leave out keys without a value, which tables add where another row has one."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
