"""What a rank holds for its layers: parameters by key, layers as records, the optimizer's state, which follows them."""
