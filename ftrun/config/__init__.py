"""Settings of a run: the profile, the node, the run; and the check of values against them."""
