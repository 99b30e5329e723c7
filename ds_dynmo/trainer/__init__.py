"""transformers' ``Trainer``, on a pipeline that balances itself. ``docs/trainer.md`` describes it.

Needs the extra "huggingface"; LoRA needs "peft", rows of text or conversations need "data".
"""

from ds_dynmo.trainer.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
