"""What a stage holds for its layers: parameters by key, and the optimizer's state for them."""
