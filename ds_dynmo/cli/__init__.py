"""The commands that the package installs: ``ds-dynmo-train``, ``-simulate``, ``-plot`` and ``-watch``."""
