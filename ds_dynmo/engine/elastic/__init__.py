"""Change the number of ranks during a run: move layers off ranks that leave, and go on in a world of another size."""
