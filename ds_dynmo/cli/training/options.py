"""The flags and the JSON of ds-dynmo-train, checked before a process group exists."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ds_dynmo.cli.command_line import OneLineParser, add_changes, check_at_least_1, path_of
from ds_dynmo.cli.training.data import check_same_data, describe, identity_of, load_data, say
from ds_dynmo.cli.training.paths import check_new_folder, check_writable
from ds_dynmo.cli.training.places import check_every_key, flag_meant_by
from ds_dynmo.cli.training.resuming import has_saved, read_resumed, total_steps
from ds_dynmo.config import DynMoConfig, check_batch_sizes, check_deepspeed_keys, load_settings, read_dynmo_config
from ds_dynmo.data import TokenData, read_data_config
from ds_dynmo.engine.deepspeed.settings import check_settings
from ds_dynmo.engine.initialization import check_configuration
from ds_dynmo.engine.validation import check_initial_partition
from ds_dynmo.errors import ConfigError, PackingError
from ds_dynmo.models import (
    ByteText,
    FreezingConfig,
    ModelConfig,
    MoEConfig,
    PruningConfig,
    huggingface,
    model_layers,
    read_model_config,
)
from ds_dynmo.models.exporting import check_is_new

STEPS = 150
LONGEST = 60  # characters of a value in a message
OWN_KEYS = ("dynmo", "training", "model", "data", "steps_per_print")  # compared elsewhere, or each rank's own
START = (
    "Start one process per accelerator, by deepspeed or torchrun. Without them it is one process, so one stage: it "
    "trains, and no layer can move."
)
RECORDING = {  # in the "dynmo" section: every batch is profiled, and no layer moves
    "enabled": True,
    "interval": 1,
    "start_step": 0,
    "stop_step": None,
    "min_improvement": 0.99,
    "memory_limit": None,
    "migration": "blocking",  # then the profile of a batch is there when it ends
    "profile": {"batches": 1, "warmup_batches": 1},
}


@dataclass(frozen=True)
class TrainingRun:
    """A run whose every setting has been checked.

    Attributes:
        name: of the configuration.
        config: what ``config.json`` of its Hugging Face model holds; None: it has none.
        layers: the LayerSpecs of ``model``.
        steps: batches of the whole run, of which schedules are fractions.
        packed: sequences hold several documents, and inputs their positions.
        stop: batches after which this part of the run ends.
        save_interval: batches between checkpoints; None: only one when this part ends.
        take_over: save into a folder that has checkpoints of another run, or into which one that runs saves.
        newest_whole: where the checkpoint to resume from is damaged, resume from another in the folder.
        resumed: the metadata of the resumed run: :func:`read_resumed`; None for a new run.
        tag: of the checkpoint to resume, as ``--tag`` names it.
        record: where to record what layers cost; None: nowhere.
        interval: between decisions, as configured: a recording has one after every batch.
    """

    name: str
    settings: dict[str, Any]
    model: ModelConfig
    config: dict[str, Any] | None
    layers: list[Any]
    text: ByteText | TokenData
    packed: bool
    steps: int
    stop: int
    stages: int
    local_rank: int
    report: Path | None
    save: Path | None
    export: Path | None
    save_interval: int | None
    take_over: bool
    newest_whole: bool
    resume: Path | None
    resumed: dict[str, Any] | None
    tag: str | None
    record: Path | None
    interval: int

    @property
    def first_step(self) -> int:
        return self.resumed["step"] if self.resumed else 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the run."""
        model = self.model.model_dump(mode="json")
        return {"steps": self.steps, "model": model, "config": self.config, "data": identity_of(self.text)}


