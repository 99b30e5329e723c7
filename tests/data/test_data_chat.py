"""Conversations, prompts and completions as data: which tokens are trained, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from ds_dynmo.data import DataConfig, TokenData, open_data
from ds_dynmo.errors import ConfigError
from tests.support.words import CHATML, word_tokenizer

WORDS = ("<s>", "</s>", "?", "one", "two", "three", "system", "user", "assistant", "tool", "[")
MARKS = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>", "[INST]", "[/INST]")

LLAMA = """\
{{- "<|begin|>" }}
{%- for message in messages %}
{{- "<|header|>" + message.role + "<|end_header|>\\n\\n" }}
{%- if message.role == "assistant" %}{%- generation -%}{{ message.content | trim }}{{ "<|eot|>" }}{%- endgeneration -%}
{%- else %}{{ message.content | trim + "<|eot|>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|header|>assistant<|end_header|>\\n\\n" }}{% endif %}
"""
MISTRAL = """\
{{- "<s>" }}
{%- for message in messages %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{%- if message.role == "user" %}{{ "[INST] " + message.content + " [/INST]" }}
{%- else %}{% generation %}{{ " " + message.content + "</s>" }}{% endgeneration %}{% endif %}
{%- endfor %}
"""

CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two three"},
    {"role": "user", "content": "three two"},
    {"role": "assistant", "content": "one"},
]
RENDERED = {  # * marks a token that is trained
    "chatml": (
        CHATML,
        [{"role": "system", "content": "two"}, *CHAT],
        "<|im_start|> system two <|im_end|> <|im_start|> user one <|im_end|> "
        "<|im_start|> assistant *two *three *<|im_end|> <|im_start|> user three two <|im_end|> "
        "<|im_start|> assistant *one *<|im_end|>",
    ),
    "llama": (
        LLAMA,
        CHAT,
        "<|begin|> <|header|> user <|end_header|> one <|eot|> <|header|> assistant <|end_header|> *two *three *<|eot|> "
        "<|header|> user <|end_header|> three two <|eot|> <|header|> assistant <|end_header|> *one *<|eot|>",
    ),
    "mistral": (
        MISTRAL,
        CHAT,
        "<s> [INST] one [/INST] *two *three *</s> [INST] three two [/INST] *one *</s>",
    ),
}


def folder_of(tmp_path: Path, template: str | None) -> Path:
    marks = ("<s>", "</s>", *MARKS)
    return word_tokenizer(tmp_path / "model", template=template, words=WORDS[2:], marks=marks)


def opened(rows: list[dict[str, Any]], tmp_path: Path, template: str | None, **changes: Any) -> TokenData:
    """Open rows, written as JSON lines."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(**{"cache": str(tmp_path / "cache"), "documents": "padded", **changes})
    folder = folder_of(tmp_path, template)
    return open_data(tmp_path / "chats.jsonl", config, vocabulary=len(WORDS) + len(MARKS), tokenizer=folder)


def shown(data: TokenData, tmp_path: Path, document: int = 0) -> str:
    """Write the words of a document, with * before those that are trained."""
    start, stop = data.tokens.starts[document : document + 2].tolist()
    words = AutoTokenizer.from_pretrained(str(tmp_path / "model")).convert_ids_to_tokens(
        data.tokens.ids.read(start, stop)
    )
    trained = [True] * len(words) if data.tokens.trained is None else data.tokens.trained.read(start, stop)
    return " ".join("*" * bool(kept) + word for word, kept in zip(words, trained))


@pytest.mark.parametrize("name", RENDERED)
def test_the_assistants_answers_alone_are_trained(name: str, tmp_path: Path) -> None:
    template, messages, expected = RENDERED[name]
    assert shown(opened([{"messages": messages, "id": 3}], tmp_path, template), tmp_path) == expected


def test_labels_are_the_answers_and_nothing_else(tmp_path: Path) -> None:
    """Whole, and in pieces, of which one without an answer is left out."""
    data = opened([{"messages": CHAT}] * 40, tmp_path, MISTRAL)
    assert data.tokens.trained_tokens == 5 * 40
    assert "chats.jsonl: 520 tokens, 200 of them trained, in 40 documents" in data.describe(12)
    words = AutoTokenizer.from_pretrained(str(tmp_path / "model")).convert_ids_to_tokens(range(len(WORDS) + len(MARKS)))

    def labels(length: int) -> set[str]:
        batches = data.batches("train", micro_batch_size=1, sequence_length=length, seed=0, sampling="epochs")
        found = [batches.micro_batch(number)[1][0].tolist() for number in batches.epoch]
        return {" ".join("." if label == -100 else words[label] for label in row) for row in found}

    assert labels(12) == {". . . two three </s> . . . . one </s>"}
    assert labels(3) == {"two three </s>", ". one </s>"}


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("one two", " three", "one two *three *</s>"),
        ("one two ", "three</s>", "one two *three *</s>"),
        ("", "one", "*one *</s>"),
        (CHAT[:1], CHAT[1:2], "<s> [INST] one [/INST] *two *three *</s>"),
        (CHAT[:3], CHAT[3:], f"{RENDERED['mistral'][2].replace('*', '')[:-8]}*one *</s>"),
    ],
)
def test_a_completion_is_trained_and_its_prompt_is_not(
    prompt: Any, completion: Any, expected: str, tmp_path: Path
) -> None:
    data = opened([{"prompt": prompt, "completion": completion}], tmp_path, MISTRAL)
    assert shown(data, tmp_path) == expected


