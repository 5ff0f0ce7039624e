"""`ftrun logs`: the output of a run's ranks, merged, filtered and followed."""
