"""Communicate: the only package of ds_dynmo that calls collectives and point-to-point operations."""
