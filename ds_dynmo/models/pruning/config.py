"""The section of gradual pruning in the JSON, ``"case": {"kind": "pruning"}``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from ds_dynmo.models.case import CaseConfig

__all__ = ["PruningConfig"]


class PruningConfig(CaseConfig):
    """Gradual pruning. The defaults are the paper's: from 30% to 70% of the steps, to 52.0, 78.8, 88.6 and 90%."""

    for_huggingface: ClassVar = True
    apart_from: ClassVar = {"moe": "experts are not pruned"}

    kind: Literal["pruning"] = Field(
        default="pruning", description='"pruning": linear weights of the blocks are pruned'
    )
    start: float = Field(default=0.3, ge=0, lt=1, description="t_0, the first pruning, as a fraction of the steps")
    end: float = Field(default=0.7, gt=0, lt=1, description="t_0 + n dt, the last pruning, as a fraction of the steps")
    times: int = Field(default=4, ge=1, description="n, how many prunings follow the first, at equal distances")
    initial_sparsity: float = Field(default=0.0, ge=0, lt=1, description="S_i, the share pruned at the first pruning")
    final_sparsity: float = Field(default=0.9, ge=0, lt=1, description="S_f, the share pruned at the last pruning")
    csr_from: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="linear layers that have lost this share compute in CSR, where torch can (fp32 on a CPU); "
        "null: never",
    )

    @field_validator("end")
    @classmethod
    def _ends_later(cls, end: float, info: ValidationInfo) -> float:
        start = info.data.get("start")  # absent if it is invalid
        if start is not None and end <= start:
            raise ValueError(f"should be greater than start, {start}")
        return end

    @field_validator("final_sparsity")
    @classmethod
    def _only_prunes(cls, final: float, info: ValidationInfo) -> float:
        initial = info.data.get("initial_sparsity")
        if initial is not None and final < initial:
            raise ValueError(f"should be at least initial_sparsity, {initial}: what is pruned stays pruned")
        return final

    @property
    def follows_steps(self) -> bool:
        """See :attr:`CaseConfig.follows_steps`."""
        return True
