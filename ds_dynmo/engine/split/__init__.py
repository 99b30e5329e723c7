"""Run a batch by one of ds_dynmo's schedules: its steps, passes in two parts, messages between stages."""
