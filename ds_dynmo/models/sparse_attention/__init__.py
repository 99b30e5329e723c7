"""Dynamic sparse attention: which pairs of tokens attend, and kernels that compute these pairs only."""
