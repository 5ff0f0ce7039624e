"""DECISION: what is wrong, and who."""
