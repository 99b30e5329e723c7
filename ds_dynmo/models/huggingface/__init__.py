"""Hugging Face causal language models as pipeline layers, and back (optional extra ``huggingface``)."""

from ds_dynmo.models.huggingface.adapter import export, layers

__all__ = ["export", "layers"]
