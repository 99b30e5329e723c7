"""Hugging Face causal language models as pipeline layers, and back (optional extra ``huggingface``)."""

from ds_dynmo.models.huggingface.adapter import check_blocks_draw_nothing, export, layers

__all__ = ["check_blocks_draw_nothing", "export", "layers"]
