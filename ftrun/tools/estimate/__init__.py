"""DECISION: what failures will cost a run, on paper: goodput, survival of snapshots, spares."""
