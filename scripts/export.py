"""Export the weights of a checkpoint: ds-dynmo-export, from a checkout."""

from __future__ import annotations

import sys

from ds_dynmo.cli.export import main

if __name__ == "__main__":
    sys.exit(main())
