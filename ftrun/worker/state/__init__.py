"""Attached objects as a tree of tensors and plain values."""
