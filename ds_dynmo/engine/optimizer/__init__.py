"""Optimizer state that follows the layers: per parameter, or in DeepSpeed's flat buffers."""
