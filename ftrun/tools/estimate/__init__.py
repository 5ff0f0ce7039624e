"""DECISION: what failures cost a run on paper: goodput, survival of snapshots, spares."""
