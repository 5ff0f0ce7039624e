"""DECISION: what to do about it."""
