"""Follow the report of a run while it is written: what it says so far, and how to show it."""
