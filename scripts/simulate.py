"""Simulate a pipeline from what a run measured: ds-dynmo-simulate, from a checkout."""

from __future__ import annotations

import sys

from ds_dynmo.cli.simulate import main

if __name__ == "__main__":
    sys.exit(main())
