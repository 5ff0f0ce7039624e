"""DECISION: when ranks stop using a failed path."""
