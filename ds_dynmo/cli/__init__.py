"""The commands that the package installs: ``ds-dynmo-train``, ``-export``, ``-simulate``, ``-plot`` and ``-watch``."""
