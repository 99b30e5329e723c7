"""For tools that look for a setup.py: everything is in pyproject.toml."""

from setuptools import setup

setup()
