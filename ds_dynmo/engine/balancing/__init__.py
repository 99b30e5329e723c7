"""Decide: when (trigger), where and whether (policy), and among neighbours alone (decentralized)."""
