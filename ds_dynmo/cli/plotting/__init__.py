"""The pictures and the page of ``ds-dynmo-plot``."""
