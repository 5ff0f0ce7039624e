"""Checkpoints: written from memory, read back, shared between nodes."""
