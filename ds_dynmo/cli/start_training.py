"""Start ds-dynmo-train: check its configuration, then import what trains.

A rank needs ten seconds and more to import torch and DeepSpeed. A typo should not take that long.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress

from ds_dynmo.cli.command_line import add_changes, refuse_on_ranks
from ds_dynmo.config import check_deepspeed_keys, load_settings, read_dynmo_config
from ds_dynmo.errors import ConfigError
from ds_dynmo.launch import set_rank_variables


def main(arguments: list[str] | None = None) -> int:
    try:
        check_configuration(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        with suppress(ConfigError):  # the first error is said
            set_rank_variables()
        return refuse_on_ranks(error)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store logs stacks; the engine says it in one line
    from ds_dynmo.cli.train import main as train

    return train(arguments)


def check_configuration(arguments: list[str]) -> None:
    """Check the JSON, its "dynmo" section and DeepSpeed's keys. Other errors, and those of options, are found later.

    Raises:
        ConfigError: the file cannot be read, a change cannot be made, the section is invalid, or a key that training
            needs is.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--deepspeed_config")
    add_changes(parser)
    try:
        known = parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError:
        return
    if known.deepspeed_config is not None:
        settings = load_settings(known.deepspeed_config, known.changes)
        read_dynmo_config(settings)
        check_deepspeed_keys(settings)


if __name__ == "__main__":
    sys.exit(main())
