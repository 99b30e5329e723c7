"""``PipelineTrainer``: what scripts that use transformers' ``Trainer`` change one name for.

transformers' parts do what they do in ``Trainer``: arguments, callbacks, state, schedulers, optimizers. What is new is
the engine that trains a batch, its checkpoints, and which rank reads which rows. Every rank runs the same script.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import PipelineModule
from transformers import TrainerControl, TrainerState, TrainingArguments, get_scheduler, set_seed
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
)
from transformers.trainer_utils import EvalPrediction, SaveStrategy, TrainOutput, speed_metrics

import ds_dynmo
from ds_dynmo.errors import ConfigError
from ds_dynmo.models import huggingface, language_model_loss, with_labels
from ds_dynmo.models.huggingface.configs import config_of
from ds_dynmo.models.huggingface.paths import paths_of_layers
from ds_dynmo.models.vocabulary import takes_labels
from ds_dynmo.trainer.arguments import check_arguments, engine_settings, make_optimizer, row_settings
from ds_dynmo.trainer.batches import Collator, Epochs, Sizes, collate_rows, micro_batches_of
from ds_dynmo.trainer.groups import parameter_groups
from ds_dynmo.trainer.rows import TrainerRows, read_rows
from ds_dynmo.trainer.saves import Saves

__all__ = ["PipelineTrainer"]

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class PipelineTrainer:
    """Trains a causal language model of transformers in a pipeline, by ``TrainingArguments``.

    With the same arguments, seed and rows it trains the batches of ``Trainer`` on one process, or on as many as there
    are replicas, in the same order, with the mean over all trained tokens of a batch. Every rank makes each call.

    Args:
        model: as for :func:`ds_dynmo.models.huggingface.layers`: a folder, a model, or a config for fresh weights.
        args: transformers' ``TrainingArguments``, or TRL's ``SFTConfig``, whose settings of rows count then.
        data_collator: makes ``input_ids`` and ``labels``, int64 ``[rows, tokens]``, of rows; None: rows are padded to
            the longest.
        train_dataset, eval_dataset: rows by number, as dicts: ``input_ids`` with or without ``labels``; ``text``;
            ``messages``; ``prompt`` and ``completion``. Or the path of such rows. ``eval_dataset`` may be a dict of
            several.
        processing_class: a tokenizer, or the folder of one; None: ``model``'s.
        compute_metrics: is given ``EvalPrediction.losses``, for each row the loss of its micro-batch; no logits.
        callbacks: transformers' ``TrainerCallback``.
        peft_config: peft's ``LoraConfig``, or its keys.
        dynmo: the "dynmo" section, if it is not in the JSON of ``args.deepspeed``.
        num_stages: of the pipeline; the other ranks are replicas. None: all ranks are stages.
        layers: further arguments of :func:`ds_dynmo.models.huggingface.layers`, such as ``vocabulary_slices``.

    Attributes:
        engine: what trains, a :class:`ds_dynmo.DynMoPipelineEngine`.
        state, control: transformers'.

    Raises:
        ConfigError: arguments that a pipeline does not do, a line for each; rows or a model that cannot be trained.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        *,
        peft_config: Any = None,
        dynmo: Mapping[str, Any] | None = None,
        num_stages: int | None = None,
        layers: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(args)
        _begin(args)
        self.args, self.compute_metrics, self.processing_class = args, compute_metrics, processing_class
        ranks = torch.distributed.get_world_size()
        stages = num_stages or ranks
        if ranks % stages or not 1 <= stages <= ranks:
            raise ConfigError(f"num_stages = {stages}: {ranks} ranks cannot be replicas of so many stages")
        if stages < ranks and not args.average_tokens_across_devices:
            raise ConfigError("average_tokens_across_devices = false: is not done in a pipeline with replicas")
        self._replicas = ranks // stages
        self._model, self._peft, self._layers = model, peft_config, dict(layers or {})
        self._config = config_of(model.get_base_model() if hasattr(model, "get_base_model") else model)
        self._collate: Collator = data_collator or collate_rows
        self._train_rows = None if train_dataset is None else self._rows(train_dataset, "train_dataset")
        several = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
        self._eval_rows = {name: self._rows(each, "eval_dataset") for name, each in several.items() if each is not None}
        self._inputs = self._inputs_of_batches()
        self._build_engine(engine_settings(args, dynmo), stages)
        self._begin_callbacks(callbacks or ())

    # -- building -------------------------------------------------------------------------------------------------

    def _rows(self, given: Any, name: str) -> TrainerRows:
        tokenizer = self.processing_class
        if tokenizer is None and isinstance(self._model, (str, os.PathLike)) and Path(self._model).is_dir():
            tokenizer = self._model
        read = partial(read_rows, given, name, vocabulary=self._config.vocab_size, **row_settings(self.args))
        if not hasattr(tokenizer, "save_pretrained"):
            return read(tokenizer=tokenizer)
        with tempfile.TemporaryDirectory() as folder:  # a script may have changed it since it was read
            tokenizer.save_pretrained(folder)
            return read(tokenizer=folder)

    def _inputs_of_batches(self) -> tuple[str, ...]:
        """Find what the model is given beside token ids: positions of packed rows, and the mask where one is needed."""
        every = [self._train_rows, *self._eval_rows.values()]
        first = next((self._collate([rows[0]]) for rows in every if rows is not None), {})
        found = ("position_ids",) if "position_ids" in first else ()
        needs_mask = self._has_router_loss and "attention_mask" in first  # padding has no router loss
        return (*found, "attention_mask") if needs_mask else found

    @property
    def _has_router_loss(self) -> bool:
        return bool(getattr(self._config, "output_router_logits", False))

    def _build_engine(self, settings: dict[str, Any], stages: int) -> None:
        args = self.args
        specs = huggingface.layers(self._model, inputs=self._inputs, peft=self._peft, seed=args.seed, **self._layers)
        self._whole, paths = paths_of_layers(self._model, peft=self._peft, **self._shapes)
        checkpointing = args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)
        module = PipelineModule(
            layers=specs,
            num_stages=stages,
            loss_fn=language_model_loss,
            activation_checkpoint_interval=int(bool(checkpointing)),
            dynamic_shape=self._lengths_differ(),
            partition_method="uniform",
        )
        own: dict[str, Any] = {} if "optimizer" in settings else {"optimizer": make_optimizer(args)}
        if self._train_rows is not None:
            own["lr_scheduler"] = self._make_scheduler
        self.engine, self.optimizer, _, self.lr_scheduler = ds_dynmo.initialize(
            model=module,
            model_parameters=parameter_groups(module, self._whole, paths, args.weight_decay),
            config=settings,
            **own,
        )
        if takes_labels(specs):
            self.engine.set_batch_fn(with_labels)
        has_adapters = self._peft is not None or hasattr(self._model, "peft_config")
        self._saves = Saves(self.engine, Path(args.output_dir), args.save_total_limit, has_adapters=has_adapters)

    @property
    def _shapes(self) -> dict[str, Any]:
        """What says of which layers the model is."""
        names = ("vocabulary_slices", "split_blocks", "untie")
        return {name: value for name, value in self._layers.items() if name in names}

    def _lengths_differ(self) -> bool:
        """Return whether stages have to tell each other the shape of each micro-batch."""
        every = [rows for rows in (self._train_rows, *self._eval_rows.values()) if rows is not None]
        sizes = {self.args.per_device_train_batch_size}
        sizes |= {self.args.per_device_eval_batch_size} if self._eval_rows else set()
        if len(sizes) > 1 or row_settings(self.args)["packed"]:
            return len(sizes) > 1
        lengths = (len(rows[number]["input_ids"]) for rows in every for number in range(len(rows)))
        first = next(lengths, None)
        return any(length != first for length in lengths)

    def _make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        args, steps = self.args, self._max_steps
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )

    def _begin_callbacks(self, callbacks: Sequence[Any]) -> None:
        self._has_callbacks, shown = bool(callbacks), list[Any]()
        if self.is_world_process_zero():
            shown = [PrinterCallback if self.args.disable_tqdm else ProgressCallback]
            shown += get_reporting_integration_callbacks(self.args.report_to)
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *callbacks, *shown],
            *(self._whole, self.processing_class, self.optimizer, self.lr_scheduler),
        )
        self.control = TrainerControl()
        self.state = self._new_state()
        self._call("on_init_end")

    def add_callback(self, callback: Any) -> None:
        """Add a ``TrainerCallback``, or a class of one. Every rank calls it."""
        self._has_callbacks = True
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        self.callback_handler.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0, which logs and writes."""
        return torch.distributed.get_rank() == 0

    def _call(self, event: str, *more: Any) -> None:
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, *more)

    def _stateful(self) -> list[Any]:
        every = [*self.callback_handler.callbacks, self.control]
        return [one for one in every if isinstance(one, ExportableState)]

    def _new_state(self) -> TrainerState:
        first = self.is_world_process_zero()
        return TrainerState(
            is_local_process_zero=first,
            is_world_process_zero=first,
            stateful_callbacks=self._stateful(),
            train_batch_size=self.args.per_device_train_batch_size,
        )

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def _sizes(self) -> Sizes:
        if self._train_rows is None:
            raise ConfigError("train_dataset: is None: there is nothing to train on")
        args, rows = self.args, len(self._train_rows)
        each, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        return Sizes(rows, each, steps, self._replicas, args.dataloader_drop_last)

    @property
    def _max_steps(self) -> int:
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        return math.ceil(float(self.args.num_train_epochs) * self._sizes.batches)

    # -- training -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train, as ``Trainer.train``. Every rank calls it.

        Args:
            resume_from_checkpoint: the folder of a checkpoint, on whatever stages it was written; True: the last one in
                ``args.output_dir``.

        Raises:
            ValueError: there is no such checkpoint.
            ds_dynmo.CheckpointError: it cannot be loaded.
        """
        args, sizes, steps = self.args, self._sizes, self._max_steps
        self._check_router_loss(sizes)
        if self.engine.global_steps and not resume_from_checkpoint:
            raise ConfigError("train: this trainer has trained already: build another one, or resume from a checkpoint")
        self.state = self._new_state()
        if resume_from_checkpoint:
            self.state = self._saves.resume(resume_from_checkpoint)
        self.state.compute_steps(args, steps)
        self.state.max_steps, self.state.num_train_epochs = steps, math.ceil(steps / sizes.batches)
        self.state.is_local_process_zero = self.state.is_world_process_zero = self.is_world_process_zero()
        self._losses: list[torch.Tensor] = []
        self._sum_of_losses, self._logged_step, first_step = 0.0, self.state.global_step, self.state.global_step
        started = time.time()
        self._call("on_train_begin")
        if args.eval_on_start:
            self.evaluate()
        first_epoch, first_batch = divmod(first_step, sizes.batches)
        order = Epochs(sizes, self._seed_of_rows())
        for epoch in range(first_epoch, self.state.num_train_epochs):
            self._call("on_epoch_begin")
            for batch in range(first_batch if epoch == first_epoch else 0, sizes.batches):
                self._train_batch(order, epoch, batch)
                self._agree()
                self._log_evaluate_save()
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            self._call("on_epoch_end")
            self._agree()
            self._log_evaluate_save()
            if self.control.should_training_stop:
                break
        return self._end(started, first_step)

    def _check_router_loss(self, sizes: Sizes) -> None:
        uneven = sizes.rows % (sizes.micro_batch * sizes.steps * sizes.replicas)
        if self._has_router_loss and uneven and self._max_steps >= sizes.batches:
            raise ConfigError(
                f"train_dataset: {sizes.rows} rows are no whole number of batches, and rows that come again would "
                f"count in the router's loss: leave out {uneven} rows"
            )

    def _seed_of_rows(self) -> int | None:
        if str(getattr(self.args, "train_sampling_strategy", "random")) == "sequential":
            return None
        return int(self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def _train_batch(self, order: Epochs, epoch: int, batch: int) -> None:
        self._call("on_step_begin")
        sizes, rows = order.sizes, self._train_rows
        assert rows is not None
        numbers = order.of(epoch, batch, self.engine.grid.get_data_parallel_rank())
        micro_batches = micro_batches_of(numbers, rows, self._collate, self._inputs, sizes.micro_batch)
        self._rate = self.lr_scheduler.get_last_lr()[0]
        self._losses.append(self.engine.train_batch(ds_dynmo.weigh_by_tokens(micro_batches, self.engine)))
        self._call("on_optimizer_step")
        self.state.global_step += 1
        self.state.epoch = epoch + min((batch + 1) * sizes.steps, sizes.micro_batches) / sizes.micro_batches
        self._call("on_step_end")

    def _agree(self) -> None:
        """Let all ranks do what a callback of the user's on any rank wants; transformers' want the same everywhere.

        It waits for all stages, which otherwise begin their next batch when they are done with one.
        """
        if not self._has_callbacks:
            return
        wanted = torch.tensor([float(getattr(self.control, flag)) for flag in FLAGS])
        for flag, count in zip(FLAGS, self.engine.sum_over_world(wanted).tolist()):
            setattr(self.control, flag, count > 0)

    def _log_evaluate_save(self) -> None:
        if self.control.should_log and self.state.global_step > self._logged_step:
            self._log_step()
        if self.control.should_evaluate:
            is_best = self._is_best(self.evaluate())
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_best
        if self.control.should_save:
            for one in self._stateful():
                self.state.stateful_callbacks[type(one).__name__] = one.state()
            self._saves.save(self.state)
            self._call("on_save")

    def _log_step(self) -> None:
        total = self._take_losses()
        self._sum_of_losses += total
        norm = self.engine.get_global_grad_norm()
        logs = {"loss": total / (self.state.global_step - self._logged_step)}
        if norm is not None:
            logs["grad_norm"] = float(norm)
        logs["learning_rate"] = self._rate
        self._logged_step = self.state.global_step
        self.log(logs)

    def _take_losses(self) -> float:
        """Sum up the losses since the last time. It waits for the last batch."""
        total = 0.0
        for number, loss in enumerate(torch.stack([one.float().reshape(()) for one in self._losses]).tolist()):
            keeps = math.isfinite(loss) or not self.args.logging_nan_inf_filter
            total += loss if keeps else total / max(number, 1)
        self._losses.clear()
        return total

    def log(self, logs: dict[str, float]) -> None:
        """Write ``logs`` into the state's ``log_history``, and tell the callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs)

    def _end(self, started: float, first_step: int) -> TrainOutput:
        steps = self.state.global_step - first_step
        if self._losses:
            self._sum_of_losses += self._take_losses()
        args = self.args
        samples = steps * args.per_device_train_batch_size * args.gradient_accumulation_steps * self._replicas
        metrics = speed_metrics("train", started, num_samples=samples, num_steps=steps)
        metrics |= {"total_flos": self.state.total_flos, "train_loss": self._sum_of_losses / max(steps, 0.001)}
        self.log(metrics)
        if args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._saves.load(Path(self.state.best_model_checkpoint))
        self._saves.end(self.state)
        self._call("on_train_end")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Compute the loss of ``eval_dataset``, as ``Trainer.evaluate``. Every rank calls it.

        Returns:
            ``eval_loss``, the mean over rows of the losses of their micro-batches, and speeds.
        """
        if eval_dataset is None:
            several = self._eval_rows
        elif isinstance(eval_dataset, dict):
            several = {name: self._rows(each, "eval_dataset") for name, each in eval_dataset.items()}
        else:
            several = {"": self._rows(eval_dataset, "eval_dataset")}
        if not several:
            raise ConfigError("eval_dataset: is None: there is nothing to evaluate")
        found: dict[str, float] = {}
        for name, rows in several.items():
            found |= self._evaluate(rows, f"{metric_key_prefix}_{name}" if name else metric_key_prefix)
        return found

    def _evaluate(self, rows: TrainerRows, prefix: str) -> dict[str, float]:
        started, size = time.time(), self.args.per_device_eval_batch_size
        sizes = Sizes(len(rows), size, 1, self._replicas, drop_last=False)
        together = 1 if self.compute_metrics is not None else 4 * self.engine.num_stages
        losses: list[float] = []
        for first in range(0, sizes.micro_batches, together):
            numbers = range(first, min(first + together, sizes.micro_batches))
            loss = self.engine.eval_batch(
                self._eval_micro_batches(rows, sizes, numbers), num_micro_batches=len(numbers)
            )
            losses.append(float(loss) * len(numbers) * self._replicas)
        metrics: dict[str, float] = {}
        if self.compute_metrics is not None:
            counts = [
                min(size * self._replicas, len(rows) - size * self._replicas * each) for each in range(len(losses))
            ]
            each_row = np.repeat([loss / count for loss, count in zip(losses, counts)], counts)
            wanted = {"losses": each_row} if "loss" in self.args.include_for_metrics else {}
            metrics = dict(self.compute_metrics(EvalPrediction(predictions=None, label_ids=None, **wanted)))
        metrics["loss"] = sum(losses) / len(rows)
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": one for name, one in metrics.items()}
        named |= speed_metrics(
            prefix, started, num_samples=len(rows), num_steps=math.ceil(len(rows) / (size * self._replicas))
        )
        self.log(named)
        self._call("on_evaluate", named)
        return named

    def _eval_micro_batches(self, rows: TrainerRows, sizes: Sizes, numbers: Sequence[int]) -> Iterator[Any]:
        """Return micro-batches whose losses are the mean over their tokens, times their rows."""
        replica = self.engine.grid.get_data_parallel_rank()
        for number in numbers:
            first = (number * sizes.replicas + replica) * sizes.micro_batch
            own = range(first, min(first + sizes.micro_batch, sizes.rows))
            read = own or range(min(sizes.micro_batch, sizes.rows))
            (inputs, labels), *_ = micro_batches_of([read], rows, self._collate, self._inputs, sizes.micro_batch)
            tokens = max(int((labels != -100).sum()), 1)
            weight = tokens / len(own) if own else math.inf
            yield inputs, (labels, torch.tensor(weight, dtype=torch.float32))

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        args = self.args
        if args.metric_for_best_model is None:
            return False
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigError(f"metric_for_best_model = {name}: should be one of {', '.join(metrics)}")
        best, value = self.state.best_metric, metrics[name]
        if best is not None and not (value > best if args.greater_is_better else value < best):
            return False
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return True

    # -- writing --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the weights for transformers' ``from_pretrained``, or the adapters for peft's. Every rank calls it.

        Args:
            output_dir: None: ``args.output_dir``.
        """
        out = Path(output_dir or self.args.output_dir)
        comm = self.engine.stage.comm
        folder = Path(comm.broadcast_object(self._new_folder(out)))
        try:
            self._saves.write(folder, "weights", {})
            self.engine.wait_for_save()
            problem = None
            if self.is_world_process_zero():
                try:
                    self._export(folder, out)
                except Exception as error:  # ranks have to know
                    problem = f"{type(error).__name__}: {error}"
            problem = comm.broadcast_object(problem)
        finally:
            if self.is_world_process_zero():
                shutil.rmtree(folder, ignore_errors=True)
        if problem is not None:
            raise ds_dynmo.CheckpointError(f"{out}: was not written: {problem}")

    def _new_folder(self, beside: Path) -> str | None:
        if not self.is_world_process_zero():
            return None
        beside.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".writing-", dir=beside)

    def _export(self, folder: Path, out: Path) -> None:
        huggingface.export(self._model, folder / "weights", folder / "exported", peft=self._peft, **self._shapes)
        if hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(folder / "exported")
        for path in (folder / "exported").iterdir():
            os.replace(path, out / path.name)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into ``args.output_dir``."""
        if self.is_world_process_zero():
            self.state.save_to_json(str(Path(self.args.output_dir) / "trainer_state.json"))


def _begin(args: TrainingArguments) -> None:
    """Join the ranks, and seed them."""
    ds_dynmo.end_with_launcher()
    if not torch.distributed.is_initialized():  # by transformers' arguments, for example
        ds_dynmo.set_rank_variables()
    ds_dynmo.skip_shm_operator()
    if args.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # all stages share this machine's cores
    deepspeed.init_distributed()
    set_seed(args.seed)
