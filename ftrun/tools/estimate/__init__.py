"""DECISION: the expected cost of failures: goodput, survival of snapshots, spares."""
