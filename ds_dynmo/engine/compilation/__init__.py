"""Layers that torch compiles."""
