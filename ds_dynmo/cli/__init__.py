"""The commands that the package installs: ``ds-dynmo-train``, ``-export``, ``-simulate`` and ``-plot``."""
