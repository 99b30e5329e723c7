"""Find the checkpoint that a run is resumed from, and read what was saved beside its layers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_dynmo.config import load_json
from ds_dynmo.config.explain import show
from ds_dynmo.engine.save import folder as folders
from ds_dynmo.engine.save.listing import checkpoints, whole_checkpoints
from ds_dynmo.engine.save.manifest import MANIFEST, stage_file
from ds_dynmo.engine.save.safe_load import safe_load
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.files import write_text
from ds_dynmo.files.texts import read_errors_as_config_error
from ds_dynmo.models import ModelConfig, read_model_config

__all__ = [
    "can_be_resumed",
    "checkpoint_folder",
    "client_state",
    "find_checkpoint",
    "has_saved",
    "other_checkpoints_hint",
    "read_resumed",
    "read_run_metadata",
    "total_steps",
    "write_restart",
]

METADATA_KEY = "ds_dynmo_train"  # in the client state of each checkpoint: the metadata of the run, as JSON
RESTART_FILE = "restart.json"  # the metadata, beside the checkpoint that the engine writes to stop a run for a restart
ABOUT_CONFIG = ("_name_or_path", "transformers_version")  # in a config.json, and say nothing of the model
METADATA = {"step": int, "steps": int, "stages": int, "partition": list, "model": dict, "cases": dict}


def client_state(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the client state of a checkpoint whose run has this metadata."""
    return {METADATA_KEY: json.dumps(metadata)}


def write_restart(engine: Any, metadata: dict[str, Any]) -> None:
    """Write the metadata of a run that the engine is about to save and stop, on rank 0."""
    if engine.global_rank == 0:
        folder = Path(engine.dynmo.repack.checkpoint)
        folder.mkdir(parents=True, exist_ok=True)
        record = {**metadata, "tag": f"global_step{engine.global_steps}"}
        write_text(folder / RESTART_FILE, json.dumps(record) + "\n")


def has_saved(folder: Path) -> bool:
    """Return whether a run has saved anything in ``folder``, which need not exist."""
    with read_errors_as_config_error(folder):
        return folder.is_dir() and (bool(_tags(folder)) or folders.read_latest(str(folder)) is not None)


def find_checkpoint(folder: Path, tag: str | None = None) -> str:
    """Return the tag of the checkpoint in ``folder`` that is meant: ``tag``, what ``latest`` names, or the only one.

    Raises:
        ConfigError: there is none, or it is not known which; lists those that there are.
    """
    with read_errors_as_config_error(folder):
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder")
        tags = _tags(folder)
        latest = folders.read_latest(str(folder))
    chosen = latest if tag is None else tag
    if chosen and folders.find(str(folder), chosen) is not None:
        return chosen
    if not tags:
        raise ConfigError(f"{folder}: holds no checkpoint of ds-dynmo-train")
    there = f"there are {', '.join(tags)}; --tag TAG chooses one"
    if chosen is None:
        if len(tags) > 1:
            raise ConfigError(f'{folder}: has no file "latest", and {there}')
        return tags[0]
    if not chosen:
        raise ConfigError(f"{folder}: {'--tag' if tag is not None else 'latest'} is empty; {there}")
    named = f'"latest" names {latest}' if tag is None else f"--tag {tag}"
    raise ConfigError(f"{folder}: {named}, which is not there; {there}")


def read_run_metadata(folder: Path, tag: str) -> dict[str, Any]:
    """Read the metadata of the run that saved a checkpoint, or that the engine saved to stop it for a restart.

    Raises:
        ConfigError: there are none, or they lack something.
    """
    path = checkpoint_folder(folder, tag) / stage_file(0)
    try:
        saved = safe_load(str(path), mapped=True, checks_values=False)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if isinstance(saved, dict) and METADATA_KEY in saved:
        try:
            metadata = {"in_step": False, **json.loads(saved[METADATA_KEY])}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {METADATA_KEY} is damaged: {error}") from error
    elif (folder / RESTART_FILE).is_file() and (restart := load_json(folder / RESTART_FILE)).get("tag") == tag:
        path, metadata = folder / RESTART_FILE, {**restart, "in_step": True}
    else:
        raise ConfigError(
            f"{path}: lacks {METADATA_KEY}: a script of your own saved this checkpoint, and its engine.load_checkpoint "
            "goes on from there; of a Hugging Face model, ds_dynmo.models.huggingface.export writes a folder that "
            "--set model.huggingface=FOLDER begins with"
        )
    missing = [key for key, kind in METADATA.items() if not isinstance(metadata.get(key), kind)]
    if missing:
        raise ConfigError(f"{path}: lacks {', '.join(sorted(missing))}")
    return {**metadata, "tag": tag}


