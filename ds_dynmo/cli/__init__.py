"""The commands that the package installs: ``ds-dynmo-train``, ``ds-dynmo-simulate``, ``ds-dynmo-plot``."""
