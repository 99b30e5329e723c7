"""Objects as bytes: pickling that resolves what layers share, and graphs of references."""
