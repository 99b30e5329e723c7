"""Mixture of depths: blocks that take some of the tokens, those that their router weighs most."""
