"""DECISION: which snapshots exist, and what each holds."""
