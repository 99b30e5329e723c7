"""Fine-tune a folder on chats, by TRL."""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


def train(folder: str, chats: str, out: str) -> SFTTrainer:
    rows = load_dataset("json", data_files=chats, split="train")
    args = SFTConfig(
        output_dir=out,
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        max_length=64,
        assistant_only_loss=True,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
    )
    trainer = SFTTrainer(
        model=folder,
        args=args,
        train_dataset=rows,
    )
    trainer.train()
    trainer.save_model(f"{out}/model")
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:])
