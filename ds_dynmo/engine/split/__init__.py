"""Run a batch by a schedule of ours: its steps, passes in two parts, and what stages send each other."""
