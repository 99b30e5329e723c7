"""The sizes of a GPT."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ds_dynmo.models.slice_counts import Slices, num_slices

__all__ = ["GPTConfig"]


class GPTConfig(BaseModel):
    """Sizes of the model. The constructor raises pydantic's ``ValidationError``, a ``ValueError``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocab_size: int = Field(default=256, ge=2, description="number of different tokens; bytes are 256")
    sequence_length: int = Field(default=256, ge=1, description="tokens of a training sequence")
    layers: int = Field(
        default=12, ge=1, description="transformer blocks (GPT-2's n_layer); not the length of the layer list"
    )
    split_blocks: bool = Field(
        default=False, description="true: a block is two layers of the list, its attention and its feed-forward half"
    )
    vocabulary_slices: Slices = Field(
        default=None,
        description="embedding and head are so many layers each, of a part of the vocabulary each; `auto`: as many as "
        "make one at most half as large as a block, and whole if the head is smaller than a block; null: whole",
    )
    hidden_size: int = Field(default=128, ge=2, description="width of the activations between layers")
    heads: int = Field(default=4, ge=1, description="attention heads; each is hidden_size / heads wide")
    mlp_ratio: int = Field(default=4, ge=1, description="width of the feed-forward layer over hidden_size")
    tied_embedding: bool = Field(default=True, description="true: embedding and head share one weight")
    rope_base: float = Field(default=10000.0, gt=1, description="base (theta) of the rotary embedding")
    norm_eps: float = Field(default=1e-5, gt=0, description="added to the variance in a norm")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**32,
        description="what initial weights, the order of data and dropout are drawn from",
    )

    @property
    def layers_per_block(self) -> int:
        """The number of layers of the list that a block is."""
        return 2 if self.split_blocks else 1

    @property
    def num_vocabulary_slices(self) -> int:
        """The number of slices of the vocabulary; 0: it is whole."""
        width = self.hidden_size
        block = (4 + 2 * self.mlp_ratio) * width**2 + self.sequence_length * width
        return num_slices(self.vocabulary_slices, self.vocab_size, head=self.vocab_size * width, block=block)

    @property
    def most_slices(self) -> int | None:
        """How many slices the vocabulary has rows for; None: it is not known yet."""
        return self.vocab_size

    @property
    def layer_outputs(self) -> Literal["hidden", "auxiliary", "exits"]:
        """What a layer returns to the next one, as :meth:`ds_dynmo.models.stream.Stream.pack` does.

        "hidden": hidden states; "auxiliary": (hidden, auxiliary); "exits": (hidden, auxiliary, tokens, exited). In
        packed sequences positions follow.
        """
        return "hidden"

    @field_validator("heads")
    @classmethod
    def _even_head_width(cls, heads: int, info: ValidationInfo) -> int:
        hidden_size = info.data.get("hidden_size")  # absent if it is invalid
        if hidden_size is not None and hidden_size % heads:
            raise ValueError(f"should divide hidden_size, {hidden_size}")
        if hidden_size is not None and hidden_size // heads % 2:
            raise ValueError(
                f"makes heads {hidden_size // heads} wide (hidden_size {hidden_size}), rotary positions need even"
            )
        return heads

    @model_validator(mode="after")
    def _slices_have_rows(self) -> GPTConfig:
        slices, most = self.vocabulary_slices, self.most_slices
        if isinstance(slices, int) and most is not None and slices > most:
            raise ValueError(f"vocabulary_slices = {slices}: should be at most vocab_size, {most}")
        return self
