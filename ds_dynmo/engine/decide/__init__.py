"""Decide: when, where layers go, by which schedule; say what was decided."""
