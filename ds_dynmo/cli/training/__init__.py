"""What ``ds-dynmo-train`` reads and writes."""
