"""Restore into another world size."""
