"""Save checkpoints, and load them at any partition: see ``writing`` and ``reading``."""
