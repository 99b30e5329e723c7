"""Simulate what rebalancing gains: ds-dynmo-simulate, from a checkout."""

from __future__ import annotations

from ds_dynmo.cli.simulate import main

if __name__ == "__main__":
    main()
