"""Draw the report of a run: ds-dynmo-plot, from a checkout."""

from __future__ import annotations

import sys

from ds_dynmo.cli.plot import main

if __name__ == "__main__":
    sys.exit(main())