def read_resumed(
    folder: Path, tag: str | None, model: ModelConfig, config: dict[str, Any] | None, *, newest_whole: bool = False
) -> dict[str, Any]:
    """Read the metadata of the run that is resumed, and check that this one can continue it.

    Args:
        config: what ``config.json`` of a Hugging Face model holds, by which it is known wherever its folder is.
        newest_whole: those of another checkpoint will do, the newest first.

    Raises:
        ConfigError: naming ``--resume``, and what is missing or differs.
    """
    try:
        resumed = _first_metadata(folder, tag, checkpoints(str(folder)) if newest_whole else [])
    except ConfigError as error:
        raise ConfigError(f"--resume {error}") from error
    try:
        saved_model = read_model_config(resumed)
    except ConfigError as error:
        raise ConfigError(f"--resume {folder}: {error}") from error
    _check_config(folder, resumed.get("config", config), config, saved_model, model)
    for key in ModelConfig.model_fields:
        if key in ("tokens", "verified", "huggingface"):  # data and configs are compared; the other changes nothing
            continue
        if getattr(model, key) != getattr(saved_model, key):
            saved, given = (show(one.model_dump(mode="json").get(key)) for one in (saved_model, model))
            raise ConfigError(
                f"--resume {folder}: was trained with model.{key} = {saved}, this run has {given}"
                f"{_remedy(key, folder, model)}"
            )
    return resumed


def _check_config(
    folder: Path,
    before: dict[str, Any] | None,
    now: dict[str, Any] | None,
    saved_model: ModelConfig,
    model: ModelConfig,
) -> None:
    """Refuse another ``config.json`` than the run began with. Weights are the checkpoint's."""
    before, now = before or {}, now or {}
    for key in sorted({*before, *now}.difference(ABOUT_CONFIG)):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"--resume {folder}: was trained with model.huggingface = {show(saved_model.huggingface)}, this run "
                f"has {show(model.huggingface)}: its {key} was {show(before.get(key))}, is {show(now.get(key))}"
            )


def _first_metadata(folder: Path, tag: str | None, others: Sequence[str]) -> dict[str, Any]:
    """Read the metadata of the checkpoint that is meant, or else of the first of ``others`` whose can be read.

    Raises:
        ConfigError: none can: the first error; or ``others`` is empty: names the checkpoints that are whole.
    """
    chosen = None
    try:
        chosen = find_checkpoint(folder, tag)
        return read_run_metadata(folder, chosen)
    except ConfigError as error:
        for other in others:
            with suppress(ConfigError):
                return read_run_metadata(folder, other)
        whole = whole_checkpoints(str(folder), besides=chosen) if chosen is not None and not others else []
        whole = [tag for tag in whole if can_be_resumed(folder, tag)]
        there = f"; other checkpoints there that are whole: {', '.join(whole)}" if whole else ""
        raise ConfigError(f"{error}{there}{other_checkpoints_hint(whole)}") from error


def can_be_resumed(folder: Path, tag: str | None = None) -> bool:
    """Return whether a run saved a checkpoint, and no script of the user's own; None: that which is meant."""
    with suppress(ConfigError):
        return bool(read_run_metadata(folder, find_checkpoint(folder) if tag is None else tag))
    return False


def other_checkpoints_hint(others: Sequence[str]) -> str:
    """Say how to go on from another checkpoint of the folder, if there are ``others``."""
    return "; --newest-whole goes on from the newest that is whole, --tag TAG from another" if others else ""


def _remedy(key: str, folder: Path, model: ModelConfig) -> str:
    """Say how a run whose layers are other pieces of the model goes on."""
    if key not in ("vocabulary_slices", "split_blocks") or model.huggingface is None:
        return ""
    merge = "" if model.peft is None else " --merge"
    return f"; ds-dynmo-export {folder} DIR{merge}, then --set model.huggingface=DIR without --resume begins with any"


def total_steps(requested: int | None, folder: Path, resumed: dict[str, Any], model: ModelConfig) -> int:
    """Return the batches of a resumed run. It keeps its number if the model changes at fractions of it.

    Args:
        requested: by ``--steps``.

    Raises:
        ConfigError: naming ``--steps``, with both numbers.
    """
    steps: int = resumed["steps"] if requested is None else requested
    scheduled = [case.kind for case in model.case if case.follows_steps]
    if steps != resumed["steps"] and scheduled:
        raise ConfigError(
            f"--steps {steps}: the run in {folder} has {resumed['steps']} steps in total, and "
            f"model.case ({', '.join(scheduled)}) would change the model at others than it did, at fractions "
            f"of {steps}; leave --steps out, --stop-at ends a run earlier"
        )
    if resumed["step"] >= steps:
        raise ConfigError(f"--resume {folder}: is at step {resumed['step']}, --steps {steps} leaves nothing to do")
    return steps


def _tags(folder: Path) -> list[str]:
    """List the checkpoints that are whole, by step. Of those of stock DeepSpeed only the latest is known to be."""
    names = {tag for entry in os.scandir(folder) if entry.is_dir() and (tag := folders.tag_of(entry.name)) is not None}
    latest = folders.read_latest(str(folder))
    tags = {name for name in names if name == latest or (checkpoint_folder(folder, name) / MANIFEST).is_file()}
    return sorted(tags, key=lambda tag: (len(tag), tag))


def checkpoint_folder(folder: Path, tag: str) -> Path:
    """Return the folder of a checkpoint."""
    return Path(folders.find(str(folder), tag) or folder / tag)
