"""What a pipeline does with ``TrainingArguments`` of transformers, or TRL's ``SFTConfig``: each is met or refused.

Those that say how a single process is to be fast, such as ``dataloader_num_workers``, change no number: they are read
over. An argument that is on none of the lists below, and that the user has set, is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_dynmo.errors import ConfigError

__all__ = ["check_arguments", "engine_settings", "make_optimizer", "row_settings"]

MET = {
    *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "gradient_accumulation_steps"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args", "max_grad_norm", "bf16", "fp16", "tf32"),
    *("gradient_checkpointing", "activation_checkpointing", "use_cache", "deepspeed", "seed", "data_seed", "use_cpu"),
    *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "logging_dir", "report_to"),
    *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "run_name", "project", "trackio_space_id"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size", "do_eval"),
    *("include_for_metrics", "prediction_loss_only", "save_strategy", "save_steps", "save_total_limit", "do_train"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "train_sampling_strategy"),
    *(
        "dataloader_drop_last",
        "resume_from_checkpoint",
        "local_rank",
        "remove_unused_columns",
        "overwrite_output_dir",
        "do_predict",
    ),
}
WITHOUT_EFFECT = {  # on what is trained
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "dataloader_in_order", "torch_empty_cache_steps", "ddp_backend"),
    *("ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"),
    *("length_column_name", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "save_on_each_node"),
    *("save_safetensors", "include_tokens_per_second", "label_names", "trackio_bucket_id", "trackio_static_space_id"),
    *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    *(
        "torch_compile_backend",
        "torch_compile_mode",
        "liger_kernel_config",
        "fsdp_config",
        "average_tokens_across_devices",
    ),
    *("dataset_num_proc", "pad_to_multiple_of", "pad_token"),
}
OF_ROWS = {
    "max_length",
    "packing",
    "packing_strategy",
    "completion_only_loss",
    "assistant_only_loss",
    "dataset_text_field",
}
"""Of TRL's ``SFTConfig``."""
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
NEEDS_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedulers that are told one
ORDERS = ("random", "sequential")


def check_arguments(args: Any) -> None:
    """Refuse what a pipeline does not do.

    Raises:
        ConfigError: a line for each argument.
    """
    problems = []
    plain = _defaults(args)
    for name, given in _values(args).items():
        if name not in MET | WITHOUT_EFFECT | OF_ROWS and given != plain.get(name):
            problems.append(f"{name} = {_shown(given)}: is not done in a pipeline: should be {_shown(plain.get(name))}")
    if (optim := _text(args.optim)) not in OPTIMIZERS:
        problems.append(f"optim = {optim}: should be one of {', '.join(OPTIMIZERS)}, or deepspeed's own (deepspeed)")
    if (kind := _text(args.lr_scheduler_type)) in NEEDS_METRIC:
        problems.append(f"lr_scheduler_type = {kind}: waits for a metric, which is not done in a pipeline")
    if (order := _text(getattr(args, "train_sampling_strategy", "random"))) not in ORDERS:
        problems.append(f"train_sampling_strategy = {order}: should be one of {', '.join(ORDERS)}")
    if others := {*args.include_for_metrics} - {"loss"}:
        problems.append(f"include_for_metrics = {', '.join(sorted(others))}: no rank has it: should be loss alone")
    if (strategy := getattr(args, "packing_strategy", "bfd")) != "bfd":
        problems.append(f'packing_strategy = {strategy}: should be "bfd": longest documents first, none divided')
    if getattr(args, "packing", False) and getattr(args, "max_length", None) is None:
        problems.append("packing: needs max_length")
    if problems:
        raise ConfigError("\n".join(["the training arguments:", *(f"  {problem}" for problem in problems)]))


def row_settings(args: Any) -> dict[str, Any]:
    """Return what TRL's arguments say about rows; of transformers' ones the same with nothing cut or packed."""
    return {
        "field": getattr(args, "dataset_text_field", None),
        "max_length": getattr(args, "max_length", None),
        "packed": bool(getattr(args, "packing", False)),
        "known_columns": bool(args.remove_unused_columns),
        "answers_only": bool(getattr(args, "assistant_only_loss", not hasattr(args, "max_length"))),
        "completions_only": getattr(args, "completion_only_loss", None) is not False,
    }


def engine_settings(args: Any, dynmo: Mapping[str, Any] | None) -> dict[str, Any]:
    """Make DeepSpeed's configuration: the user's (``args.deepspeed``), and in it what the arguments say.

    Raises:
        ConfigError: both say something, and not the same.
    """
    given = args.deepspeed or {}
    if not isinstance(given, dict):
        given = json.loads(Path(given).read_text(encoding="utf-8"))
    settings: dict[str, Any] = _without_auto(copy.deepcopy(given))
    problems: list[str] = []

    def put(value: Any, *path: str) -> None:
        inside = settings
        for key in path[:-1]:
            inside = inside.setdefault(key, {})
        if inside.setdefault(path[-1], value) != value:
            problems.append(f"deepspeed: {'.'.join(path)} = {inside[path[-1]]}, and the arguments say {value}")

    put(args.per_device_train_batch_size, "train_micro_batch_size_per_gpu")
    put(args.gradient_accumulation_steps, "gradient_accumulation_steps")
    put(float(args.max_grad_norm or 0.0), "gradient_clipping")
    for kind in ("bf16", "fp16"):
        if getattr(args, kind) or kind in settings:
            put(bool(getattr(args, kind)), kind, "enabled")
    for name, value in _optimizer_settings(args, given.get("optimizer")).items():
        put(value, "optimizer", "params", name)
    settings.setdefault("steps_per_print", None)
    settings.setdefault("zero_allow_untested_optimizer", True)
    if "scheduler" in settings:
        problems.append("deepspeed: scheduler: should be left out: lr_scheduler_type says which")
    if dynmo is not None:
        settings["dynmo"] = {**settings.get("dynmo", {}), **dynmo}
    settings.setdefault("dynmo", {})
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _optimizer_settings(args: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the arguments say about an optimizer of the JSON: its rate, and of the others what is in there."""
    if given is None:
        return {}
    said = {
        "lr": args.learning_rate,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    return {name: value for name, value in said.items() if name == "lr" or name in given.get("params", {})}


def make_optimizer(args: Any) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Return what makes transformers' optimizer of parameter groups."""
    from transformers import Trainer

    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    return lambda groups: kind(groups, **settings)


def _defaults(args: Any) -> dict[str, Any]:
    """Return the arguments that a user has who sets none but those that others follow from."""
    kept = {name: getattr(args, name) for name in ("bf16", "fp16", "use_cpu") if hasattr(args, name)}
    return _values(type(args)(output_dir=args.output_dir, **kept))


def _values(args: Any) -> dict[str, Any]:
    return {field.name: getattr(args, field.name, None) for field in dataclasses.fields(args) if field.init}


def _without_auto(settings: Any) -> Any:
    """Leave out the values that transformers fills in from its arguments."""
    if isinstance(settings, dict):
        kept = {key: _without_auto(value) for key, value in settings.items() if value != "auto"}
        return {key: value for key, value in kept.items() if value != {} or settings[key] == {}}
    return settings


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _shown(value: Any) -> str:
    return _text(value) if not isinstance(value, str) else repr(value)
