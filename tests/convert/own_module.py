"""Train a small PipelineModule."""

import itertools

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}


def train(steps: int = 5) -> list[float]:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    specs = [LayerSpec(torch.nn.Linear, 8, 8) for _ in range(5)]
    module = PipelineModule(layers=specs, num_stages=2, loss_fn=torch.nn.functional.mse_loss, base_seed=0)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=CONFIG)
    torch.manual_seed(1)
    batches = itertools.cycle([(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(8)])
    return [float(engine.train_batch(batches)) for _ in range(steps)]


if __name__ == "__main__":
    train()
