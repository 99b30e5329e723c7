#!/usr/bin/env python3
"""Export the weights of a pruned model from a checkpoint of scripts/train.py: dense, with zeros.

    python scripts/export.py run dense

Writes a file per layer, named as DeepSpeed's. Each is the state_dict of that layer of the model without pruning.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ds_dynmo.cli.training.options import RESUME_FILE
from ds_dynmo.config import load_json
from ds_dynmo.errors import CheckpointError, ConfigError
from ds_dynmo.models import model_layers, read_model_config
from ds_dynmo.models.pruning import export


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="the folder given to --save")
    parser.add_argument("folder", type=Path, help="where to write to; empty, or not there")
    arguments = parser.parse_args(given)
    try:
        saved = load_json(arguments.checkpoint / RESUME_FILE)
        model = read_model_config(saved)
        if model.pruning is None:
            raise ConfigError(f"{arguments.checkpoint}: model.pruning = null: its weights are dense already")
        export(model_layers(model), arguments.checkpoint / saved["tag"], arguments.folder)
    except (CheckpointError, ConfigError) as error:
        print(f"export.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
