"""Everything that relies on DeepSpeed beyond its public API, and patches of it."""
