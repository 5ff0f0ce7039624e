"""DECISION: what to do about a run: supervisor, incidents, restore point. Runs on the leader."""
