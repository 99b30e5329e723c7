"""Communicate: the only package whose code calls collectives and point-to-point operations of our own."""
