"""Restore into another world size or layout."""