def test_a_completion_in_messages_needs_no_marks_in_the_template(tmp_path: Path) -> None:
    template = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    data = opened([{"prompt": CHAT[:1], "completion": CHAT[1:2]}], tmp_path, template)
    assert shown(data, tmp_path) == ("<|im_start|> user one <|im_end|> <|im_start|> assistant *two *three *<|im_end|>")


def test_keys_that_a_table_adds_without_a_value_are_not_seen_by_the_template(tmp_path: Path) -> None:
    """Arrow gives each message the keys of all."""
    template = CHATML.replace(
        '{{- "<|im_start|>" + message.role',
        '{%- if message.tools is defined %}[{% endif %}{{- "<|im_start|>" + message.role',
    )
    messages = [*CHAT[:1], {"role": "assistant", "content": "one", "tools": [{"a": 1}]}]
    rows = [{"messages": messages}, {"messages": CHAT}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "d"))
    config = DataConfig(cache=str(tmp_path / "cache"), documents="packed")
    data = open_data(tmp_path / "d", config, vocabulary=20, tokenizer=folder_of(tmp_path, template))
    assert shown(data, tmp_path).count("[") == 1 and "[" not in shown(data, tmp_path, 1)


def refused(
    message: str, rows: list[dict[str, Any]], tmp_path: Path, template: str | None = CHATML, **data: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened([{"messages": CHAT}, *rows] if template else rows, tmp_path, template, **data)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [*CHAT[:1], *CHAT],
            'message 1 of 5: is of "user", as the one before it: roles should alternate; join the two',
        ),
        ([*CHAT, *CHAT[3:]], 'message 4 of 5: is of "assistant", as the one before it: roles should alternate'),
        ([{"from": "human", "value": "one"}], 'message 0 of 1: should be an object with "role" and "content"'),
        ([*CHAT, "one"], 'message 4 of 5: should be an object with "role" and "content"'),
        ([*CHAT[:1], {"role": "assistant", "content": None}], "message 1 of 2: its content should be a text"),
        ([{"role": "user", "content": [{"type": "image"}]}, *CHAT[1:]], "message 0 of 4: its content should be a text"),
        (CHAT[:1], "none of its tokens is trained: give it an answer, or leave it out"),
        ([], '"messages" should be a text, a list of messages, or token ids'),
    ],
)
def test_wrong_conversations_are_named(messages: list[Any], message: str, tmp_path: Path) -> None:
    refused(rf"chats\.jsonl, line 2: {message}", [{"messages": messages}], tmp_path)


def test_what_a_template_refuses_is_said_with_the_row(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "one"}, *CHAT]
    row = r"chats\.jsonl, line 2: the chat template of .*model does not take it: roles must alternate; mend the row"
    refused(row, [{"messages": messages}], tmp_path, MISTRAL)
    refused(row, [{"prompt": messages[:2], "completion": CHAT[1:2]}], tmp_path, MISTRAL)
    row = row.replace("roles must alternate", "Expecting value: .*")
    refused(row, [{"messages": CHAT, "tools": "no JSON"}], tmp_path, MISTRAL)


def test_a_template_that_is_missing_or_marks_no_answers_is_named_with_what_to_do(tmp_path: Path) -> None:
    rows = [{"messages": CHAT}]
    refused(
        r"line 1: has messages, and the tokenizer of .*model has no chat template for them: write one as "
        r'chat_template\.jinja there, or let "tokenizer" in the "data" section name another folder',
        rows,
        tmp_path,
        None,
    )
    unmarked = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(
        ConfigError, match=r"line 1: the chat .* does not mark the .*{% generation %} and .*or write rows"
    ):
        opened(rows, tmp_path, unmarked)


def test_other_wrong_rows_are_named(tmp_path: Path) -> None:
    both = "line 2: prompt and completion should both be texts, or both lists of messages"
    refused(both, [{"prompt": "one", "completion": CHAT[1:2]}], tmp_path)
    refused(both, [{"prompt": 1, "completion": 2}], tmp_path)
    other = CHATML.replace("{%- for message", '{%- if messages[-1].role == "user" %}[{% endif %}{%- for message')
    refused(
        "line 2: the chat template of .* writes the prompt otherwise where the completion follows: write both as texts",
        [{"prompt": CHAT[:1], "completion": CHAT[1:2]}],
        tmp_path,
        other,
    )
    refused("line 2: has messages and text", [{"messages": CHAT, "text": "one"}], tmp_path)
    refused(
        r'chats\.jsonl: prompts in it are not trained; data\.documents = "joined" would cut .*"separate", "packed" or',
        [],
        tmp_path,
        documents="joined",
    )
