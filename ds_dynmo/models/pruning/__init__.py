"""Gradual global magnitude pruning: when and what is pruned, and linear layers that compute the rest only."""
