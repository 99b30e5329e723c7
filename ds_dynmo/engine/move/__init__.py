"""Bring state from where it is to where it will be."""
