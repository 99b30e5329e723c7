"""The "data" section of the DeepSpeed JSON: how the data that a run is given is read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ds_dynmo.config import parse_section
from ds_dynmo.config.section import Section

__all__ = ["SECTION", "DataConfig", "Documents", "Loss", "read_data_config"]

SECTION = "data"

Documents = Literal["joined", "packed", "padded"]
Loss = Literal["token_mean", "micro_batch_mean"]


class DataConfig(Section):
    """The "data" section."""

    documents: Documents | Literal["separate"] = Field(
        default="joined",
        description='"joined": documents one after the other, cut into sequences anywhere; "packed": whole documents '
        'side by side in a sequence, each with positions and attention of its own; "padded": one in each sequence; '
        '"separate": packed where the model keeps packed documents apart, else padded',
    )
    loss: Loss = Field(
        default="token_mean",
        description='"token_mean": the mean over all trained tokens of a batch; "micro_batch_mean": the mean of its '
        "micro-batches' means, in which a token weighs more where few are trained; the same where all are",
    )
    tokenizer: str | None = Field(
        default=None, min_length=1, description="folder with a tokenizer; null: the model's folder"
    )
    field: str | None = Field(
        default=None,
        min_length=1,
        description="column of a row that is read; null: the one that it has of text, messages, prompt, input_ids",
    )
    validation: str | None = Field(
        default=None,
        min_length=1,
        description="file or folder for validation; null: a dataset's split of this name, else a twentieth of the "
        "data, which is not trained",
    )
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="folder for text that was tokenized; null: that of datasets, HF_DATASETS_CACHE",
    )


def read_data_config(settings: dict[str, Any]) -> DataConfig:
    """Read the "data" section of a DeepSpeed configuration, the defaults if there is none.

    Raises:
        ConfigError: an invalid section; a line for each problem.
    """
    return parse_section(DataConfig, settings.get(SECTION, {}), SECTION)
