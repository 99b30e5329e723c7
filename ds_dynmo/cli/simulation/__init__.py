"""The runs that ``ds-dynmo-simulate`` simulates."""
