"""Activate the emulated device in every Python program that a test starts; Python imports this by its name."""

from tests import emulated

if emulated.is_asked_for():
    emulated.activate()
