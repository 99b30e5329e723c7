"""Move layers between stages with all that is theirs."""
