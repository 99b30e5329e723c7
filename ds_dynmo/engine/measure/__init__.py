"""Measure: seconds and bytes per layer, and timelines."""
