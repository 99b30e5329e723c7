"""Train a language model in a pipeline that re-balances itself: ds-dynmo-train, from a checkout."""

from __future__ import annotations

import sys

from ds_dynmo.cli.start_training import main

if __name__ == "__main__":
    sys.exit(main())
