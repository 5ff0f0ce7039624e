"""DECISION: when ranks leave a path that has failed."""
