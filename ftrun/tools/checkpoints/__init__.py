"""Checkpoints between runs: list, verify, prune, convert."""
