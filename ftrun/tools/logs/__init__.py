"""`ftrun logs`: the ranks' output of one run, merged, filtered and followed."""
