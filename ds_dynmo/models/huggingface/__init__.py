"""Hugging Face causal language models as pipeline layers, and back (optional extra ``huggingface``)."""

from ds_dynmo.models.huggingface.adapter import build_layers as layers
from ds_dynmo.models.huggingface.configs import check_blocks_draw_nothing, config_json, tokenizer_files
from ds_dynmo.models.huggingface.exporting import export

__all__ = ["check_blocks_draw_nothing", "config_json", "export", "layers", "tokenizer_files"]
