"""Bring layers and their state from where they are to where they will be: layouts, routes, pickles, messages."""
