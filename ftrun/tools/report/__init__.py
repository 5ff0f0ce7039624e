"""`ftrun report`: incidents and the cost of a run, from its journal."""
