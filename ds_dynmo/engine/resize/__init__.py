"""Change the number of ranks during a run: layers leave the ranks that go, and a world of another size goes on."""
