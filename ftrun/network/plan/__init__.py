"""DECISION: which rails and which order of nodes a generation uses."""
