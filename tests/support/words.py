"""A tokenizer of words, whose ids a test can write down."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

CHATML = """\
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.role == "assistant" %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}
{{- "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
"""A template that marks the assistant's answers."""
WORDS = ("<s>", "</s>", "?", "one", "two", "three")


def word_tokenizer(
    folder: Path,
    *,
    end: object = "</s>",
    special: bool = False,
    template: str | None = None,
    words: tuple[str, ...] = WORDS,
    marks: tuple[str, ...] = (),
) -> Path:
    """Write a tokenizer, and return its folder.

    Args:
        special: it adds ``<s>`` and ``</s>``.
        template: for chats.
        marks: words that are found wherever they stand.
    """
    folder.mkdir(exist_ok=True)
    numbers = {word: number for number, word in enumerate((*words, *marks))}
    made = Tokenizer(WordLevel(numbers, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(list(marks))
    if special:
        made.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.enable_truncation(3)
    made.enable_padding(length=7)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