def settings_all_ranks_share(run: TrainingRun) -> dict[str, str]:
    """Describe what every rank has to be given alike, in short texts by name: data by content, whatever their name."""
    model = run.model.model_dump(mode="json", exclude={"tokens", "verified"})
    if isinstance(model["huggingface"], str):
        del model["huggingface"]  # may be elsewhere on another host
    return {
        "the data": describe(run.text),
        "steps": f"{run.first_step} to {run.stop} of {run.steps}",
        "--stages": str(run.stages),
        "--save": "no" if run.save is None else f"yes, every {run.save_interval or run.stop} steps",
        **{f"model.{key}": _short(value) for key, value in model.items()},
        **{f'"{key}"': _short(value) for key, value in run.settings.items() if key not in OWN_KEYS},
    }


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


class _Parser(OneLineParser):
    def meant_by(self, flag: str) -> str:
        return flag_meant_by(flag) or super().meant_by(flag)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    description = "Train a GPT or a Hugging Face causal language model in a pipeline that re-balances itself."
    parser = _Parser(description, epilog=START, allow_abbrev=False)
    parser.add_argument("--deepspeed_config", required=True, metavar="JSON", help='with "model" and "dynmo" sections')
    add_changes(parser)
    parser.add_argument(
        "--data", metavar="FILE_OR_FOLDER", help="text or token ids (default: Python's standard library)"
    )
    parser.add_argument("--steps", type=int, help=f"batches in total (default: {STEPS}, or the resumed run's)")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="end after so many batches, to resume later")
    parser.add_argument("--stages", type=int, help="pipeline stages (default: the number of processes)")
    parser.add_argument("--report", type=path_of, metavar="FILE", help="write JSON lines of the run, for ds-dynmo-plot")
    parser.add_argument("--record", type=path_of, metavar="FILE", help="record what each layer costs in each batch")
    parser.add_argument("--save", type=path_of, metavar="DIR", help="write a checkpoint at the end")
    parser.add_argument("--save-interval", type=int, metavar="N", help="also write one after every N batches")
    parser.add_argument("--keep", type=int, metavar="N", help="keep the newest N checkpoints of this run")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="save into DIR also if it is another run's, which then saves no more",
    )
    parser.add_argument("--export", type=path_of, metavar="DIR", help="write a Hugging Face model's weights at the end")
    parser.add_argument(
        "--resume",
        type=path_of,
        metavar="DIR",
        help="continue from the latest checkpoint in DIR; begin if DIR is that of --save, and empty",
    )
    parser.add_argument("--tag", help="continue from this checkpoint in the folder of --resume, not the latest")
    parser.add_argument(
        "--newest-whole", action="store_true", help="if that one is damaged, continue from the newest that is not"
    )
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def prepare(arguments: list[str], settings: dict[str, Any] | None = None) -> TrainingRun:
    """Read and check all that can be checked without other processes.

    Args:
        settings: the configuration; None: read from the file that ``--deepspeed_config`` names.

    Raises:
        ConfigError, PartitionError: naming the option, key or path, its value and what is allowed.
    """
    args = parse_arguments(arguments)
    settings = load_settings(Path(args.deepspeed_config) if settings is None else settings, args.changes)
    dynmo = read_dynmo_config(settings)
    check_every_key(settings)
    check_deepspeed_keys(settings)
    world_size = int(os.environ["WORLD_SIZE"])
    stages = check_stages(args.stages, world_size)
    check_batch_sizes(settings, world_size // stages)
    model = read_model_config(settings)
    check_flags(args, model, dynmo)
    if dynmo is None:
        check_settings(settings)
    else:
        check_configuration(dynmo, settings)
    layers, packed = build_layers(model, read_data_config(settings).documents)
    if stages > len(layers):
        raise ConfigError(f"--stages {stages}: the model has {len(layers)} layers, at most one stage each")
    if dynmo is not None:
        check_initial_partition(dynmo, layers, stages)
    resume = folder_to_resume(args)
    config = None if model.huggingface is None else huggingface.config_json(model.huggingface)
    resumed = None
    if resume is not None:
        resumed = read_resumed(resume, args.tag, model, config, newest_whole=args.newest_whole)
    check_new_folder(args, resume)
    text = load_data(args.data, settings, model, packed=packed, resumed=resumed)
    text.check_length(model.sequence_length)
    if resume is not None and resumed is not None:
        check_same_data(resume, resumed, text)
    steps, stop = check_steps(args, resume, resumed, model)
    report = args.report
    if report is None and dynmo is not None and dynmo.report is not None:
        report = Path(dynmo.report)
    check_writable(args, report)
    return TrainingRun(
        name=Path(args.deepspeed_config).stem,
        settings=engine_settings(settings, args, steps, stop, text, report, dynmo),
        model=model,
        config=config,
        layers=layers,
        text=text,
        packed=packed,
        steps=steps,
        stop=stop,
        stages=stages,
        local_rank=args.local_rank,
        report=report,
        save=args.save,
        export=args.export,
        save_interval=args.save_interval,
        take_over=args.take_over,
        newest_whole=args.newest_whole,
        resume=resume,
        resumed=resumed,
        tag=args.tag,
        record=args.record,
        interval=0 if dynmo is None else dynmo.interval,
    )


def check_flags(args: argparse.Namespace, model: ModelConfig, dynmo: DynMoConfig | None) -> None:
    """Refuse numbers out of range, and flags that lack what they need.

    Raises:
        ConfigError: naming the flag.
    """
    if dynmo is None:
        check_without_block(args, model)
    check_at_least_1(args, "steps", "save_interval", "keep")
    if args.save_interval is not None and args.save is None:
        raise ConfigError(f"--save-interval {args.save_interval}: needs --save DIR, where to write to")
    if args.keep is not None and args.save is None:
        raise ConfigError(f"--keep {args.keep}: needs --save DIR, where to write to")
    if args.take_over and args.save is None:
        raise ConfigError("--take-over: needs --save DIR, the folder to take over")
    if args.export is not None:
        check_export(args, model)
    if args.tag is not None and args.resume is None:
        raise ConfigError(f"--tag {args.tag}: needs --resume DIR, the folder of the checkpoint")
    if args.newest_whole and args.resume is None:
        raise ConfigError("--newest-whole: needs --resume DIR, the folder of the checkpoints")
    if args.record is not None and dynmo is not None and dynmo.repack.enabled:
        raise ConfigError(f"--record {args.record}: needs dynmo.repack.enabled = false: stages must stay")


def folder_to_resume(args: argparse.Namespace) -> Path | None:
    """Return the folder of ``--resume``; None if the run begins there: a launcher may start one command again."""
    resume: Path | None = args.resume
    saves_there = resume is not None and args.save is not None and resume.resolve() == args.save.resolve()
    if resume is not None and saves_there and args.tag is None and not has_saved(resume):
        say(f"--resume {resume}: nothing has been saved there yet; the run begins")
        return None
    return resume


def check_steps(
    args: argparse.Namespace, resume: Path | None, resumed: dict[str, Any] | None, model: ModelConfig
) -> tuple[int, int]:
    """Return the steps of the whole run, and the last one of this part.

    Raises:
        ConfigError: naming ``--steps`` or ``--stop-at``.
    """
    first_step, steps = 0, STEPS if args.steps is None else args.steps
    if resume is not None and resumed is not None:
        first_step, steps = resumed["step"], total_steps(args.steps, resume, resumed, model)
    stop = steps if args.stop_at is None else args.stop_at
    if not first_step < stop <= steps:
        raise ConfigError(f"--stop-at {stop}: should be in {first_step + 1} to {steps}, the steps that are left")
    return steps, stop


def engine_settings(
    settings: dict[str, Any],
    args: argparse.Namespace,
    steps: int,
    stop: int,
    text: ByteText | TokenData,
    report: Path | None,
    dynmo: DynMoConfig | None,
) -> dict[str, Any]:
    """Return the configuration for the engine: that of the file, with what flags say. Stock DeepSpeed ignores both.

    Where decisions are due and the file has no first partition, the first profile places the layers.
    """
    training = {"steps": steps, "stop_at": stop, "save_interval": args.save_interval, "data": describe(text)}
    if args.save is not None:
        training["save"] = str(args.save)
    changed = {**settings, "training": training}
    if dynmo is not None:
        section = {**settings["dynmo"]} if report is None else {**settings["dynmo"], "report": str(report)}
        if args.keep is not None:
            section["checkpoint"] = {**dynmo.checkpoint.model_dump(), "keep": args.keep}
        if args.record is not None:
            section |= RECORDING
            if section.get("initial_partition") == "profile":
                section["initial_partition"] = None
        elif dynmo.enabled and dynmo.interval:
            section.setdefault("initial_partition", "profile")
        changed["dynmo"] = section
    return changed


def build_layers(model: ModelConfig, documents: str) -> tuple[list[Any], bool]:
    """Build the model's layers. Return them, and whether they are for packed documents.

    Args:
        documents: of the "data" section.

    Raises:
        ConfigError: as :func:`model_layers`, or the model cannot have documents "packed".
    """
    if documents == "packed" or (documents == "separate" and model.verified):
        try:
            return model_layers(model, packed=True), True
        except PackingError as error:
            if documents == "packed":
                raise ConfigError(
                    f'{error}; data.documents = "packed": should be "padded", one document in each sequence, or '
                    '"joined", over whose borders all models attend'
                ) from error
            say(f'data.documents = "separate": "padded", one document in each sequence: {error}')
    elif documents == "separate":
        say('data.documents = "separate": "padded", one document in each sequence: model.verified = false')
    return model_layers(model), False


def check_export(args: argparse.Namespace, model: ModelConfig) -> None:
    """Refuse an export that could not be written when the run ends.

    Raises:
        ConfigError: naming the option, and what it needs.
    """
    if args.save is None:
        raise ConfigError(f"--export {args.export}: needs --save DIR, whose last checkpoint is exported")
    if model.huggingface is None:
        raise ConfigError(f"--export {args.export}: needs a Hugging Face model: --set model.huggingface=FOLDER")
    try:
        check_is_new(args.export)
    except ConfigError as error:
        raise ConfigError(f"--export {error}") from error


def check_without_block(args: argparse.Namespace, model: ModelConfig) -> None:
    """Refuse features that stock DeepSpeed lacks.

    Raises:
        ConfigError: naming the option or key.
    """
    freezing, pruning = model.find_case(FreezingConfig), model.find_case(PruningConfig)
    moe = model.find_case(MoEConfig)
    for asked, name, why in (
        (freezing, 'model.case.kind = "freezing"', "stock DeepSpeed cannot train a frozen front"),
        (model.peft, "model.peft", "stock DeepSpeed cannot train a frozen front"),
        (moe and moe.routing == "bias", 'model.case.routing = "bias"', "its counts are summed over replicas"),
        (moe and moe.expert_parallel, "model.case.expert_parallel", "stock DeepSpeed would average the experts"),
        (pruning, 'model.case.kind = "pruning"', "stock DeepSpeed cannot sum over its stages"),
        (args.record, f"--record {args.record}", "stock DeepSpeed profiles no layer"),
        (args.keep, f"--keep {args.keep}", "stock DeepSpeed does not say of which run a checkpoint is"),
        (args.newest_whole, "--newest-whole", "checkpoints of stock DeepSpeed have no checksums"),
    ):
        if asked:
            raise ConfigError(f'{name}: needs a "dynmo" section, {why}')


def check_stages(stages: int | None, world_size: int) -> int:
    """Return the number of pipeline stages: the requested number, or one per process."""
    if stages is None:
        stages = world_size
    if stages < 1:
        raise ConfigError(f"--stages {stages}: should be at least 1")
    if world_size % stages:
        raise ConfigError(
            f"--stages {stages}: should divide the number of processes, {world_size}: start {stages} or a multiple, by "
            f"deepspeed --num_gpus {stages} or torchrun --nproc_per_node {stages}"
        )
    return stages
