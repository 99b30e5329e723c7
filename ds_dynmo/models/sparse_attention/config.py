"""The section of dynamic sparse attention in the JSON, ``"case": {"kind": "sparse_attention"}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_dynmo.models.case import CaseConfig

if TYPE_CHECKING:
    from ds_dynmo.models.config import ModelConfig

__all__ = ["SparseAttentionConfig"]


class SparseAttentionConfig(CaseConfig):
    """Attention over a pattern that is drawn anew in every pass."""

    crosses_documents: ClassVar = True

    kind: Literal["sparse_attention"] = Field(
        default="sparse_attention", description='"sparse_attention": attention over a pattern drawn anew in every pass'
    )
    pattern: Literal["hash", "qk"] = Field(description='"hash": within hash buckets; "qk": kept queries over kept keys')
    buckets: int | None = Field(
        default=None, ge=2, validate_default=True, description='hash buckets, an even number; "hash" only, default 16'
    )
    keep_queries: float | None = Field(
        default=None, gt=0, le=1, validate_default=True, description='probability to keep; "qk" only, default 0.5'
    )
    keep_keys: float | None = Field(
        default=None, gt=0, le=1, validate_default=True, description='probability to keep; "qk" only, default 0.5'
    )

    @field_validator("buckets")
    @classmethod
    def _even_with_hash(cls, buckets: int | None, info: ValidationInfo) -> int | None:
        buckets = _of_pattern("hash", buckets, 16, info)
        if buckets is not None and buckets % 2:
            raise ValueError("should be even: half of them are the other half's opposites")
        return buckets

    @field_validator("keep_queries", "keep_keys")
    @classmethod
    def _with_qk(cls, keep: float | None, info: ValidationInfo) -> float | None:
        probability: float | None = _of_pattern("qk", keep, 0.5, info)
        return probability

    def check(self, model: ModelConfig) -> None:
        """See :meth:`CaseConfig.check`."""
        if self.buckets is not None and self.buckets > model.sequence_length:
            raise ValueError(
                f"hashes into {self.buckets} buckets, a sequence has {model.sequence_length} tokens (sequence_length)"
            )


def _of_pattern(pattern: str, value: Any, default: Any, info: ValidationInfo) -> Any:
    """Return the value of a key that is for ``pattern``, its default for None; refuse it for the other pattern."""
    if "pattern" not in info.data:  # it is invalid
        return value
    if info.data["pattern"] == pattern:
        return default if value is None else value
    if value is not None:
        raise ValueError(f'is for pattern "{pattern}", this is "{info.data["pattern"]}"')
    return None
