"""The pictures of ``ds-dynmo-plot``."""
