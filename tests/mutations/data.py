"""What is trained of a row, and when it is tokenized again."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ENCODING = "ds_dynmo/data/encoding.py"
CHAT = "tests/data/test_data_chat.py"

MUTATIONS = [
    Mutation(
        "what the user says is trained",
        "ds_dynmo/data/rows.py",
        "                if self.tokens.trained is not None:\n",
        "                if False:\n",
        f"{CHAT}::test_labels_are_the_answers_and_nothing_else",
    ),
    Mutation(
        "a sequence without a token that is trained is kept",
        "ds_dynmo/data/rows.py",
        "        kept = np.repeat(pieces == 1, pieces)",
        "        kept = np.repeat(pieces >= 1, pieces)",
        f"{CHAT}::test_labels_are_the_answers_and_nothing_else",
    ),
    Mutation(
        "a prompt is trained with its completion",
        ENCODING,
        "if end > len(begin)), len(offsets))",
        "if end > 0), len(offsets))",
        f"{CHAT}::test_a_completion_is_trained_and_its_prompt_is_not",
    ),
    Mutation(
        "roles that do not alternate are rendered",
        ENCODING,
        '        if role == before != "tool":\n',
        "        if False:\n",
        f"{CHAT}::test_wrong_conversations_are_named",
    ),
    Mutation(
        "text that changed is not tokenized again",
        "ds_dynmo/data/opening.py",
        ", file.stat().st_mtime_ns)",
        ")",
        "tests/data/test_data_rows.py::test_a_text_is_tokenized_once_until_something_changes",
    ),
]
