"""Export the weights of a checkpoint of ds-dynmo-train.

    ds-dynmo-export run exported

Of a Hugging Face model: what transformers' from_pretrained reads, with the tokenizer of the model's folder. Of one with
adapters: what peft's from_pretrained reads; with --merge, the whole model. Of a model of our own that is pruned, or has
its vocabulary in slices: dense weights, with zeros, in a file per layer, named as DeepSpeed's. Each is the state_dict
of that layer of the same model without pruning and slices.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ds_dynmo.cli.command_line import OneLineParser, refuse
from ds_dynmo.cli.training.resuming import checkpoint_folder, find_checkpoint, read_run_metadata
from ds_dynmo.config.explain import show
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import PruningConfig, huggingface, model_layers, read_model_config
from ds_dynmo.models.pruning.exporting import export as export_plain

__all__ = ["export"]


def export(checkpoint: Path, folder: Path, *, tag: str | None = None, merge: bool = False) -> None:
    """Export a checkpoint of a run.

    Args:
        checkpoint: the folder given to ``--save``.
        folder: is empty, or does not exist.
        tag: of the checkpoint; None: the latest.
        merge: add adapters to the weights, and write the whole model.

    Raises:
        CheckpointError, ConfigError: saying what is missing or cannot be exported.
    """
    tag = find_checkpoint(checkpoint, tag)
    model, weights = read_model_config(read_run_metadata(checkpoint, tag)), checkpoint_folder(checkpoint, tag)
    if model.huggingface is not None:
        if isinstance(model.huggingface, str) and not Path(model.huggingface).exists():
            raise ConfigError(
                f"{checkpoint}: was trained with model.huggingface = {show(model.huggingface)}, where nothing is: make "
                "a link there to the model's folder, or start in the folder that the path begins in"
            )
        huggingface.export(
            *(model.huggingface, weights, folder),
            peft=model.peft,
            merge=merge,
            vocabulary_slices=model.vocabulary_slices,
            split_blocks=model.split_blocks,
            untie=model.untie,
        )
    elif model.find_case(PruningConfig) is not None or model.num_vocabulary_slices:
        export_plain(model_layers(model), weights, folder)
    else:
        raise ConfigError(
            f'{checkpoint}: model.case has no kind "pruning", model.vocabulary_slices is null: its weights are dense '
            "and whole already"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(__doc__, prog="ds-dynmo-export")
    parser.add_argument("checkpoint", type=Path, help="the folder given to --save")
    parser.add_argument("folder", type=Path, help="where to write to; empty, or not there")
    parser.add_argument("--tag", help="export this checkpoint, not the latest")
    parser.add_argument("--merge", action="store_true", help="write the whole model, adapters added to its weights")
    args = parser.parse_args(arguments)
    try:
        export(args.checkpoint, args.folder, tag=args.tag, merge=args.merge)
    except (CheckpointError, ConfigError) as error:
        return refuse("ds-dynmo-export", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
