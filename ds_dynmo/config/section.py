"""The base class of all sections of the JSON: of "dynmo", "data", "model" and the objects in them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen model that refuses unknown keys, loose types, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
