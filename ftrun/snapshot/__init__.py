"""DECISION: which snapshots exist, and what is in them."""
