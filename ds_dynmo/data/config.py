"""The "data" section of the DeepSpeed JSON: how the data that a run is given is read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ds_dynmo.config import parse_section
from ds_dynmo.config.section import Section

__all__ = ["SECTION", "DataConfig", "Documents", "TokenType", "read_data_config"]

SECTION = "data"

Documents = Literal["joined", "packed", "padded"]
TokenType = Literal["uint8", "uint16", "uint32", "int32"]


class DataConfig(Section):
    """The "data" section."""

    documents: Documents | Literal["separate"] = Field(
        default="joined",
        description='"joined": documents one after the other, cut into sequences anywhere; "packed": whole documents '
        'side by side in a sequence, each with positions and attention of its own; "padded": one in each sequence; '
        '"separate": packed where the model keeps packed documents apart, else padded',
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="folder with a tokenizer.json, for text; null: that of the model's folder",
    )
    field: str = Field(default="text", min_length=1, description="where a JSON line or a row of a dataset has its text")
    dtype: TokenType | None = Field(
        default=None,
        description="type of the ids in a .bin file that has no JSON file beside it",
    )
    end_of_document: int | None = Field(
        default=None, ge=0, description="token id that ends each document in a .bin file; null: its JSON file says"
    )
    validation: str | None = Field(
        default=None,
        min_length=1,
        description="file or folder for validation; null: val.bin of nanoGPT's folder, else a twentieth of the data, "
        "which is not trained",
    )
    cache: str | None = Field(
        default=None,
        min_length=1,
        description="folder for text that was tokenized, and for what was found in large files; null: ds_dynmo in "
        "XDG_CACHE_HOME or ~/.cache",
    )


def read_data_config(settings: dict[str, Any]) -> DataConfig:
    """Read the "data" section of a DeepSpeed configuration, the defaults if there is none.

    Raises:
        ConfigError: an invalid section; a line for each problem.
    """
    return parse_section(DataConfig, settings.get(SECTION, {}), SECTION)
