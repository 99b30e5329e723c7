"""Training arguments: each is met or refused by name, all at once, before anything is built."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ds_dynmo.errors import ConfigError

transformers = pytest.importorskip("transformers")

from ds_dynmo.trainer.arguments import MET, OF_ROWS, WITHOUT_EFFECT, check_arguments, engine_settings  # noqa: E402


def arguments(**changes: Any) -> Any:
    return transformers.TrainingArguments("out", **{"use_cpu": True, "report_to": [], **changes})


def test_what_most_scripts_set_is_taken() -> None:
    check_arguments(
        arguments(
            num_train_epochs=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            learning_rate=2e-5,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            weight_decay=0.1,
            max_grad_norm=0.5,
            bf16=True,
            gradient_checkpointing=True,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=50,
            save_steps=50,
            save_total_limit=2,
            load_best_model_at_end=True,
            dataloader_num_workers=4,
            remove_unused_columns=False,
            optim="adamw_torch",
            seed=7,
            data_seed=8,
            ddp_timeout=60,
        )
    )


REFUSED: dict[str, Any] = {
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "torch_compile": True,
    "use_liger_kernel": True,
    "push_to_hub": True,
    "auto_find_batch_size": True,
    "full_determinism": True,
    "ignore_data_skip": True,
    "save_only_model": True,
    "optim": "galore_adamw",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "train_sampling_strategy": "group_by_length",
    "include_num_input_tokens_seen": "all",
    "bf16_full_eval": True,
    "batch_eval_metrics": True,
    "optim_target_modules": ["q_proj"],
    "skip_memory_metrics": False,
    "include_for_metrics": ["inputs", "loss"],
}


def test_every_argument_that_is_not_met_is_named_in_one_message() -> None:
    args = arguments()
    for name, value in REFUSED.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError) as error:
        check_arguments(args)
    first, *lines = str(error.value).splitlines()
    assert first == "the training arguments:"
    assert {line.split()[0] for line in lines} == {*REFUSED}
    for name, value in REFUSED.items():
        setattr(args := arguments(), name, value)
        with pytest.raises(ConfigError, match=name):
            check_arguments(args)


def test_an_argument_is_in_one_list_alone() -> None:
    assert not MET & WITHOUT_EFFECT and not (MET | WITHOUT_EFFECT) & OF_ROWS
    by_value = {"optim", "lr_scheduler_type", "train_sampling_strategy", "include_for_metrics"}
    assert not ({*REFUSED} - by_value) & (MET | WITHOUT_EFFECT)
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert {*REFUSED} <= known


def test_settings_of_the_engine_are_those_of_the_json_and_of_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_clipping": "auto",
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}},
                "dynmo": {"interval": 50, "min_improvement": 0.1},
            }
        )
    )
    args = arguments(
        per_device_train_batch_size=4, gradient_accumulation_steps=8, max_grad_norm=0.5, bf16=True, learning_rate=3e-4
    )
    args.deepspeed = str(file)
    settings = engine_settings(args, {"interval": 20})
    assert settings["train_micro_batch_size_per_gpu"] == 4 and settings["gradient_accumulation_steps"] == 8
    assert settings["gradient_clipping"] == 0.5 and settings["bf16"] == {"enabled": True}
    params = settings["optimizer"]["params"]
    assert params == {"lr": 3e-4, "betas": [0.9, 0.999], "torch_adam": True}, "no default of DeepSpeed's"
    assert settings["zero_optimization"] == {"stage": 1} and "train_batch_size" not in settings
    assert settings["dynmo"] == {"interval": 20, "min_improvement": 0.1}
    assert engine_settings(arguments(max_grad_norm=0), None)["gradient_clipping"] == 0.0


def test_a_json_that_contradicts_the_arguments_is_refused() -> None:
    args = arguments(per_device_train_batch_size=4)
    args.deepspeed = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 3.0,
        "scheduler": {"type": "WarmupLR"},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}},
    }
    with pytest.raises(ConfigError) as error:
        engine_settings(args, None)
    said, of_optimizer = (
        str(error.value),
        ("bf16.enabled = True", "optimizer.params.lr = 0.1", "optimizer.params.weight_decay = 0.5"),
    )
    for words in (
        "train_micro_batch_size_per_gpu = 2",
        "gradient_clipping = 3.0",
        "scheduler: should be left out",
        *of_optimizer,
    ):
        assert words in said


def test_what_trl_does_with_a_tokenizer_is_refused() -> None:
    """It would train other tokens."""
    trl = pytest.importorskip("trl")
    plain = {"use_cpu": True, "bf16": False, "report_to": []}
    check_arguments(trl.SFTConfig("out", max_length=64, assistant_only_loss=True, **plain))
    with pytest.raises(ConfigError) as error:
        check_arguments(trl.SFTConfig("out", eos_token="<|im_end|>", padding_free=True, **plain))
    assert {line.split()[0] for line in str(error.value).splitlines()[1:]} == {"eos_token", "padding_free"}
